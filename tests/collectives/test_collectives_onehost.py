"""Ranks of one host: every kind, dtype and op against numpy, between real processes."""

from __future__ import annotations

import numpy as np
import pytest
from shm_ranks import Ranks, given, rank_processes, reduced, run, same
from tiers import combined

from zstrat.collectives import ReduceOp
from zstrat.wire import DTYPES

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e5m2"]
INTS = ["int8", "int32", "int64", "uint8", "uint32"]
EDGES = [0, 1, 17, 16 * 1024, 16 * 1024 + 1, 600_001]
"""Elements: nothing, one, up to one step and just above it, several chunks."""


@pytest.fixture(scope="module")
def processes():
    with rank_processes(4) as processes:
        yield processes


SIZES = [2, 3, 4]


@pytest.fixture(scope="module", params=SIZES)
def ranks(processes, request):
    ranks = Ranks(processes[: request.param])
    yield ranks
    ranks.close()


COMPUTED = [
    *combined(FLOATS, ["SUM", "MEAN", "MIN", "MAX"], step=2),
    *combined(INTS, ["SUM", "MIN", "MAX"], step=2),
    *combined(["bool"], ["MIN", "MAX"]),
]


@pytest.mark.parametrize(
    ("ranks", "dtype", "op"),
    [
        pytest.param(SIZES[i % 3], *case.values, marks=case.marks)
        for i, case in enumerate(COMPUTED)
    ],
    indirect=["ranks"],
)
def test_all_reduce(ranks, dtype, op) -> None:
    for count in EDGES:
        sources = given(dtype, [count] * len(ranks.processes), count)
        got = run(ranks, "all_reduce", sources, [count] * len(sources), op=ReduceOp(op))
        same(got, reduced(op, sources))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1000, 700_001])
def test_sums_are_made_in_the_order_of_ranks(ranks, dtype, count) -> None:
    """So the result is one of numpy's, to the last bit, on all ranks."""
    draw = np.random.default_rng(count)
    sources = [
        draw.normal(size=count).astype(DTYPES[dtype])
        for _ in range(len(ranks.processes))
    ]
    want = reduced("SUM", sources)
    same(run(ranks, "all_reduce", sources, [count] * len(sources)), want)
    in_place = run(ranks, "all_reduce", sources, [None] * len(sources))
    same(in_place, want)


@pytest.mark.parametrize("dtype", ["float64", "bool", "bfloat16", "complex64"])
def test_broadcast(ranks, dtype) -> None:
    size = len(ranks.processes)
    for root in range(size):
        for count in (0, 1, 400_000):
            sources = given(dtype, [count] * size, count)
            counts = [count if rank == root else None for rank in range(size)]
            same(run(ranks, "broadcast", sources, counts, root=root), sources[root])
            in_place = run(ranks, "broadcast", sources, [None] * size, root=root)
            same(in_place, sources[root])


@pytest.mark.parametrize("uneven", [[0, 0, 0, 0], [1, 0, 700_000, 3], [5, 5, 5, 5]])
def test_all_gather(ranks, uneven) -> None:
    sizes = tuple(uneven[: len(ranks.processes)])
    sources = given("float32", sizes)
    got = run(ranks, "all_gather", sources, [sum(sizes)] * len(sizes), sizes=sizes)
    same(got, np.concatenate(sources))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("uneven", [[0, 0, 0, 0], [1, 0, 500_000, 3], [5, 5, 5, 5]])
def test_reduce_scatter(ranks, dtype, uneven) -> None:
    sizes = tuple(uneven[: len(ranks.processes)])
    sources = given(dtype, [sum(sizes)] * len(sizes))
    options = {"sizes": sizes, "op": ReduceOp.MEAN}
    got = run(ranks, "reduce_scatter", sources, sizes, **options)
    want = np.split(reduced("MEAN", sources), np.cumsum(sizes)[:-1])
    for mine, expected in zip(got, want, strict=True):
        assert mine.tobytes() == expected.tobytes()


@pytest.mark.parametrize("most", [1, 7, 300_000])
def test_all_to_all(ranks, most) -> None:
    size = len(ranks.processes)
    sizes = np.random.default_rng(most).integers(0, most + 1, (size, size))
    sources = given("int32", sizes.sum(1))
    options = {"sizes": tuple(sizes.ravel().tolist())}
    got = run(ranks, "all_to_all", sources, sizes.sum(0).tolist(), **options)
    blocks = [np.split(s, np.cumsum(sizes[i])[:-1]) for i, s in enumerate(sources)]
    for rank, mine in enumerate(got):
        want = np.concatenate([blocks[i][rank] for i in range(size)])
        assert mine.tobytes() == want.tobytes()


def test_calls_of_all_kinds_in_a_row(ranks) -> None:
    """The rooms that one call leaves are those that the next one begins with."""
    size = len(ranks.processes)
    draw = np.random.default_rng(5)
    for _ in range(40):
        count = int(draw.choice([0, 3, 20_000, 300_000]))
        sources = given("float32", [count] * size, count)
        if draw.integers(2):
            got = run(ranks, "all_reduce", sources, [count] * size)
            same(got, reduced("SUM", sources))
        else:
            root = int(draw.integers(size))
            got = run(ranks, "broadcast", sources, [None] * size, root=root)
            same(got, sources[root])
        nothing = given("float32", [0] * size)
        run(ranks, "barrier", nothing, [None] * size, int(draw.integers(1, 4)))
