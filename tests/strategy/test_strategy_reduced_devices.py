"""Reductions between devices are those of ``strategy.reduce``: nothing wraps, is cut,
or fails because it is bound to a device."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

OPS = [
    zs.ReductionToOneDevice(),
    zs.ReductionToOneDevice(0),
    zs.NcclAllReduce(),
    zs.NcclAllReduce(num_packs=3),
    zs.HierarchicalCopyAllReduce(num_packs=0),
]
HERE = "/device:CPU:0"
KINDS = [np.asarray, jnp.asarray]


@pytest.fixture(params=OPS, ids=lambda ops: type(ops).__name__)
def ops(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "value", "mean"), [("i1", 100, 100), ("u1", 200, 200), ("?", True, 1)]
)
def test_means_of_narrow_dtypes_do_not_wrap(ops, kind, dtype, value, mean):
    both = zs.PerReplica(tuple(kind(np.full(2, value, dtype)) for _ in range(2)))
    np.testing.assert_array_equal(ops.reduce("mean", both, HERE), [mean, mean])


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_truth_values_count(ops, kind):
    flags = [[True, True, False], [True, False, False]]
    both = zs.PerReplica(tuple(kind(np.array(x)) for x in flags))
    np.testing.assert_array_equal(ops.reduce("sum", both, HERE), [2, 1, 0])
    assert int(ops.reduce("sum", zs.PerReplica((True, True)), HERE)) == 2
    assert int(ops.reduce("mean", zs.PerReplica((True, True)), HERE)) == 1


def test_integers_of_64_bits_are_not_cut(ops):
    wide = zs.PerReplica((np.array(3_000_000_000), np.array([3_000_000_000])[0]))
    narrow = zs.PerReplica((np.array(2_000_000_000), np.array(2_000_000_000)))
    mixed = zs.PerReplica((np.array(3_000_000_000), jnp.array(5)))
    like = zs.PerReplica((np.ones(1), np.ones(1)))
    pairs = [
        (value, where) for value in (wide, narrow, mixed) for where in (HERE, like)
    ]
    found = ops.batch_reduce("sum", pairs)
    expected = [6_000_000_000, 4_000_000_000, 3_000_000_005]
    assert [int(x) for x in found[::2]] == expected
    assert [[int(x) for x in each.values] for each in found[1::2]] == [
        [n, n] for n in expected
    ]
    assert ops.reduce("mean", wide, HERE) == 3_000_000_000


def test_rows_of_64_bits_are_not_cut(ops):
    parts = tuple(
        zs.IndexedSlices(np.array([[2**40 + n]]), np.array([2**33 + n]))
        for n in range(2)
    )
    rows = ops.reduce("sum", zs.PerReplica(parts), HERE)
    assert rows.indices.tolist() == [2**33, 2**33 + 1]
    assert rows.values.tolist() == [[2**40], [2**40 + 1]]


def test_what_is_no_array_is_refused(ops):
    with pytest.raises(TypeError, match="`per_replica_value`"):
        ops.reduce("sum", {"a": np.ones(2)}, HERE)


def test_a_batch_of_many_dtypes_keeps_its_order(ops):
    columns = [
        np.array([3_000_000_000, 1]),
        jnp.arange(3),
        np.array([True]),
        np.float32(2.5),
        np.arange(4, dtype=np.int8).reshape(2, 2),
        jnp.arange(3) > 1,
    ]
    pairs = [(zs.PerReplica((x, x)), HERE) for x in columns]
    for x, found in zip(columns, ops.batch_reduce("sum", pairs), strict=True):
        assert np.shape(found) == np.shape(x)
        np.testing.assert_array_equal(found, 2 * np.asarray(x).astype(float))


@pytest.mark.parametrize("number", [99, -1])
def test_the_device_to_reduce_on_is_there(number):
    words = rf"there is no device {number} in this process; there are /job:.*from 0"
    with pytest.raises(ValueError, match=words):
        zs.ReductionToOneDevice(number)
