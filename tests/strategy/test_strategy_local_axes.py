"""The axis of what is gathered and reduced: any integer, of Python or of an array."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

SINGLE = np.arange(6).reshape(1, 2, 3)


STRATEGIES = {
    "mirrored": lambda: zs.MirroredStrategy([f"CPU:{n}" for n in range(4)]),
    "tpu": zs.TPUStrategy,
}


@pytest.fixture(params=sorted(STRATEGIES))
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture
def mirrored():
    return STRATEGIES["mirrored"]()


@pytest.fixture
def values(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda _: jnp.asarray(SINGLE)
    )


KINDS = [int, np.int64, np.array, jnp.int32, jnp.asarray]


def whole(strategy, axis):
    return np.concatenate([SINGLE] * strategy.num_replicas_in_sync, axis)


@pytest.mark.shows("gather(axis=)")
def test_tensorflows_example_of_gather_in_a_function(strategy, values):
    """It is called with the axis, which here is bound; or the function is eager."""

    def run(axis):
        return strategy.gather(values, axis=axis)

    eager = zs.function(run, eager=True)
    for axis in range(3):
        bound = zs.function(functools.partial(run, axis=axis))
        for found in (bound(), eager(axis), eager(jnp.int32(axis))):
            np.testing.assert_array_equal(found, whole(strategy, axis))


def test_an_axis_among_the_numbers_of_a_step_is_refused_in_words(strategy, values):
    words = r"zs\.function"
    gather = zs.function(lambda axis: strategy.gather(values, axis))
    reduce = zs.function(lambda axis: strategy.reduce("sum", values, axis))
    for step in (gather, reduce):
        with pytest.raises(TypeError, match=words):
            step(0)


@pytest.mark.shows("TPUStrategy.gather")
@pytest.mark.shows("TPUStrategy.reduce")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_an_axis_of_any_kind(strategy, values, kind, axis):
    given = kind(axis)
    gathered = strategy.gather(values, given)
    np.testing.assert_array_equal(gathered, whole(strategy, axis))
    all_of_it = SINGLE.sum(axis) * strategy.num_replicas_in_sync
    np.testing.assert_array_equal(strategy.reduce("sum", values, given), all_of_it)
    several = strategy.reduce("mean", values, (kind(0), given if axis else kind(2)))
    np.testing.assert_allclose(several, SINGLE.mean((0, axis or 2)), rtol=1e-6)


@pytest.mark.shows("tf.distribute.ReplicaContext.all_gather")
@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_of_any_kind_in_a_replica(mirrored, kind):
    def replica_fn(x, axis):
        context = zs.get_replica_context()
        return context.all_gather(x, kind(1)), context.all_gather(x, axis)

    found = mirrored.run(replica_fn, args=(jnp.asarray(SINGLE), kind(2)))
    inner, given = mirrored.experimental_local_results(found)[-1]
    np.testing.assert_array_equal(inner, whole(mirrored, 1))
    np.testing.assert_array_equal(given, whole(mirrored, 2))


@pytest.mark.parametrize(
    "axis", [True, np.True_, 0.5, "0", [0], np.array([0]), jnp.float32(0)], ids=repr
)
def test_what_is_no_integer_is_refused(strategy, values, axis):
    with pytest.raises(TypeError, match="gather: axis must be an integer, got"):
        strategy.gather(values, axis)
    with pytest.raises(TypeError, match="reduce: axis must be an integer, got"):
        strategy.reduce("sum", values, (axis,))


@pytest.mark.parametrize("axis", [None, True, 0.5, np.array([0])], ids=repr)
def test_nor_is_it_in_a_replica(mirrored, axis):
    def replica_fn():
        return zs.get_replica_context().all_gather(jnp.ones(2), axis)

    with pytest.raises(TypeError, match="all_gather"):
        mirrored.run(replica_fn)
