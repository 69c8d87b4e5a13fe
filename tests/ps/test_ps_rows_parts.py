"""Rows in bulk: made distinct, put into buckets, packed into calls, seen as one."""

import jax
import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from zstrat.ps.engine import as_rows
from zstrat.ps.engine._arithmetic import are_increasing, bucket, distinct, pack, sizes
from zstrat.ps.store import Cell


@given(st.lists(st.integers(0, 12), max_size=40))
def test_distinct_sums_what_belongs_together(indices):
    rows = np.random.default_rng(len(indices)).integers(-9, 9, (len(indices), 2))
    at, total = distinct(np.array(indices, int), rows)
    assert are_increasing(at)
    assert at.tolist() == sorted(set(indices))
    want = np.zeros((13, 2), int)
    np.add.at(want, indices, rows)
    np.testing.assert_array_equal(total, want[at])


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_buckets_hold_their_rows_and_are_few(rows, most):
    size = bucket(min(rows, most), most)
    assert min(rows, most) <= size <= most
    assert size <= max(16, 1.5 * rows)
    assert len({bucket(n, 4096) for n in range(4097)}) == 17


@given(st.lists(st.integers(0, 3000), max_size=4), st.integers(1, 3000))
def test_every_call_has_a_bucket_that_holds_it(counts, most):
    found = sizes(sum(counts), most)
    for pieces, size in zip(pack(counts, most), found, strict=True):
        assert sum(stop - start for _, start, stop in pieces) <= size <= most
    assert set(found[:-1]) <= {most}


def test_updates_that_vary_by_a_few_rows_share_their_programs():
    assert {size for n in range(1900, 2300) for size in sizes(n, 2048)} == {2048, 256}
    assert {size for n in range(9999) for size in sizes(n, 2048)[1:]} == {
        *(256, 384, 512, 768, 1024, 1536, 2048)
    }


@examples(50)
@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 20))
def test_packing_covers_every_row_once_and_fills_calls(counts, most):
    calls = pack(counts, most)
    met = [
        (piece.update, row)
        for call in calls
        for piece in call
        for row in range(piece.start, piece.stop)
    ]
    assert met == [(u, row) for u, count in enumerate(counts) for row in range(count)]
    sizes = [sum(p.stop - p.start for p in call) for call in calls]
    assert len(sizes) == max(1, -(-sum(counts) // most))
    assert all(size == most for size in sizes[:-1])
    assert sizes[-1] <= most


def test_opaque_rows_are_a_view():
    array = np.zeros((4, 3), ml_dtypes.bfloat16)
    as_rows(array)[[1, 3]] = as_rows(np.ones((2, 3), ml_dtypes.bfloat16))
    assert array.astype(int).sum(axis=1).tolist() == [0, 3, 0, 3]


def test_rows_of_a_leased_or_device_cell_are_written_elsewhere():
    cell = Cell(np.zeros((4, 2)))
    lease = cell.lease()
    cell.begin_rows(np.array([1]))[1] = 5
    cell.settle()
    assert not lease.any()
    assert cell.lease().sum() == 10
    device = Cell.on_device(jax.numpy.zeros((4, 2)))
    device.begin_rows(np.array([2]))[2] = 7
    device.settle()
    assert device.lease().tolist() == [[0, 0], [0, 0], [7, 7], [0, 0]]
