"""Buckets: TensorFlow's rule, and arrays that come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.collectives import buckets

F32, F64, I8 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int8)


def members(found) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in found]


def test_one_pack_from_the_last_to_the_first() -> None:
    assert members(buckets([(F32, 10)] * 4)) == [(3, 2, 1, 0)]


def test_a_pack_is_begun_when_the_one_before_is_larger_than_the_limit() -> None:
    """Not when it would become so, and not when it is just as large."""
    arrays = [(I8, 40), (I8, 60), (I8, 100), (I8, 1), (I8, 99)]
    assert members(buckets(arrays, 100)) == [(4, 3, 2), (1, 0)]
    assert members(buckets(arrays, 99)) == [(4, 3), (2,), (1, 0)]
    assert members(buckets(arrays, 98)) == [(4,), (3, 2), (1, 0)]


def test_dtypes_share_a_pack_but_no_buffer() -> None:
    found = buckets([(F32, 5), (F64, 5), (F32, 5), (F64, 1)])
    assert members(found) == [(3, 1), (2, 0)]
    assert [bucket.dtype for bucket in found] == [F64, F32]
    assert [bucket.nbytes for bucket in found] == [48, 40]


def test_large_arrays_may_travel_alone_without_a_copy() -> None:
    arrays = [np.ones(3, np.float32), np.ones((4, 25), np.float32), np.ones(2, "f4")]
    found = buckets([(a.dtype, a.size) for a in arrays], alone=400)
    assert members(found) == [(2, 0), (1,)]
    assert np.shares_memory(found[1].flat(arrays, np.empty), arrays[1])


def test_no_arrays_no_buckets() -> None:
    assert buckets([]) == []


def test_a_negative_limit() -> None:
    with pytest.raises(ValueError, match="bytes_per_pack=-1"):
        buckets([(F32, 1)], -1)


@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(["f4", "f8", "i2"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=12,
    ),
    limit=st.integers(0, 200),
    alone=st.none() | st.integers(0, 100),
)
def test_everything_comes_back(shapes, limit, alone) -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.integers(0, 99, shape).astype(dtype) for dtype, shape in shapes]
    arrays = [array.T for array in arrays]  # not in C order
    back: dict[int, np.ndarray] = {}
    for bucket in buckets([(a.dtype, a.size) for a in arrays], limit, alone):
        flat = bucket.flat(arrays, np.empty)
        assert flat.dtype == bucket.dtype
        assert flat.ndim == 1
        assert flat.nbytes == bucket.nbytes
        back |= zip(bucket.members, bucket.split(flat), strict=True)
    assert sorted(back) == list(range(len(arrays)))
    for member, array in enumerate(arrays):
        np.testing.assert_array_equal(back[member].reshape(array.shape), array)
