"""Progress: what all ranks end with, from any order in which hops arrive."""

from __future__ import annotations

import random

import numpy as np
from collectives_ranks import deliver
from hypothesis import given
from hypothesis import strategies as st

from zstrat.collectives import (
    Progress,
    parts,
    reduction_of,
    ring_all_reduce,
)


@given(
    size=st.integers(1, 9),
    count=st.integers(0, 700),
    chunk=st.sampled_from([64, 512, 4096]),
    op=st.sampled_from(["SUM", "MEAN", "MIN", "MAX"]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_all_reduce_is_exact(size, count, chunk, op, in_place, seed) -> None:
    draw = np.random.default_rng(seed)
    given = draw.integers(-1000, 1000, (size, count)).astype(np.float64)
    expected = {
        "SUM": given.sum(0),
        "MEAN": given.sum(0) / size,
        "MIN": given.min(0),
        "MAX": given.max(0),
    }[op]
    values = [row.copy() for row in given]
    results = values if in_place else [np.full(count, np.nan) for _ in values]
    calls = [
        Progress(
            ring_all_reduce(rank, size),
            parts(values[rank], size),
            parts(results[rank], size),
            reduction=reduction_of(op, values[rank].dtype, size),
            chunk_bytes=chunk,
        )
        for rank in range(size)
    ]
    deliver(calls, random.Random(seed))
    assert all(call.is_done for call in calls)
    for result in results:
        np.testing.assert_array_equal(result, expected)
