"""How far it scales, on paper: the formulae against mathematics, and the page."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks import scale_model as model
from benchmarks.scale import COMPUTES, PAGE, Largest, page
from benchmarks.scale_costs import scanned, simulated
from benchmarks.scale_plot import Axis
from benchmarks.slow_links import Checked

COSTS = model.Costs(
    step=1e-4,
    packed=1e-5,
    scan=1e-6,
    submit=1e-6,
    beat=4e-5,
    exchange=2e-4,
    byte=2.0**-30,
    own=1e-4,
    call=5e-5,
    connection_bytes=2.0**16,
    connection_files=4.0,
    entry=1e-6,
    entry_bytes=256.0,
)
"""Numbers of which the results can be worked out by hand."""


def test_a_loop_without_beats_is_full_when_its_core_is():
    silent = replace(COSTS, beat=0.0)
    assert model.program_rate(silent, 10_000, 10) == pytest.approx(1 / 1e-4)
    # A step of 9.85 ms and 150 us of its worker: 100 of them a second.
    assert model.offered_rate(silent, 0.00985, 1, 1) == pytest.approx(100)
    assert model.program_workers(silent, 0.00985, 1) == pytest.approx(100)
    # 200 us, and 2**20 bytes at 2**30 a second.
    rate = model.server_rate(silent, 100, 1, 2**20)
    assert rate == pytest.approx(1 / (2e-4 + 1 / 1024))


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("servers", [1, 10, 1000])
def test_at_its_limit_a_core_is_full(compute, servers):
    workers = model.program_workers(COSTS, compute, servers)
    rate = workers / model.step_seconds(COSTS, compute, servers)
    share = model.program_share(COSTS, rate, workers, servers)
    assert share == pytest.approx(1.0)
    limit = model.program_rate(COSTS, 500, servers)
    assert model.program_share(COSTS, limit, 500, servers) == pytest.approx(1.0)
    taken = model.server_rate(COSTS, 500, servers, 4096)
    share = model.server_share(COSTS, taken, 500, servers, 4096)
    assert share == pytest.approx(1.0)
    workers = model.server_workers(COSTS, compute, servers, 4096)
    rate = workers / model.step_seconds(COSTS, compute, servers)
    beats = COSTS.beat / model.PERIOD
    stepping = rate * (COSTS.exchange + COSTS.byte * 4096 / servers)
    assert stepping + (workers + 1) * beats == pytest.approx(1.0)


def test_beats_alone_fill_a_loop_at_last():
    # 2 beats a second of 40 us: 12,500 connections are one core.
    assert model.program_share(COSTS, 0.0, 12_490, 10) == pytest.approx(1.0)
    assert model.program_rate(COSTS, 12_500, 10) == 0.0
    assert model.server_rate(COSTS, 12_500, 10, 0) == 0.0


def test_turns_grow_with_the_workers_and_with_what_else_there_is():
    silent = replace(COSTS, beat=0.0)
    assert model.turn_seconds(silent, 0.0, 1000, 1) == pytest.approx(1e-3)
    assert model.turn_seconds(silent, 5000.0, 1000, 1) == pytest.approx(2e-3)
    assert model.turn_seconds(silent, 10_000.0, 1000, 1) == math.inf


def test_the_slowest_part_says_how_many_steps_there_are():
    def limits(workers, nbytes):
        return [
            model.offered_rate(COSTS, 1e-2, workers, 10),
            model.server_rate(COSTS, workers, 10, nbytes),
            model.program_rate(COSTS, workers, 10),
        ]

    for workers, nbytes, least in [(10, 4096, 0), (5000, 2**24, 1), (5000, 0, 1)]:
        found = limits(workers, nbytes)
        assert found.index(min(found)) == least
        rate = model.rate_of(COSTS, 1e-2, workers, 10, nbytes)
        assert rate == min(found)


def test_a_link_is_hidden_behind_the_steps_that_do_not_wait_for_it():
    costs = replace(COSTS, exchange=0.0, byte=0.0, own=0.0, call=0.0)
    link = model.Link(8e6, 0.1)  # 1 MB/s

    def used(*how):
        return model.utilization(costs, link, 0.01, 1e6, model.Exchange(*how))

    assert used() == pytest.approx(0.01 / (0.01 + 2.2))
    assert used(100) == pytest.approx(1.0 / (1.0 + 2.2))
    # A quarter of the bytes, two round trips: 0.7 s.
    assert used(400, 4) == pytest.approx(1.0 / (1.0 + 0.7))
    assert used(400, 4, 50) == pytest.approx(1.0 / (1.0 + 0.2))
    assert used(400, 4, 70) == 1.0


def test_connections_are_those_of_a_bipartite_graph_and_the_program():
    workers, servers = 7, 3
    edges = {("program", n) for n in range(workers + servers)}
    edges |= {(w, s) for w in range(workers) for s in range(workers, workers + servers)}
    count = model.connections(workers, servers)
    assert count["all"] == len(edges)
    ends = workers * count["worker"] + servers * count["server"] + count["program"]
    assert ends == 2 * len(edges)


def test_a_page_and_its_pictures():
    checked = Checked(8.0, 0.05, 0.5, 2.0**20, model.Exchange(1), 0.25)
    files = page(COSTS, Largest(1000, 3000, 12.0, 6.0), "2 cores", [checked])
    text = files[PAGE]
    assert "@" not in text
    assert "1,000 workers and one server made 3,000 steps" in text
    assert "2,000 us per\nstep" in text
    # `step` alone is 10,000 steps a second; 10 ms and 150 us, with two beats a second.
    share = 1e-4 / 0.01015 + 8e-5
    expected = (1 - 8e-5) / share
    assert f"| 10 ms | {round(expected, -1):,.0f} |" in text
    # 2 MiB at 1 MB/s, two round trips: 2.2 s beside half a second.
    assert "| 8 Mbit/s, 50 ms | 1, 1, 0 | 0.19 | 0.25 |" in text
    for name, drawing in files.items():
        if name != PAGE:
            assert name in text
            root = ElementTree.fromstring(drawing)
            assert len(root.findall("{*}polyline")) >= 3


def test_an_axis_is_logarithmic():
    axis = Axis("", 1.0, 1000.0, 100.0, 400.0)
    assert [axis.at(value) for value in (1, 10, 100, 1000)] == [100, 200, 300, 400]
    assert axis.at(0.5) == 100
    assert axis.at(5000) == 400
    assert axis.ticks == [1, 10, 100, 1000]


def test_small_clusters_are_simulated():
    assert simulated(5, 10) > 0.0
    assert scanned(2, 4) >= 0.0
