"""The cost of schedules on a clock, beside the formulas of the textbooks.

a: latency, B: bytes per second, S: bytes, n: ranks.
"""

from __future__ import annotations

import math

import pytest

from benchmarks.line_cost import LinkCost, cost
from zstrat.collectives import ALGORITHMS

SIZES = [2, 3, 4, 7, 8, 16, 17]
LINE = LinkCost(bandwidth=1e9, latency=1e-4)
WHOLE = 1 << 40
"""Chunks that never cut a block."""
S = 8_000_000


@pytest.mark.parametrize("n", [*SIZES, 1024])
def test_ring(n) -> None:
    a, step = LINE.latency, S / n / LINE.bandwidth
    found = cost("all_reduce", "ring", n, S, LINE, WHOLE)
    assert found == pytest.approx(2 * (n - 1) * (a + step))
    for call in ("reduce_scatter", "all_gather"):
        found = cost(call, "ring", n, S, LINE, WHOLE)
        assert found == pytest.approx((n - 1) * (a + step))


@pytest.mark.parametrize("n", SIZES)
def test_chunks_hide_latency_and_never_the_bytes(n) -> None:
    whole = cost("all_reduce", "ring", n, S, LINE, WHOLE)
    cut = cost("all_reduce", "ring", n, S, LINE, S // (8 * n))
    bytes_alone = 2 * (n - 1) / n * S / LINE.bandwidth
    assert bytes_alone < cut < whole


@pytest.mark.parametrize("n", [*SIZES, 1024])
def test_direct(n) -> None:
    a, sends = LINE.latency, (n - 1) * S / n / LINE.bandwidth
    found = cost("all_reduce", "direct", n, S, LINE, WHOLE)
    assert found == pytest.approx(2 * (a + sends))
    for call, name in {
        "reduce_scatter": "direct",
        "all_gather": "direct",
        "all_to_all": "pairwise",
    }.items():
        if call != "all_to_all" or n < 100:
            assert cost(call, name, n, S, LINE, WHOLE) == pytest.approx(a + sends)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 1024])
def test_halving_and_doubling(n) -> None:
    """Blocks go on one by one, so that some of the latency is hidden, too."""
    steps, sends = int(math.log2(n)), (n - 1) * S / n / LINE.bandwidth
    found = cost("all_reduce", "halving_doubling", n, S, LINE, WHOLE)
    assert 2 * sends + 2 * LINE.latency <= found * (1 + 1e-9)
    assert found <= 2 * (steps * LINE.latency + sends) * (1 + 1e-9)
    tiny = cost("all_reduce", "halving_doubling", n, 0, LINE, WHOLE)
    assert tiny == pytest.approx(2 * steps * LINE.latency)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 1024])
def test_binomial_trees(n) -> None:
    each = math.log2(n) * (LINE.latency + S / LINE.bandwidth)
    assert cost("broadcast", "tree", n, S, LINE, WHOLE) == pytest.approx(each)
    found = cost("all_reduce", "tree", n, S, LINE, WHOLE)
    assert found == pytest.approx(2 * each)


@pytest.mark.parametrize("n", [2, 4, 8, 32, 64, 256])
def test_two_trees(n) -> None:
    """Half of the bytes in each; a level is two hops, one for either child, and the
    root has one child alone."""
    depth, hop = math.log2(n), S / 2 / LINE.bandwidth
    found = cost("all_reduce", "double_tree", n, S, LINE, WHOLE)
    assert found == pytest.approx(2 * depth * (LINE.latency + 2 * hop) - 2 * hop)


@pytest.mark.parametrize("n", SIZES)
def test_chain(n) -> None:
    chunks, step = 8, S / 8 / LINE.bandwidth
    found = cost("broadcast", "chain", n, S, LINE, S // chunks)
    assert found == pytest.approx((n - 1) * (LINE.latency + step) + (chunks - 1) * step)


@pytest.mark.parametrize("n", SIZES)
def test_barrier(n) -> None:
    found = cost("barrier", "dissemination", n, 0, LINE)
    assert found == pytest.approx(math.ceil(math.log2(n)) * LINE.latency)


@pytest.mark.parametrize("n", [16, 64, 256])
def test_two_trees_use_the_lines_better_than_one(n) -> None:
    one = cost("all_reduce", "tree", n, S, LINE, S // 64)
    two = cost("all_reduce", "double_tree", n, S, LINE, S // 64)
    assert two < one / 2
    tiny = cost("all_reduce", "double_tree", n, 0, LINE)
    assert tiny <= 4 * math.log2(n) * LINE.latency


@pytest.mark.parametrize("n", SIZES)
def test_one_rank_stands_for_all_where_all_do_the_same(n) -> None:
    for call, named in ALGORITHMS.items():
        for name, algorithm in named.items():
            if algorithm.alike.holds(n):
                what = (call, name, n, S, LINE, S // (3 * n))
                one, each = cost(*what), cost(*what, one_for_all=False)
                assert one == pytest.approx(each), name


def test_work_per_hop_counts() -> None:
    busy = LinkCost(bandwidth=1e9, latency=1e-4, overhead=1e-5)
    found = cost("all_reduce", "ring", 4, S, busy, WHOLE)
    assert found == pytest.approx(6 * (1e-4 + 1e-5 + S / 4 / 1e9))


def test_one_rank_costs_nothing() -> None:
    for call, named in ALGORITHMS.items():
        for name in named:
            assert cost(call, name, 1, S) == 0
