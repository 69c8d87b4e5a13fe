"""Ranks that share no memory: who has data connections, what goes wrong on them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
from collectives_groups import QUICK, ranks_of
from collectives_hosts import ranks_on

from zstrat.collectives import CallKind, Choices, CollectiveCall, ReduceOp
from zstrat.collectives.group import (
    LARGEST,
    ConnectionEnded,
    Differs,
    Overdue,
    SocketEngine,
)
from zstrat.errors import (
    CancelledError,
    ClosedError,
    InvalidArgumentError,
    PeerLostError,
)
from zstrat.transport import DataConnections, Portal, generate_keys


class Engines:
    """The engines of ``size`` ranks, connected, and a thread for each."""

    def __init__(self, size):
        self.size, self.portal = size, Portal("engines")
        self.connections = self.portal.run(self._connected(size), 30, "connecting")
        self.all = [
            SocketEngine(each, rank, size, one_host=True, choices=Choices())
            for rank, each in enumerate(self.connections)
        ]
        self.threads = ThreadPoolExecutor(size)
        meet = [partial(self.run, r, np.ones(1), key=0) for r in range(size)]
        list(self.threads.map(lambda each: each(), meet))

    async def _connected(self, size):
        bound = [
            await DataConnections.bound(rank, size, "127.0.0.1:1", QUICK, None)
            for rank in range(size)
        ]
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        for a, b in pairs:
            bound[a].admit(b, bound[b].credential)
        for a, b in pairs:
            await bound[a].connect(b, f"127.0.0.1:{bound[b].port}", bound[b].credential)
        return bound

    def run(self, rank, array, **about):
        self.all[rank].run(call_of(array, **about))

    def start(self, rank, array, **about):
        return self.threads.submit(self.run, rank, array, **about)

    async def _close(self):
        for engine in self.all:
            engine.close()

    def close(self):
        self.threads.shutdown()
        self.portal.run(self._close(), 30, "closing")
        self.portal.close()


@pytest.fixture
def pair():
    engines = Engines(2)
    yield engines
    engines.close()


def call_of(array, *, key=1, about=1, seconds=60.0, kind=CallKind.ALL_REDUCE, **more):
    deadline = time.monotonic() + seconds
    return CollectiveCall(
        *(key, kind, array, array, about, "sum", deadline, seconds, ReduceOp.SUM),
        **more,
    )


# Who has them.


def engines_of(groups):
    return [type(group._work.engine).__name__ for group in groups]


def sums(ranks, groups, count=1000):
    data = [np.arange(float(count)) * rank for rank in range(ranks.size)]
    return ranks.each(lambda group: group.all_reduce(data[group.rank]), groups)


@pytest.mark.parametrize(
    ("over", "engine"), [("tcp", "SocketEngine"), ("ipc", "NoneType")]
)
def test_ranks_at_ports_that_share_no_memory_have_them(over, engine) -> None:
    with ranks_of(3, over=over) as ranks:
        groups = ranks.groups(transport="tcp")
        assert engines_of(groups) == [engine] * 3
        for found in sums(ranks, groups):
            np.testing.assert_array_equal(found, np.arange(1000.0) * 3)


@pytest.mark.parametrize(
    ("hosts", "engine"),
    [("abc", "SocketEngine"), ("aab", "HostsEngine"), ("aaa", "OneHost")],
)
def test_memory_comes_first_where_ranks_share_any(monkeypatch, hosts, engine) -> None:
    with ranks_on(hosts, monkeypatch, over="tcp") as ranks:
        groups = ranks.groups(transport="auto")
        assert engines_of(groups) == [engine] * 3
        for found in sums(ranks, groups):
            np.testing.assert_array_equal(found, np.arange(1000.0) * 3)


def test_where_keys_are_demanded_they_are_encrypted(tmp_path) -> None:
    generate_keys(tmp_path / "keys", [("worker", 0), ("worker", 1)])
    settings = replace(QUICK, keys=tmp_path / "keys")
    with ranks_of(2, over="tcp") as ranks:
        groups = ranks.groups(settings=settings)
        assert engines_of(groups) == ["SocketEngine"] * 2
        for group in groups:
            assert group._work.engine._connections._router.mechanism == 2  # CURVE
        for count in (1, 1000, 2**18, 2**20):
            for found in sums(ranks, groups, count):
                np.testing.assert_array_equal(found, np.arange(float(count)))


async def astray(self, member, address, credential, connect=DataConnections.connect):
    host, _, _ = address.rpartition(":")
    await connect(self, member, f"{host}:1" if member == 2 else address, credential)


def raising(words):
    def refused(*_):
        raise OSError(words)

    return refused


@pytest.mark.parametrize(
    ("size", "what", "is_so", "words"),
    [
        (3, "DataConnections.connect", astray, "cannot reach each other's data port"),
        (2, "DataConnections.connect", raising("no such name"), "no such name"),
        (
            2,
            "DataConnections.shut",
            raising("no such filter"),
            "links, not data connections: no such filter",
        ),
        (2, "allowed", lambda: 0, "descriptors are open"),
        (3, "DataConnections.MOST", 2, ""),
    ],
    ids=["a port out of reach", "no name", "no filter", "no room", "a large group"],
)
def test_where_there_can_be_none_all_goes_by_links(
    monkeypatch, caplog, size, what, is_so, words
) -> None:
    caplog.set_level("INFO", "zstrat.collectives")
    monkeypatch.setattr(f"zstrat.transport._data_connections.{what}", is_so)
    with ranks_of(size, over="tcp") as ranks:
        groups = ranks.groups(transport="tcp")
        assert engines_of(groups) == ["NoneType"] * size
        for found in sums(ranks, groups):
            expected = np.arange(1000.0) * sum(range(size))
            np.testing.assert_array_equal(found, expected)
    said = [each.getMessage() for each in caplog.records]
    assert not words or sum(words in each for each in said) == size


def test_a_new_generation_has_new_ones() -> None:
    with ranks_of(3, over="tcp") as ranks:
        groups = ranks.groups(transport="tcp")
        groups[2].close()
        ranks.each(lambda group: group.reform(ranks=[0, 1]), groups[:2])
        assert engines_of(groups[:2]) == ["SocketEngine"] * 2
        data = [np.ones(5), np.ones(5)]
        found = ranks.each(lambda g: g.all_reduce(data[g.rank]), groups[:2])
        np.testing.assert_array_equal(found, [[2.0] * 5] * 2)


# Calls.


def test_large_and_small_calls_of_one_group_meet_where_each_belongs() -> None:
    """What an engine does not take goes by links, in the same order of numbers."""
    counts = [1, LARGEST // 8, LARGEST // 8 + 1, 3, 2 * LARGEST // 8, 70_000]
    with ranks_of(3, over="tcp") as ranks:
        groups = ranks.groups(transport="tcp")
        for count in counts:
            for found in sums(ranks, groups, count):
                np.testing.assert_array_equal(found, np.arange(float(count)) * 3)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_of_all_sizes_one_after_the_other(size) -> None:
    """Ranks get ahead of each other; what they write over is their own memory."""
    draw = np.random.default_rng(size)
    counts = [int(each) for each in 2 ** draw.uniform(0, 21, 40)]
    given = [draw.normal(size=(size, n)).astype(np.float32) for n in counts]
    engines = Engines(size)

    def all_calls(rank):
        found = []
        for key, values in enumerate(given, 1):
            array = values[rank].copy()
            engines.run(rank, array, key=key)
            found.append(array.copy())
            array.fill(-1)  # it is the caller's again
        return found

    first, *others = engines.threads.map(all_calls, range(size))
    for array, values in zip(first, given, strict=True):
        np.testing.assert_allclose(array, values.sum(0), rtol=1e-4, atol=1e-4)
    for found in others:
        for array, same in zip(found, first, strict=True):
            assert array.tobytes() == same.tobytes()  # bit by bit
    engines.close()


def test_what_an_engine_takes_depends_on_what_all_ranks_have_alike(pair) -> None:
    takes = pair.all[0].takes
    half = np.ones(LARGEST // 2, np.uint8)
    assert takes(call_of(half))
    assert not takes(call_of(half, tag="mine"))
    assert not takes(call_of(half, kind=CallKind.BROADCAST))
    gather = CallKind.ALL_GATHER
    assert takes(call_of(half, kind=gather, sizes=(len(half), len(half))))
    assert not takes(call_of(half, kind=gather, sizes=(len(half), len(half) + 1)))


def test_who_is_waited_for_is_named(pair) -> None:
    with pytest.raises(Overdue) as late:
        pair.start(0, np.ones(3), seconds=0.2).result(60)
    assert late.value.ranks == (1,)
    assert list(pair.all[0].waits()) == [1]
    with pytest.raises(Overdue):
        pair.run(0, np.ones(3), key=2)


def test_other_calls_under_the_same_number_are_found(pair) -> None:
    started = [pair.start(rank, np.ones(3), about=1 + rank) for rank in (0, 1)]
    for rank, each in enumerate(started):
        with pytest.raises(Differs) as found:
            each.result(60)
        assert (found.value.rank, found.value.about) == (1 - rank, 2 - rank)


@pytest.mark.parametrize("first", [0, 1])
def test_calls_that_go_by_links_and_by_sockets_find_that_they_differ(first) -> None:
    """At once, not at the deadline."""
    with ranks_of(2, over="tcp") as ranks:
        groups = ranks.groups(transport="tcp", timeout=3600)
        calls = [
            partial(groups[0].all_reduce, np.ones(3)),
            partial(groups[1].all_reduce, np.ones(LARGEST)),
        ]
        started = [ranks.start(calls[rank]) for rank in (first, 1 - first)]
        for each in started:
            with pytest.raises(InvalidArgumentError):
                each.result(60)


def test_the_end_of_a_connection_is_noticed(pair) -> None:
    waiting = pair.start(0, np.ones(3))
    pair.portal.run(closing(pair.all[1]), 30, "closing")
    with pytest.raises(ConnectionEnded) as ended:
        waiting.result(60)
    assert ended.value.rank == 1


async def closing(engine):
    engine.close()


def test_what_was_sent_before_the_end_of_a_connection_counts(pair) -> None:
    arrays = [np.ones(2**18), np.ones(2**18)]
    waiting = pair.start(1, arrays[1])
    pair.start(0, arrays[0]).result(60)
    pair.portal.run(closing(pair.all[0]), 30, "closing")
    waiting.result(60)
    np.testing.assert_array_equal(arrays[1], np.full(2**18, 2.0))


def test_a_wait_is_ended_from_another_thread(pair) -> None:
    waiting = pair.start(0, np.ones(3))
    pair.all[0].abort(ClosedError("enough"))
    with pytest.raises(ClosedError, match="enough"):
        waiting.result(60)
    with pytest.raises(ClosedError, match="enough"):
        pair.run(0, np.ones(3))


def test_a_group_says_whose_connection_ended() -> None:
    with ranks_of(2, over="tcp") as ranks:
        groups = ranks.groups(transport="tcp", timeout=3600)
        told = ranks.start(partial(groups[1].all_reduce, np.ones(3), tag="x"))
        waiting = ranks.start(partial(groups[0].all_reduce, np.ones(3)))
        groups[1]._work.engine.close()
        words = "rank 1"
        with pytest.raises(PeerLostError, match=words):
            waiting.result(60)
        assert groups[0].is_broken
        with pytest.raises(PeerLostError, match=r"rank 1.*'group'.*reform\(\)"):
            told.result(60)  # that rank lives, and hears of it


def test_others_hear_of_an_error_that_is_none_of_ours(monkeypatch) -> None:
    with ranks_of(2, over="tcp") as ranks:
        groups = ranks.groups(transport="tcp", timeout=3600)

        def run(call):
            raise MemoryError("no room")

        monkeypatch.setattr(groups[0]._work.engine, "run", run)
        waiting = ranks.start(partial(groups[1].all_reduce, np.ones(3)))
        with pytest.raises(MemoryError):
            groups[0].all_reduce(np.ones(3))
        with pytest.raises(CancelledError, match=r"rank 0.*MemoryError"):
            waiting.result(60)


class SlowPacking:
    """Holds up the packing of arrays in threads that say so, once they have begun."""

    def __init__(self, monkeypatch):
        buckets = import_module("zstrat.collectives._leaves")
        flat = buckets.Bucket.flat
        self.begun, self.go = {}, {}

        def slow(*args):
            me = threading.get_ident()
            if me in self.begun:
                self.begun[me].set()
                assert self.go[me].wait(60)
            return flat(*args)

        monkeypatch.setattr(buckets.Bucket, "flat", slow)

    def start(self, threads, group):
        """A reduction that has its number and is not packed; what lets it go on."""
        begun, go = threading.Event(), threading.Event()

        def reduce():
            me = threading.get_ident()
            self.begun[me], self.go[me] = begun, go
            return group.all_reduce_async([np.ones(3), np.ones(4)])

        started = threads.submit(reduce)
        assert begun.wait(60)
        return started, go


def test_who_begins_later_and_is_ready_earlier_waits(monkeypatch) -> None:
    packing = SlowPacking(monkeypatch)

    def both(group):
        with ThreadPoolExecutor(1) as threads:
            first, go = packing.start(threads, group)
            second = group.all_reduce_async(np.full(3, 2.0))
            go.set()
            return first.result(60).result(60), second.result(60)

    with ranks_of(2, over="tcp") as ranks:
        for (few, more), second in ranks.each(both, ranks.groups(transport="tcp")):
            assert [*few, *more] == [2.0] * 7
            assert [*second] == [4.0] * 3


def test_a_group_is_closed_while_another_thread_begins(monkeypatch) -> None:
    packing = SlowPacking(monkeypatch)
    with ranks_of(2, over="tcp") as ranks, ThreadPoolExecutor(2) as threads:
        groups = ranks.groups(transport="tcp")
        ranks.each(lambda each: each.all_reduce_async(np.ones(3)).result(60), groups)
        first, go = packing.start(threads, groups[0])
        generation = groups[0]._work.generation
        closing = threads.submit(groups[0].close)
        generation.wait_broken(60)
        go.set()
        with pytest.raises(ClosedError):
            first.result(60).result(60)
        closing.result(60)
