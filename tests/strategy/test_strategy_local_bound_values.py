"""Values that are bound to the device of their replica, as all are on accelerators, and
integers that jax would cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def variable(two):
    with two.scope():
        return zs.Variable(0.0, name="bound", dtype="float32")


def bound(make):
    """A value that replica i has on device i alone."""
    return zs.PerReplica(
        tuple(jax.device_put(make(n), jax.devices()[n]) for n in range(2))
    )


def context():
    return zs.get_replica_context()


OPS = [
    zs.ReductionToOneDevice(),
    zs.ReductionToOneDevice(1),
    zs.NcclAllReduce(),
    zs.NcclAllReduce(num_packs=0),
    zs.HierarchicalCopyAllReduce(),
]


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("where", ["CPU:0", "CPU:1", "all"])
def test_they_are_reduced(ops, where):
    value = bound(lambda n: jnp.array([n + 1.0, 5.0]))
    destination = value if where == "all" else f"/device:{where}"
    found, other = ops.batch_reduce("mean", [(value, destination), (value, value)])
    for result in (found, other):
        parts = result.values if isinstance(result, zs.DistributedValues) else [result]
        for part in parts:
            np.testing.assert_array_equal(part, [1.5, 5.0])


def test_reduce_to_of_them(two, variable):
    value = bound(lambda n: jnp.array([n + 1.0]))
    found = two.extended.reduce_to("SUM", value, variable)
    for part in two.experimental_local_results(found):
        np.testing.assert_array_equal(part, [3.0])
    np.testing.assert_array_equal(two.reduce("sum", value, axis=None), [3.0])


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_rows_of_them(two, op):
    value = zs.PerReplica(
        tuple(
            zs.IndexedSlices(
                jax.device_put(jnp.array([[n + 1.0]]), device),
                jax.device_put(jnp.array([n]), device),
                (4, 1),
            )
            for n, device in enumerate(jax.devices()[:2])
        )
    )
    weight = 1 if op == "sum" else 2
    for rows in (
        two.reduce(op, value, axis=None),
        two.extended.reduce_to(op, value, "/device:CPU:1"),
    ):
        np.testing.assert_array_equal(rows.indices, [0, 1])
        np.testing.assert_array_equal(rows.values, np.array([[1.0], [2.0]]) / weight)
        assert rows.dense_shape == (4, 1)


MERGES = {
    "reduce": lambda strategy, x: strategy.reduce("sum", x, axis=None),
    "reduce_to": lambda strategy, x: strategy.extended.reduce_to("SUM", x, x),
    "one place": lambda s, x: s.extended.reduce_to("SUM", x, "/device:CPU:1"),
    "a tree": lambda s, x: {"a": [s.reduce("sum", x, axis=None)]}["a"][0],
}


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_what_a_merge_call_gives_is_on_the_device_of_the_replica(two, merge):
    def fn(x):
        return context().merge_call(merge, (x,)) * x

    for value in (
        bound(lambda n: jnp.array([n + 1.0, 2.0])),
        two.run(lambda x: x, (bound(lambda n: jnp.array([n + 1.0, 2.0])),)),
    ):
        found = two.run(fn, (value,))
        for number, part in enumerate(found.values):
            np.testing.assert_array_equal(part, [3.0 * (number + 1), 8.0])
            assert part.devices() == {jax.devices()[number]}


def test_a_merge_call_in_a_step_of_the_user(two):
    @zs.function
    def step(x):
        def fn(x):
            return context().merge_call(MERGES["reduce"], (x,)) * x

        return two.run(fn, (x,))

    found = step(two.run(lambda x: x, (bound(lambda n: jnp.array([n + 1.0])),)))
    assert [float(part[0]) for part in found.values] == [3.0, 6.0]


def test_what_is_bound_to_no_device_is_the_same_object(two):
    shared = jnp.ones(2)

    def fn():
        return context().merge_call(lambda strategy: shared)

    assert two.run(fn) is shared


def test_integers_of_64_bits_are_not_cut(two, variable):
    big = zs.PerReplica((np.array(3_000_000_000), np.array(3_000_000_000)))
    found = two.extended.reduce_to("SUM", big, variable)
    assert [int(x) for x in found.values] == [6_000_000_000] * 2
    assert isinstance(found, zs.Mirrored)
    found = two.extended.broadcast_to(np.array([6_000_000_000]), variable)
    assert [x.tolist() for x in found.values] == [[6_000_000_000]] * 2
    found = two.extended.broadcast_to(np.array([6]), variable)
    assert [x.devices() for x in found.values] == [{d} for d in jax.devices()[:2]]
