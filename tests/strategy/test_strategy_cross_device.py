"""TF's faces of reductions between the devices of one process."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import zstrat as zs

OPS = [
    zs.ReductionToOneDevice(),
    zs.ReductionToOneDevice(0, lambda arrays: sum(arrays)),
    zs.NcclAllReduce(),
    zs.NcclAllReduce(num_packs=3),
    zs.HierarchicalCopyAllReduce(num_packs=0),
]
HERE = "/device:CPU:0"


@pytest.mark.shows("CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce")
@pytest.mark.shows("ReductionToOneDevice")
@examples(20)
@given(
    st.sampled_from(OPS),
    st.sampled_from(["sum", "mean"]),
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5),
)
def test_every_value_is_reduced_by_itself(ops, op, shapes):
    rng = np.random.default_rng(0)
    values = [
        [rng.integers(0, 100, shape).astype(dtype) for _ in range(3)]
        for shape, dtype in zip(shapes, ["f4", "i4", "f2"] * 2, strict=False)
    ]
    pairs = [(zs.PerReplica(tuple(parts)), HERE) for parts in values]
    for parts, found in zip(values, ops.batch_reduce(op, pairs), strict=True):
        total = np.sum(parts, axis=0, dtype=parts[0].dtype)
        expected = total if op == "sum" else total / 3
        assert found.shape == parts[0].shape
        np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("ops", OPS)
def test_rows_are_concatenated(ops):
    parts = tuple(
        zs.IndexedSlices(jnp.full((2, 3), n), jnp.array([0, n]), (9, 3))
        for n in (1.0, 2.0)
    )
    dense = zs.PerReplica((np.ones(2), np.ones(2)))
    rows, ones = ops.batch_reduce(
        "mean", [(zs.PerReplica(parts), HERE), (dense, dense)]
    )
    np.testing.assert_array_equal(rows.indices, [0, 1, 0, 2])
    np.testing.assert_array_equal(rows.values[:, 0], [0.5, 0.5, 1, 1])
    np.testing.assert_array_equal(ones.values, [[1, 1], [1, 1]])


def test_a_value_of_one_device_is_its_own_sum():
    assert float(zs.NcclAllReduce().reduce("sum", np.float32(3), HERE)) == 3.0


@pytest.mark.parametrize("ops", OPS)
def test_a_value_of_one_device_may_come_with_those_of_several(ops):
    two = zs.PerReplica((np.float32(1), np.float32(2)))
    for op, expected in (("sum", [3, 5, 3]), ("mean", [1.5, 5, 1.5])):
        found = ops.batch_reduce(op, [(x, HERE) for x in (two, np.float32(5), two)])
        assert [float(x) for x in found] == expected


def test_a_value_is_broadcast_to_replicas():
    like = zs.PerReplica((1, 2))
    assert zs.NcclAllReduce().broadcast(5, like).values == (5, 5)
    assert zs.NcclAllReduce().broadcast(5, HERE) == 5


def test_what_is_wrong_is_refused():
    ops = zs.NcclAllReduce()
    with pytest.raises(ValueError, match="num_packs >= 0"):
        zs.HierarchicalCopyAllReduce(num_packs=-1)
    with pytest.raises(ValueError, match="NoneType"):
        ops.reduce("sum", np.ones(1), None)
    with pytest.raises(ValueError, match="`per_replica_value`"):
        ops.reduce("sum", zs.PerReplica(()), HERE)
    with pytest.raises(ValueError, match="`value_destination_pairs`"):
        ops.batch_reduce("sum", {})
    with pytest.raises(ValueError, match="SUM"):
        ops.reduce("max", np.ones(1), HERE)


@pytest.mark.parametrize("ops", OPS)
def test_replicas_have_values_of_one_kind_and_shape(ops):
    rows = zs.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
    with pytest.raises(ValueError, match="IndexedSlices"):
        ops.reduce("sum", zs.PerReplica((rows, np.ones((3, 2)))), HERE)
    # Together they have as many numbers in both replicas.
    first = zs.PerReplica((np.ones(2), np.ones(1)))
    second = zs.PerReplica((np.ones(1), np.ones(2)))
    with pytest.raises(ValueError, match=r"\(2,\).*\(1,\)"):
        ops.batch_reduce("sum", [(first, HERE), (second, HERE)])


@pytest.mark.parametrize("ops", OPS)
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


@pytest.mark.parametrize("ops", OPS)
def test_rows_of_64_bits_are_not_cut(ops):
    parts = tuple(
        zs.IndexedSlices(np.array([[2**40 + n]]), np.array([2**33 + n]))
        for n in range(2)
    )
    rows = ops.reduce("sum", zs.PerReplica(parts), HERE)
    assert rows.indices.tolist() == [2**33, 2**33 + 1]
    assert rows.values.tolist() == [[2**40], [2**40 + 1]]


@pytest.mark.parametrize("ops", OPS)
def test_what_is_no_array_is_refused(ops):
    with pytest.raises(TypeError, match="`per_replica_value`"):
        ops.reduce("sum", {"a": np.ones(2)}, HERE)


@pytest.mark.parametrize("number", [99, -1])
def test_the_device_to_reduce_on_is_there(number):
    words = rf"there is no device {number} in this process; there are /job:.*from 0"
    with pytest.raises(ValueError, match=words):
        zs.ReductionToOneDevice(number)
