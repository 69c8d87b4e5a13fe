"""What replicas in turns may not bring together, and where they may not meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def number():
    """Python looks at it, so replicas run in turns."""
    return int(zs.get_replica_context().replica_id_in_sync_group)


ROWS = zs.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (2, 2))
UNLIKE = [
    (lambda: jnp.ones(1 + 2 * number()), r"\(1,\).*\(3,\)"),
    (lambda: jnp.ones(2 + number()), r"\(2,\).*\(3,\)"),
    (lambda: 1.0 if number() else np.ones(2), r"\(2,\)"),
    (lambda: jnp.ones((2, 2)) if number() else ROWS, "IndexedSlices"),
    (lambda: ROWS if number() else jnp.ones((2, 2)), "IndexedSlices"),
    (lambda: [1.0] * (1 + number()), "different structures"),
]


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("value", "words"), UNLIKE)
def test_what_is_not_alike_is_not_added(two, value, words, in_step):
    def reduced():
        return two.run(lambda: zs.get_replica_context().all_reduce("sum", value()))

    with pytest.raises(ValueError, match=words):
        (zs.function(reduced) if in_step else reduced)()


def test_nor_is_it_gathered(two):
    def gathered(value, axis):
        def fn():
            return zs.get_replica_context().all_gather(value(), axis)

        return two.run(fn)

    with pytest.raises(ValueError, match="PyTreeDef"):
        gathered(lambda: [np.ones(1)] * (1 + number()), 0)
    with pytest.raises(ValueError, match="all_gather"):
        gathered(lambda: jnp.ones((2, 1 + number())), 0)
    found = gathered(lambda: jnp.full((2, 1 + number()), number()), 1)
    assert [x.tolist() for x in found.values] == [[[0, 1, 1]] * 2] * 2


@pytest.mark.parametrize("names", [["CPU:0"], ["CPU:0", "CPU:1"]])
@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("in_step", [False, True])
def test_there_is_such_an_axis(names, axis, in_step):
    strategy = zs.MirroredStrategy(names)

    def gathered():
        return strategy.run(
            lambda: zs.get_replica_context().all_gather([jnp.ones(2)], axis)
        )

    with pytest.raises(ValueError, match=rf"axis {axis} is out of bounds .*\(2,\)"):
        (zs.function(gathered) if in_step else gathered)()


def scanned(fn):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


WAYS = {"jit": jax.jit, "grad": jax.grad, "vmap": jax.vmap, "scan": scanned}


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_merge_call_inside_of_what_jax_transforms(two, way, in_step):
    def merging(x):
        zs.get_replica_context().merge_call(lambda strategy: None)
        return x * x

    def call():
        x = jnp.ones(2) if way == "vmap" else jnp.float32(1)
        return two.run(WAYS[way](merging), (x,))

    words = "merge_call"
    with pytest.raises(RuntimeError, match=words):
        (zs.function(call) if in_step else call)()
    assert not zs.has_strategy()
