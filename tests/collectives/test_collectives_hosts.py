"""Ranks of several hosts, of which each reduces in its memory; real processes that
pretend to be on different hosts, and memory in place of the network between them."""

from __future__ import annotations

import numpy as np
import pytest
from shm_rank import drawn
from shm_ranks import Ranks, given, rank_processes, reduced, run, same
from tiers import combined

from zstrat import wire
from zstrat.collectives import ReduceOp
from zstrat.collectives.memory._engines import AHEAD, PART, LocalRank, local_ranks_of


@pytest.fixture(scope="module")
def processes():
    with rank_processes(4) as processes:
        yield processes


@pytest.fixture(scope="module", params=["aab", "abab", "abbb"])
def ranks(processes, request):
    ranks = Ranks(processes[: len(request.param)], request.param)
    yield ranks
    ranks.close()


OPS = ["SUM", "MEAN", "MIN", "MAX"]
DTYPES = ["float32", "float64", "bfloat16", "float16"]


@pytest.mark.parametrize(("dtype", "op"), combined(DTYPES, OPS))
@pytest.mark.parametrize("ranks", ["abab"], indirect=True)
def test_all_reduce(ranks, dtype, op) -> None:
    all_reduce(ranks, dtype, op, (0, 1, 1000))


@pytest.mark.parametrize(("dtype", "op"), [*zip(DTYPES, OPS, strict=True)])
def test_all_reduce_wherever_they_are(ranks, dtype, op) -> None:
    all_reduce(
        ranks, dtype, op, (0, 1, PART // np.dtype(wire.DTYPES[dtype]).itemsize + 1)
    )


def all_reduce(ranks, dtype, op, counts):
    size = len(ranks.processes)
    for count in counts:
        sources = given(dtype, [count] * size, count)
        want = reduced(op, sources)
        same(run(ranks, "all_reduce", sources, [count] * size, op=ReduceOp(op)), want)
        same(run(ranks, "all_reduce", sources, [None] * size, op=ReduceOp(op)), want)


def test_f16_is_rounded_once(ranks) -> None:
    """Not on its way to the network: whole numbers above 2048 need f32."""
    size = len(ranks.processes)
    sources = [np.full(5, 2048, np.float16), *[np.full(5, 1, np.float16)] * (size - 1)]
    got = run(ranks, "all_reduce", sources, [5] * size)
    same(got, np.full(5, 2048 + size - 1, np.float32).astype(np.float16))


def test_all_ranks_hold_the_same_bits(ranks) -> None:
    size = len(ranks.processes)
    count = PART // 4 * (AHEAD + 2) + 5
    got = ranks.all("run_random", [(rank, count) for rank in range(size)])
    assert len({digest for digest, _ in got}) == 1
    ends = [drawn(rank, count)[-1000:] for rank in range(size)]
    want = np.sum(ends, 0, np.float64)
    np.testing.assert_allclose(got[0][1], want, rtol=1e-5, atol=1e-5)


def test_parts_go_to_other_hosts_once(ranks) -> None:
    """Only the first ranks of hosts speak, and number their parts alike."""
    size = len(ranks.processes)
    sources = given("float32", [3 * PART // 4] * size)
    ranks.all("parts", [()] * size)
    run(ranks, "all_reduce", sources, [None] * size)
    parts = ranks.all("parts", [()] * size)
    assert [len(each) for each in parts].count(3) == 2
    assert all(each in ([], [0, 1, 2]) for each in parts)


def test_an_algorithm_is_that_between_hosts(ranks) -> None:
    size = len(ranks.processes)
    sources = given("float32", [5] * size)
    ranks.all("algorithms", [()] * size)
    got = run(ranks, "all_reduce", sources, [None] * size, algorithm="ring")
    same(got, reduced("SUM", sources))
    asked = ranks.all("algorithms", [()] * size)
    assert sorted(asked) == [[]] * (size - 2) + [["ring"]] * 2


@pytest.mark.parametrize("count", [0, 1, PART // 8 + 1])
def test_broadcast(ranks, count) -> None:
    """Also of memory that cannot be written to, as that of jax is."""
    size = len(ranks.processes)
    for root in range(size):
        sources = given("float64", [count] * size, count)
        counts = [count if rank == root else None for rank in range(size)]
        same(run(ranks, "broadcast", sources, counts, root=root), sources[root])
        commands = [
            ("broadcast", "float64", source.tobytes(), None, options, 1)
            for rank, source in enumerate(sources)
            for options in [{"root": root, "is_frozen": rank == root}]
        ]
        got = ranks.all("run", commands)
        assert got == [sources[root].tobytes()] * size


def test_calls_in_a_row(ranks) -> None:
    size = len(ranks.processes)
    draw = np.random.default_rng(4)
    for _ in range(10):
        count = int(draw.choice([0, 3, 20_000, 300_000]))
        sources = given("float32", [count] * size, count)
        same(run(ranks, "all_reduce", sources, [None] * size), reduced("SUM", sources))
        run(ranks, "barrier", given("float32", [0] * size), [None] * size, 3)


def test_takes_what_saves_messages(ranks) -> None:
    def takes(kind, **options):
        answers = ranks.all("takes", [(kind, options)] * len(ranks.processes))
        assert len(set(answers)) == 1
        return answers[0]

    assert all(map(takes, ("all_reduce", "broadcast", "barrier")))
    assert not any(map(takes, ("all_gather", "reduce_scatter", "all_to_all")))
    assert not takes("all_reduce", tag="mine")
    assert not takes("all_reduce", compression="int8")
    assert takes("all_reduce", algorithm="ring")
    assert takes("broadcast", algorithm="chain")


@pytest.mark.parametrize("ranks", ["ab"], indirect=True)
def test_hosts_of_one_rank_have_nothing_to_share(ranks) -> None:
    assert ranks.all("takes", [("all_reduce", {})] * 2) == [False, False]


def test_places() -> None:
    places, leaders = local_ranks_of(["a", "b", "a", 3, "b"])
    assert leaders == [0, 1, 3]
    assert places == [
        LocalRank(0, 0),
        LocalRank(1, 0),
        LocalRank(0, 1),
        LocalRank(2, 0),
        LocalRank(1, 1),
    ]
