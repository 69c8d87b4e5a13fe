"""Engines that carry a group's calls out in shared memory: on one host, or within each.

*Ranks on one host.* Every call is carried out in the rooms of the group. An algorithm
that a caller names says how messages go. Here none go, so it says nothing, and the call
stays in memory: a name must not make it slower.

*Ranks on several hosts.* Each host agrees in its memory, its first rank speaks for it.
A reduction goes in parts. Each part is reduced inside the host, its first rank starts
the reduction of that part among the first ranks of all hosts, and while it travels the
next part is reduced; when it is back, the others of the host copy it. So the network
carries each element once per host, not once per rank, and both kinds of work overlap
(the hierarchy of Horovod [Sergeev and Del Balso 2018] and of MPI's two-level trees).
The algorithm that a caller names, or the table chooses, is that of the first ranks.

Between hosts travels what is reduced in part (f32 for f16 and bf16); each first rank
takes the mean and rounds, from the same bits, so all ranks hold the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from zstrat.collectives._engine import CallKind
from zstrat.collectives._reduction import Reduction, reduction_of
from zstrat.collectives._terms import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.collectives._engine import Between, CollectiveCall, Started

    from ._shm_collectives import ShmCollectives


class OneHost:
    """The engine of a group whose ranks all run on this host. ``closed`` is called
    when it is closed."""

    def __init__(self, rooms: ShmCollectives, closed: Callable[[], object]) -> None:
        self._rooms: ShmCollectives | None = rooms
        self._closed = closed

    def takes(self, call: CollectiveCall) -> bool:
        return may_take(call)

    def run(self, call: CollectiveCall) -> None:
        rooms = self._rooms
        assert rooms is not None, "the group runs nothing after close()"
        with rooms.meeting.call(call.about, call.deadline):
            carry_out(rooms, call)

    def waits(self) -> Sequence[int]:
        rooms = self._rooms
        return () if rooms is None else rooms.meeting.waits()

    def abort(self, error: Exception) -> None:
        rooms = self._rooms
        if rooms is not None:
            rooms.meeting.abort(error)

    def close(self) -> None:
        self._rooms = None
        self._closed()


def may_take(call: CollectiveCall) -> bool:
    """Whether shared memory is for this call, whatever its kind."""
    # Tagged calls may come in another order elsewhere: here the order is all there is.
    return call.tag is None and call.compression is None


def carry_out(rooms: ShmCollectives, call: CollectiveCall) -> None:
    """A call among the ranks of ``rooms`` alone."""
    source, target = call.source, call.target
    match call.kind:
        case CallKind.ALL_REDUCE:
            reduction = reduction_of(call.op, source.dtype, rooms.size)
            rooms.all_reduce(reduction, source, target)
        case CallKind.BROADCAST:
            rooms.broadcast(call.root, source, target)
        case CallKind.ALL_GATHER:
            rooms.all_gather(call.sizes, source, target)
        case CallKind.REDUCE_SCATTER:
            reduction = reduction_of(call.op, source.dtype, rooms.size)
            rooms.reduce_scatter(reduction, call.sizes, source, target)
        case CallKind.ALL_TO_ALL:
            rooms.all_to_all(call.sizes, source, target)
        case CallKind.BARRIER:
            rooms.meeting.meet()
        case _:
            assert_never(call.kind)


PART: Final = 4 * 2**20
"""Bytes of a part: four rooms, so that a ring of some hosts still has hops of 1 MiB."""

AHEAD: Final = 8
"""Parts that travel at once: 32 MiB, what 25 Gb/s carry in 10 ms; what the first ranks
keep of f16 and bf16 besides the result is bounded by it."""

_KINDS: Final = (CallKind.ALL_REDUCE, CallKind.BROADCAST, CallKind.BARRIER)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is: which host, counted by first ranks, and which rank on it."""

    host: int
    place: int


def places_of(hosts: Sequence[object]) -> tuple[list[RankPlace], list[int]]:
    """Place of each rank, and the first rank of each host; ``hosts`` is, by rank, what
    the ranks of one host have alike."""
    seen: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        seen.setdefault(host, []).append(rank)
    numbers = {host: number for number, host in enumerate(seen)}
    places = [
        RankPlace(numbers[host], seen[host].index(rank))
        for rank, host in enumerate(hosts)
    ]
    return places, [ranks[0] for ranks in seen.values()]


class HostsEngine:
    """The engine of a group on several hosts. Gathers and exchanges, which save nothing
    by it, go by messages."""

    def __init__(
        self,
        rooms: ShmCollectives,
        rank: int,
        places: Sequence[RankPlace],
        leaders: Sequence[int],
        between: Between,
        closed: Callable[[], object],
    ) -> None:
        self._closed = closed
        self._rooms: ShmCollectives | None = rooms
        self._places, self._leaders = tuple(places), tuple(leaders)
        self._host, self._leads = places[rank].host, places[rank].place == 0
        self._others = tuple(leader for leader in leaders if leader != rank)
        self._between = between
        self._is_between = False

    def takes(self, call: CollectiveCall) -> bool:
        shares = len(self._leaders) < len(self._places)
        return shares and call.kind in _KINDS and may_take(call)

    def run(self, call: CollectiveCall) -> None:
        rooms = self._rooms
        assert rooms is not None, "the group runs nothing after close()"
        with rooms.meeting.call(call.about, call.deadline):
            if call.kind is CallKind.ALL_REDUCE:
                self._all_reduce(rooms, call)
            elif call.kind is CallKind.BROADCAST:
                self._broadcast(rooms, call)
            else:
                self._barrier(rooms, call)

    def waits(self) -> Sequence[int]:
        rooms = self._rooms
        if self._is_between:
            return self._others
        return () if rooms is None else rooms.meeting.waits()

    def abort(self, error: Exception) -> None:
        rooms = self._rooms
        if rooms is not None:
            rooms.meeting.abort(error)

    def close(self) -> None:
        self._rooms = None
        self._closed()

    def _all_reduce(self, rooms: ShmCollectives, call: CollectiveCall) -> None:
        """Cost on the network, per host: one all-reduce of the array."""
        whole = reduction_of(call.op, call.source.dtype, len(self._places))
        op = ReduceOp.SUM if call.op is ReduceOp.MEAN else call.op
        within = Reduction(op, whole.accumulator, whole.accumulator, rooms.size)

        def hand_out(part: slice, total: np.ndarray, started: Started | None) -> None:
            target = call.target[part]
            if started is not None:
                self._wait(started)
                whole.finish(total, target if whole.rounds else total)
            rooms.broadcast(0, target, target)

        travelling: deque[tuple[slice, np.ndarray, Started | None]] = deque()
        for number, part in enumerate(_parts(call, whole.accumulator)):
            total = call.target[part]
            if whole.rounds and self._leads:
                total = np.empty(total.size, whole.accumulator)
            rooms.reduce(within, call.source[part], total)
            started = None
            if self._leads:
                across = replace(call, source=total, target=total, op=op)
                started = self._between.start(across, self._leaders, number)
            travelling.append((part, total, started))
            if len(travelling) >= AHEAD:
                hand_out(*travelling.popleft())
        while travelling:
            hand_out(*travelling.popleft())

    def _broadcast(self, rooms: ShmCollectives, call: CollectiveCall) -> None:
        """Cost on the network: one broadcast of the array among the hosts."""
        root = self._places[call.root]
        is_here = root.host == self._host
        travelling: deque[tuple[slice, Started | None]] = deque()

        def arrive(part: slice, started: Started | None) -> None:
            if started is not None:
                self._wait(started)
            if not is_here:
                target = call.target[part]
                rooms.broadcast(0, target, target)

        for number, part in enumerate(_parts(call, call.source.dtype)):
            target = call.target[part]
            if is_here:
                # The root may have no more than read-only memory: nothing is written
                # to what is one and the same.
                source = call.source[part] if call.source is not call.target else target
                rooms.broadcast(root.place, source, target)
            started = None
            if self._leads:
                across = replace(call, source=target, target=target, root=root.host)
                started = self._between.start(across, self._leaders, number)
            travelling.append((part, started))
            if len(travelling) >= AHEAD:
                arrive(*travelling.popleft())
        while travelling:
            arrive(*travelling.popleft())

    def _barrier(self, rooms: ShmCollectives, call: CollectiveCall) -> None:
        rooms.meeting.meet()
        if self._leads:
            self._wait(self._between.start(call, self._leaders, 0))
        rooms.meeting.meet()

    def _wait(self, started: Started) -> None:
        self._is_between = True
        try:
            started.wait()
        finally:
            self._is_between = False


def _parts(call: CollectiveCall, dtype: np.dtype) -> Iterator[slice]:
    """At least one: there is something to agree about in an empty array, too."""
    step, size = PART // dtype.itemsize, call.source.size
    for start in range(0, max(size, 1), step):
        yield slice(start, min(start + step, size))
