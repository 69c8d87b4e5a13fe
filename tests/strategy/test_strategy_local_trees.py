"""To jax a value per replica is its values, whichever way it is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.strategy import Mirrored, PerReplica

R = 8
WHOLE = np.random.default_rng(0).normal(size=(R * 4,)).astype(np.float32)
ROWS = WHOLE.reshape(R, 4)

ALONG_THE_ROWS = {
    "softmax": jax.nn.softmax,
    "cumsum": jnp.cumsum,
    "reversed": lambda x: x[::-1],
    "mean": jnp.mean,
    "shape": lambda x: x.shape[0],
}


@pytest.fixture(params=["mirrored", "central storage", "tpu"])
def strategy(request):
    if request.param == "mirrored":
        return zs.MirroredStrategy()
    if request.param == "tpu":
        return zs.TPUStrategy()
    devices = [f"CPU:{n}" for n in range(R)]
    return zs.CentralStorageStrategy(compute_devices=devices)


def joined(strategy):
    """A value per replica that is one array over the devices."""
    value = next(iter(strategy.experimental_distribute_dataset([WHOLE])))
    assert isinstance(value.whole, jax.Array)
    return value


@pytest.mark.parametrize("name", ALONG_THE_ROWS)
def test_a_map_calls_its_function_for_each_replica(strategy, name):
    """Also in a step, and in what the user compiles."""
    fn = ALONG_THE_ROWS[name]

    def mapped(value):
        found = jax.tree.map(fn, value)
        assert isinstance(found, PerReplica)
        return strategy.experimental_local_results(found)

    for do in (mapped, zs.function(mapped), jax.jit(mapped)):
        for value, row in zip(do(joined(strategy)), ROWS, strict=True):
            np.testing.assert_allclose(value, fn(jnp.asarray(row)), rtol=1e-5)


def test_scalars_are_one_leaf_for_each_replica(strategy):
    value = joined(strategy)
    means, found = strategy.run(zs.function(lambda x: (x.mean(), x * 2)), args=(value,))
    assert means.is_stacked
    leaves = jax.tree.leaves({"loss": means})
    assert [leaf.shape for leaf in leaves] == [()] * R
    np.testing.assert_allclose(leaves, ROWS.mean(1), rtol=1e-5)
    np.testing.assert_array_equal(found.whole, 2 * WHOLE)
    assert value._values is None, "its parts were made"


def test_parts_of_unlike_layouts_are_mapped_together(strategy):
    apart = PerReplica(list(ROWS))
    assert apart.whole is None
    total = jax.tree.map(jnp.add, joined(strategy), apart)
    np.testing.assert_allclose(
        strategy.experimental_local_results(total), 2 * ROWS, rtol=1e-6
    )


def test_what_was_mapped_goes_into_run_and_reduce(strategy):
    total = jax.tree.map(jnp.cumsum, joined(strategy))
    last = strategy.run(zs.function(lambda x: x[-1]), args=(total,))
    expected = ROWS.sum(axis=1)
    np.testing.assert_allclose(
        strategy.experimental_local_results(last), expected, rtol=1e-5
    )
    np.testing.assert_allclose(
        strategy.reduce("SUM", total, axis=None),
        np.cumsum(ROWS, 1).sum(0),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_mirrored_value_is_mapped_as_its_values():
    strategy = zs.MirroredStrategy()
    with strategy.scope():
        variable = zs.Variable(ROWS[0])
    value = strategy.extended.reduce_to("MEAN", joined(strategy), variable)
    assert isinstance(value, Mirrored)
    found = jax.tree.map(jax.nn.softmax, value)
    assert isinstance(found, Mirrored)
    expected = jax.nn.softmax(jnp.asarray(ROWS.mean(0)))
    np.testing.assert_allclose(found.values, [expected] * R, rtol=1e-5)


def test_one_array_goes_through_a_step_as_it_is(strategy):
    """Nothing is taken apart, so a step has one input and one output for it."""
    value = joined(strategy)

    @zs.function
    def step(value):
        return strategy.run(lambda x: x * 2, args=(value,))

    found = step(value)
    assert isinstance(found.whole, jax.Array)
    np.testing.assert_array_equal(found.whole, 2 * WHOLE)
    assert found.whole.sharding.is_equivalent_to(value.whole.sharding, 1)
    assert len(step.plan((value,)).out_specs) == 1
    assert value._values is None, "its parts were made"
