"""What is reduced and gathered outside of the replicas: by every reduction between
devices, of values that lie in every way, to every destination, at once and in a step.
The oracle is numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import combined

import zstrat as zs

D = jax.devices()
R = 4
ORDER = [2, 0, 3, 1]
NAMES = [f"CPU:{n}" for n in ORDER]
OPS = {
    "one device": zs.ReductionToOneDevice,
    "the second device": lambda: zs.ReductionToOneDevice(1),
    "a function": lambda: zs.ReductionToOneDevice(0, lambda arrays: sum(arrays)),
    "nccl": zs.NcclAllReduce,
    "nccl in packs": lambda: zs.NcclAllReduce(num_packs=3),
    "hierarchical": lambda: zs.HierarchicalCopyAllReduce(num_packs=0),
}
DTYPES = ["f4", "f2", jnp.bfloat16, "i4", "u1", "i1", "?", "c8"]
ROWS = jax.NamedSharding(
    jax.sharding.Mesh(np.array(D[:R]), ("replica",)), jax.P("replica")
)


def one_array(values):
    """As what a replica function returned."""
    is_scalar = not np.shape(values[0])
    whole = (np.array if is_scalar else np.concatenate)(values)
    return zs.PerReplica.of_whole(jax.device_put(whole, ROWS), R, stacked=is_scalar)


def views(values):
    """Bound to no device, as the views of such a value are."""
    return zs.PerReplica(one_array(values).values)


def bound(values):
    """As on accelerators: a replica has its value on its device alone."""
    return zs.PerReplica([jax.device_put(x, D[n]) for n, x in enumerate(values)])


def on_two_devices(values):
    return zs.PerReplica([jax.device_put(x, D[n % 2]) for n, x in enumerate(values)])


def on_the_host(values):
    return zs.PerReplica(list(values))


def variable(values):
    """Whose copies have the values; in the scope of its strategy."""
    return variable_of(zs.VariableSynchronization.AUTO, values)


def variable_on_read(values):
    return variable_of(zs.VariableSynchronization.ON_READ, values)


def variable_of(synchronization, values):
    strategy = zs.get_strategy()
    v = zs.Variable(np.zeros_like(values[0]), synchronization=synchronization)
    strategy.run(v.assign, args=(on_the_host(values),))
    return v


KINDS = [one_array, views, bound, on_two_devices, on_the_host]
VARIABLES = [variable, variable_on_read]


def places_of(value):
    """None for what numpy has, which is there, too."""
    parts = value.values if isinstance(value, zs.DistributedValues) else [value]
    arrays = [isinstance(part, jax.Array) for part in parts]
    assert all(arrays) or len(parts) == 1
    return [next(iter(part.devices())) for part in parts] if all(arrays) else None


def expected_of(op, values, axes=None):
    """Booleans are counted, means of integers are floats, narrow ones wrap in sums."""
    values = np.asarray(values)
    over = (
        0,
        *[axis % (values.ndim - 1) + 1 for axis in (() if axes is None else axes)],
    )
    if op == "sum":
        dtype = np.int32 if values.dtype == bool else values.dtype
        return values.sum(over, dtype=dtype)
    if values.dtype.kind in "iub":
        return values.astype(float).mean(over).astype(np.float32)
    return values.mean(over, dtype=values.dtype)


def require_equal(found, expected):
    dtype = jax.dtypes.canonicalize_dtype(found.dtype)  # numpy counts in 64 bits
    assert (dtype, found.shape) == (expected.dtype, expected.shape)
    wide = np.complex128 if expected.dtype.kind == "c" else float
    rtol = 1e-2 if expected.dtype.itemsize == 2 else 1e-6
    np.testing.assert_allclose(
        np.asarray(found).astype(wide), expected.astype(wide), rtol=rtol, atol=1e-6
    )


def numbers(dtype, shape):
    rng = np.random.default_rng(0)
    if dtype == "f4":
        return list(rng.normal(size=(R, *shape)).astype(dtype))
    return list(rng.integers(0, 100, (R, *shape)).astype(dtype))


DESTINATIONS = {
    "CPU:1": [1],
    "/job:localhost/replica:0/task:0/device:CPU:6": [6],
    **{
        tuple(devices): devices
        for devices in [[0, 1, 2, 3], [1, 2], [2, 0], [1, 7], [3, 5, 3, 5], [*range(8)]]
    },
    0: [0],
    7: [7],
    (0.0, 1.0, 2.0): None,
    (np.float32(0), np.float32(1)): None,
}
"""The name of a device, devices of a value per replica, or that of an array."""


def destination_of(given):
    if isinstance(given, str):
        return given
    if isinstance(given, int):
        return jax.device_put(0.0, D[given])
    if DESTINATIONS[given] is None:
        return zs.PerReplica(given)
    return zs.PerReplica([jax.device_put(0.0, D[n]) for n in given])


def require_there(found, given, expected):
    """The value is that of the destination, with one entry for each of its replicas."""
    assert isinstance(found, zs.Mirrored) == isinstance(given, tuple)
    parts = found.values if isinstance(given, tuple) else [found]
    assert len(parts) == len(given if isinstance(given, tuple) else [given])
    if DESTINATIONS[given] is not None:
        assert places_of(found) in (None, [D[n] for n in DESTINATIONS[given]])
    for part in parts:
        require_equal(part, expected)


@pytest.mark.shows("CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce")
@pytest.mark.shows("ReductionToOneDevice")
@pytest.mark.parametrize(("name", "kind"), combined([*OPS], KINDS, step=3))
def test_a_batch_of_all_dtypes_to_all_destinations(name, kind):
    ops = OPS[name]()
    cases = [(dtype, shape) for dtype in DTYPES for shape in [(), (2, 3)]]
    where = [*DESTINATIONS] * 2
    pairs = [
        (kind(numbers(dtype, shape)), destination_of(given))
        for (dtype, shape), given in zip(cases, where, strict=False)
    ]
    for op in ("sum", "mean"):
        results = ops.batch_reduce(op, pairs)
        for (dtype, shape), given, found in zip(cases, where, results, strict=False):
            require_there(found, given, expected_of(op, numbers(dtype, shape)))


@pytest.mark.parametrize("name", OPS)
def test_a_broadcast_to_all_destinations(name):
    for value in (np.ones(2, np.float32), jnp.ones(2)):
        for given in DESTINATIONS:
            found = OPS[name]().broadcast(value, destination_of(given))
            require_there(found, given, np.ones(2, np.float32))
    assert OPS[name]().broadcast(5, "CPU:1") == 5


@pytest.mark.shows("tf.distribute.StrategyExtended.reduce_to")
@pytest.mark.shows("tf.distribute.StrategyExtended.batch_reduce_to")
@pytest.mark.parametrize(
    ("name", "kind"), combined([*OPS], [*KINDS, *VARIABLES], step=4)
)
def test_what_the_strategy_reduces(name, kind):
    strategy = zs.MirroredStrategy(NAMES, cross_device_ops=OPS[name]())
    with strategy.scope():
        there = zs.Variable(0.0)
        values = numbers("f4", (2, 3))
        value = kind(values)
    rows = zs.PerReplica(
        [zs.IndexedSlices(jnp.full((1, 2), n), jnp.array([n % 2])) for n in range(R)]
    )

    for op in ("sum", "mean"):
        wanted = expected_of(op, values)
        for do in (lambda fn: fn(), lambda fn: zs.function(fn)()):
            require_equal(do(lambda op=op: strategy.reduce(op, value, None)), wanted)
            with strategy.scope():
                to = functools.partial(strategy.extended.reduce_to, op)
                require_equal(do(lambda to=to: to({"v": value}, "CPU:1")["v"]), wanted)
                found = do(lambda to=to: to(value, there))
                for part in strategy.experimental_local_results(found):
                    require_equal(part, wanted)
        with strategy.scope():
            pairs = [({"a": value, "b": [value]}, there), (rows, there), (value, there)]
            tree, joined, last = strategy.extended.batch_reduce_to(op, pairs)
            assert strategy.extended.batch_reduce_to(op, []) == []
            assert strategy.experimental_local_results(joined)[0].indices.tolist() == [
                *(0, 1, 0, 1)
            ]
            for each in (tree["a"], tree["b"][0], last):
                assert places_of(each) == [D[n] for n in ORDER]
                for part in each.values:
                    require_equal(part, wanted)


AXES = [None, 0, 1, -1, (0, 1), [1]]


@pytest.mark.parametrize(
    ("kind", "inside"), combined([*KINDS, *VARIABLES], [True, False])
)
def test_axes(kind, inside):
    strategy = zs.MirroredStrategy(NAMES)
    values = numbers("f4", (2, 3))
    with strategy.scope():
        value = kind(values)

    def step():
        reduced = [
            strategy.reduce(op, value, axis) for op in ("sum", "MEAN") for axis in AXES
        ]
        return reduced, [strategy.gather(value, axis) for axis in (0, 1, -1)]

    reduced, gathered = (zs.function(step) if inside else step)()
    wanted = [
        expected_of(op, values, None if axis is None else np.atleast_1d(axis))
        for op in ("sum", "mean")
        for axis in AXES
    ]
    for one, other in zip(reduced, wanted, strict=True):
        require_equal(one, np.asarray(other))
    for axis, found in zip((0, 1, -1), gathered, strict=True):
        np.testing.assert_array_equal(found, np.concatenate(values, axis))


@pytest.mark.parametrize("kind", KINDS)
def test_means_of_large_integers_do_not_wrap_on_the_way(kind):
    far = np.array([2**31 - 1, 2**30, 5], np.int32)
    strategy = zs.MirroredStrategy(NAMES)
    value = kind([far, far, far, far - 4])
    for found in (
        strategy.reduce("mean", value, None),
        strategy.extended.reduce_to("mean", value, "CPU:0"),
    ):
        np.testing.assert_allclose(found, far.astype(float) - 1, rtol=1e-7)
    total = strategy.reduce("mean", value, 0)
    np.testing.assert_allclose(total, far.astype(float).mean() - 1, rtol=1e-7)


@pytest.mark.parametrize("name", OPS)
def test_rows_and_what_lies_otherwise_keep_their_order(name):
    """Of numpy, sparse, without numbers, too wide for jax, of one replica."""
    there = one_array([np.float32(n) for n in range(R)])
    rows = [
        zs.IndexedSlices(jnp.full((1, 2), n), jnp.array([n]), (R, 2)) for n in range(R)
    ]
    bound_rows = [jax.device_put(x, D[n]) for n, x in enumerate(rows)]
    wide_rows = [
        zs.IndexedSlices(np.array([[2**40 + 4 * n]]), np.array([2**33 + n]))
        for n in range(R)
    ]
    values = [
        there,
        zs.PerReplica(rows),
        zs.PerReplica([np.array(3_000_000_000 + n) for n in range(R)]),
        zs.PerReplica([jnp.zeros((0, 2))] * R),
        one_array([np.zeros((0, 2), np.float32)] * R),
        zs.PerReplica([there.values[1]]),
        zs.PerReplica(bound_rows),
        there,
        zs.PerReplica([np.array(3_000_000_003), *[jnp.array(n) for n in (1, 2, 2)]]),
        zs.PerReplica(wide_rows),
        np.float32(5),
    ]
    for op, count in (("sum", 1), ("mean", R)):
        found = OPS[name]().batch_reduce(op, [(x, "CPU:1") for x in values])
        assert [float(found[n]) * count for n in (0, 5, 7)] == [6, count, 6]
        for sparse in (found[1], found[6]):
            assert sparse.indices.tolist() == [*range(R)]
            expected = np.arange(R)[:, None] * np.ones(2) / count
            np.testing.assert_array_equal(sparse.values, expected)
            assert sparse.dense_shape == (R, 2)
        assert int(found[2]) == 12_000_000_006 // count
        assert found[3].shape == found[4].shape == (0, 2)
        assert int(found[8]) == 3_000_000_008 // count
        assert found[9].indices.tolist() == [2**33 + n for n in range(R)]
        assert found[9].values[:, 0].tolist() == [
            (2**40 + 4 * n) / count for n in range(R)
        ]
        assert found[10] == 5
    copies = OPS[name]().reduce("sum", zs.PerReplica(rows), zs.PerReplica((0, 0)))
    assert [x.indices.tolist() for x in copies.values] == [[*range(R)]] * 2


@pytest.mark.parametrize("name", OPS)
def test_what_is_not_alike_is_refused(name):
    ops, there = OPS[name](), "CPU:0"
    parts = [jax.device_put(np.ones(n + 1), D[n]) for n in range(2)]
    with pytest.raises(ValueError, match=r"\(1,\).*\(2,\)"):
        ops.reduce("sum", zs.PerReplica(parts), there)
    # Together they have as many numbers in both replicas.
    both = [(zs.PerReplica(x), there) for x in (parts, parts[::-1])]
    with pytest.raises(ValueError, match=r"\(1,\).*\(2,\)"):
        ops.batch_reduce("sum", both)
    rows = zs.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
    with pytest.raises(ValueError, match="IndexedSlices"):
        ops.reduce("sum", zs.PerReplica((rows, np.ones((3, 2)))), there)
    with pytest.raises(TypeError, match="`per_replica_value`"):
        ops.reduce("sum", {"a": np.ones(2)}, there)


def test_what_replicas_share_counts_for_each_of_them():
    strategy = zs.MirroredStrategy(NAMES[:3])
    with strategy.scope():
        v = zs.Variable(np.float32(0.1), aggregation=zs.VariableAggregation.MEAN)
    # In float32 0.1 + 0.1 + 0.1 is not 3 * 0.1.
    for value in (v, zs.Mirrored((jnp.float32(0.1),) * 3)):
        for do in (lambda fn: fn(), lambda fn: zs.function(fn)()):
            for reduce in (
                lambda op, value=value: strategy.reduce(op, value),
                lambda op, value=value: strategy.extended.reduce_to(op, value, "CPU:0"),
            ):
                assert do(lambda reduce=reduce: reduce("mean")) == np.float32(0.1)
    assert strategy.extended.reduce_to("sum", v, "CPU:0") == np.float32(0.1) * 3


def test_integers_of_64_bits_are_not_cut():
    strategy = zs.MirroredStrategy(NAMES[:2])
    with strategy.scope():
        v = zs.Variable(0.0)
    big = zs.PerReplica((np.array(3_000_000_000), np.array(3_000_000_000)))
    found = strategy.extended.reduce_to("SUM", big, v)
    assert isinstance(found, zs.Mirrored)
    assert [int(x) for x in found.values] == [6_000_000_000] * 2
    found = strategy.extended.broadcast_to(np.array([6_000_000_000]), v)
    assert [x.tolist() for x in found.values] == [[6_000_000_000]] * 2
    found = strategy.extended.broadcast_to(np.array([6]), v)
    assert places_of(found) == [D[n] for n in ORDER[:2]]


@pytest.mark.parametrize("do", [lambda fn: fn(), lambda fn: zs.function(fn)()])
def test_what_replicas_share_is_gathered_from_each_of_them(do):
    strategy = zs.MirroredStrategy(NAMES[:2])
    with strategy.scope():
        v = zs.Variable([3.0, 5.0], aggregation=zs.VariableAggregation.MEAN)
    assert do(lambda: strategy.gather(v, 0)).tolist() == [3, 5, 3, 5]
    assert do(lambda: strategy.reduce("sum", {"v": [v]}, None))["v"][0].tolist() == [
        6,
        10,
    ]
    assert do(lambda: strategy.reduce("mean", v, 0)) == 4.0
