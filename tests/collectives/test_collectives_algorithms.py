"""An algorithm that is named says how messages go: among hosts, not inside of one."""

from __future__ import annotations

import numpy as np
import pytest
from collectives_hosts import ranks_on

import zstrat as zs
from zstrat.collectives.group import _traffic as traffic
from zstrat.strategy.reduce import ChosenGroup

SOURCES = [np.arange(3.0) + rank for rank in range(5)]


@pytest.fixture
def asked(monkeypatch):
    """Kind, algorithm and number of ranks of what goes by messages, per rank of it."""
    calls = []
    real = traffic.progress_of

    def noted(call, rank, size, **options):
        if call.words != "forming the group":
            calls.append((call.kind.value, call.algorithm, size))
        return real(call, rank, size, **options)

    monkeypatch.setattr(traffic, "progress_of", noted)
    return calls


@pytest.mark.parametrize(
    ("implementation", "algorithm"),
    [("RING", "ring"), ("TREE", "double_tree"), ("AUTO", None)],
)
@pytest.mark.parametrize(("hosts", "speakers"), [("aa", 0), ("aab", 2), ("abbac", 3)])
def test_a_strategy_names_what_goes_between_hosts(
    monkeypatch, asked, hosts, speakers, implementation, algorithm
):
    """As TF's options do; a host speaks with one voice whatever they say."""
    options = zs.CommunicationOptions(implementation=implementation)
    with ranks_on(hosts, monkeypatch) as ranks:
        groups = [ChosenGroup(g, options) for g in ranks.groups(transport="auto")]
        found = ranks.each(lambda g: g.all_reduce(SOURCES[g.rank]), groups)
    for each in found:
        np.testing.assert_array_equal(each, sum(SOURCES[: len(hosts)]))
    assert asked == [("all_reduce", algorithm, speakers)] * speakers


def test_machines_of_one_name_are_told_apart_by_their_memory(monkeypatch, asked):
    """Two ranks of one machine share memory, though a third has the name of it."""
    with ranks_on("aaa", monkeypatch, elsewhere=[1]) as ranks:
        groups = ranks.groups(transport="auto")
        found = ranks.each(lambda g: g.all_reduce(SOURCES[g.rank]), groups)
        assert [group.hosts for group in groups] == [2, 2, 2]
    for each in found:
        np.testing.assert_array_equal(each, sum(SOURCES[:3]))
    assert asked == [("all_reduce", None, 2)] * 2, "the first ranks of two machines"


def test_without_shared_memory_all_ranks_take_part(monkeypatch, asked):
    with ranks_on("aab", monkeypatch) as ranks:
        groups = ranks.groups(transport="tcp")
        ranks.each(lambda g: g.all_reduce(SOURCES[g.rank], algorithm="ring"), groups)
        assert [group.hosts for group in groups] == [2, 2, 2]
    assert asked == [("all_reduce", "ring", 3)] * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [({"tag": "mine"}, None), ({"compression": "bf16", "algorithm": "tree"}, "tree")],
)
def test_tagged_and_compressed_calls_go_by_messages(monkeypatch, asked, options, name):
    source = np.ones(3, np.float32)
    with ranks_on("aa", monkeypatch) as ranks:
        groups = ranks.groups(transport="auto")
        ranks.each(lambda g: g.all_reduce(source, **options), groups)
    assert asked == [("all_reduce", name, 2)] * 2


def test_what_saves_nothing_goes_from_every_rank(monkeypatch, asked):
    with ranks_on("aab", monkeypatch) as ranks:
        groups = ranks.groups(transport="auto")
        ranks.each(lambda g: g.reduce_scatter(np.ones(3)), groups)
        ranks.each(lambda g: g.barrier(), groups)
        ranks.each(lambda g: g.broadcast(np.ones(3), algorithm="chain"), groups)
    calls = [("reduce_scatter", None, 3)] * 3 + [("barrier", None, 2)] * 2
    assert asked == [*calls, *[("broadcast", "chain", 2)] * 2]
