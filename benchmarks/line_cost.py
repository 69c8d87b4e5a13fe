"""What a call costs on lines of a given kind: schedules carried out on a clock.

A rank has one line out and one line in. A hop leaves when the rank has it and the line
out is free, keeps both lines busy for its bytes, and arrives a latency later.
Arithmetic is free. Chunks follow each other as they do in `ScheduleProgress`.

Where all ranks do the same at the same time, one of them stands for all: what it
receives is what it sends itself. So a ring of a thousand costs a few thousand events,
and no schedule is made but the one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat.collectives import Act, algorithm_named, first_place
from zstrat.config import MiB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.collectives import Schedule

_SEND, _FINISH = Act.SEND, Act.FINISH


@dataclass(frozen=True, slots=True)
class LinkCost:
    """``latency`` seconds from the last byte out to the last byte in; ``overhead``
    seconds that each hop keeps both lines busy besides its bytes."""

    bandwidth: float = 25e9 / 8
    """Bytes per second."""
    latency: float = 50e-6
    overhead: float = 0.0

    def busy(self, nbytes: float) -> float:
        """How long a hop keeps a line busy."""
        return self.overhead + nbytes / self.bandwidth


ETHERNET: Final = LinkCost()
"""25 Gb/s and 50 µs."""


def cost(
    call: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    line: LinkCost = ETHERNET,
    chunk_bytes: int = MiB,
    *,
    one_for_all: bool = True,
) -> float:
    """Seconds from the start of all ranks to the end of the last.

    Args:
        call: "all_reduce", "broadcast" (from rank 0), ...
        algorithm: Its name among the algorithms of the call.
        nbytes: Of the whole array: what a rank gives to an all_reduce, reduce_scatter,
            broadcast or all_to_all, what it gets from an all_gather.
        one_for_all: Where all ranks do the same one of them is looked at; else all.

    Raises:
        ValueError: There is no such call or algorithm.
    """
    named = algorithm_named(call, algorithm)
    make, alike = named.rooted(0), one_for_all and named.alike.holds(ranks)
    schedules = [make(rank, ranks) for rank in range(1 if alike else ranks)]
    blocks = len(schedules[0].blocks)
    if call == "all_to_all":
        blocks = ranks  # of which a rank gives
    chunks = max(1, -(-nbytes // (blocks * chunk_bytes)))
    return _SimulatedCall(
        schedules, chunks, nbytes / (blocks * chunks), line, alike
    ).seconds()


@dataclass(slots=True)
class _Rank:
    """The lines of a rank, and where hops to it go on."""

    out_free: float
    in_free: float
    receipts: dict[int, tuple[int, int]]
    """Place: block, index of its action."""
    like: dict[int, int]
    """Of ranks that are alike: the place that is received when this one is sent."""


class _SimulatedCall:
    """One call on the clock. An event is a hop that leaves, or one that arrives."""

    def __init__(
        self,
        schedules: list[Schedule],
        chunks: int,
        nbytes: float,
        line: LinkCost,
        are_alike: bool,
    ) -> None:
        self._schedules, self._chunks = schedules, chunks
        self._busy, self._latency = line.busy(nbytes), line.latency
        self._are_alike = are_alike
        self._ranks = [_rank(schedule) for schedule in schedules]
        self._at: dict[tuple[int, int, int], int] = {}
        self._early: set[tuple[int, int, int]] = set()
        self._events: list[tuple[float, int, bool, int, int, int]] = []
        self._count = 0

    def seconds(self) -> float:
        """Runs to the end."""
        now = 0.0
        for rank, block, chunk in self._starts():
            self._at[rank, block, chunk] = 0
            self._go_on(rank, block, chunk, now)
        while self._events:
            now, _, leaves, rank, place, chunk = heapq.heappop(self._events)
            if leaves:
                self._leave(rank, place, chunk, now)
            else:
                self._arrive(rank, place, chunk, now)
        return now

    def _starts(self) -> Iterator[tuple[int, int, int]]:
        for rank, schedule in enumerate(self._schedules):
            places = [first_place(actions) for actions in schedule.blocks]
            blocks = [b for b, actions in enumerate(schedule.blocks) if actions]
            blocks.sort(key=places.__getitem__)
            for chunk in range(self._chunks):
                for block in blocks:
                    yield rank, block, chunk

    def _go_on(self, rank: int, block: int, chunk: int, now: float) -> None:
        actions = self._schedules[rank].blocks[block]
        at = self._at[rank, block, chunk]
        while at < len(actions):
            act, peer, place = actions[at]
            if act is _SEND:
                self._send(rank, peer, place, chunk, now)
            elif act is not _FINISH:
                if (rank, place, chunk) not in self._early:
                    break
                self._early.discard((rank, place, chunk))
            at += 1
        self._at[rank, block, chunk] = at

    def _send(self, rank: int, peer: int, place: int, chunk: int, now: float) -> None:
        """The hop takes its place on the line out; to be seen when it leaves."""
        sender = self._ranks[rank]
        start = max(now, sender.out_free)
        sender.out_free = start + self._busy
        if self._are_alike:
            peer, place = rank, sender.like[place]
        self._push(start, True, peer, place, chunk)

    def _leave(self, rank: int, place: int, chunk: int, now: float) -> None:
        """Hops take a line in by the order in which they leave, whoever sent them."""
        receiver = self._ranks[rank]
        begins = max(now + self._latency, receiver.in_free)
        receiver.in_free = begins + self._busy
        self._push(receiver.in_free, False, rank, place, chunk)

    def _arrive(self, rank: int, place: int, chunk: int, now: float) -> None:
        block, index = self._ranks[rank].receipts[place]
        if self._at[rank, block, chunk] == index:
            self._at[rank, block, chunk] += 1
            self._go_on(rank, block, chunk, now)
        else:
            self._early.add((rank, place, chunk))

    def _push(
        self, when: float, leaves: bool, rank: int, place: int, chunk: int
    ) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, leaves, rank, place, chunk))


def _rank(schedule: Schedule) -> _Rank:
    sends: list[int] = []
    receipts: dict[int, tuple[int, int]] = {}
    for block, actions in enumerate(schedule.blocks):
        for index, (act, _, place) in enumerate(actions):
            if act is _SEND:
                sends.append(place)
            elif act is not _FINISH:
                receipts[place] = (block, index)
    # The n-th hop that comes was the n-th of a rank that does as this one does.
    like = dict(zip(sorted(sends), sorted(receipts), strict=False))
    return _Rank(0.0, 0.0, receipts, like)
