"""The workers of a session: who may get closures, and how many. Decides only.

The law of this file: a closure is in flight at one worker at most, and a worker gets
closures only while it is OPEN: connected, in our session, and with all its per-worker
resources built. Nobody waits for anybody else's recovery.

    CONNECTING ──connected──▶ BUILDING ──built──▶ OPEN
        │                      ▲  │  ▲──new resource─┤  └─shuts down─▶ LEAVING
        └────────── LOST ──────┘  └──────────────────┴──────▶ LOST ◀──────┘

Each worker holds what it works on, the steps that it prefetches and some work ahead: 20
ms, or two round trips to it if that is more. So the round trip is hidden and little is
lost with it: the depth follows the rate at which its closures end. It gets more when a
third of that is over, or when it has nothing beyond what it works on and prefetches; if
the user has said how many it holds, it always holds so many. Everything is told by
*incarnation and connection* (`epoch`): what an earlier one says is stale.
"""

from __future__ import annotations

import enum
import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zstrat.telemetry import Throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._queue import Closure

WORK_AHEAD: Final = 0.020
"""Seconds of work that a worker holds: hides a round trip and the up to 5 ms for which
a busy user thread keeps Python's interpreter lock from our loop."""
MOST_AHEAD: Final = 0.4
"""The most for a worker that is far away, which holds two round trips of work: a third
of that ends before it gets more. No two places on earth are further apart; a longer
round trip was one to a busy process."""
MIN_DEPTH: Final = 2
"""One that runs, and one that is prepared before this has ended and been acknowledged.
"""
MAX_DEPTH: Final = 512
MOST_IN_FLIGHT: Final = 16384
"""What a worker takes at a time, and more than half a second of the quickest steps."""
HORIZON: Final = 0.25
"""Seconds after which what was measured of a worker's rate counts for a third. Outcomes
come in bursts: a rate is a sum of closures over a sum of seconds, never a mean of
quotients, which one short interval would blow up."""


class MemberState(enum.Enum):
    """What one worker can do for us."""

    CONNECTING = "connecting"
    BUILDING = "building"
    OPEN = "open"
    LEAVING = "leaving"
    """It finishes what it runs and takes nothing more."""
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Member:
    """One worker. Only `Members` changes it."""

    place: int
    name: str
    fixed_depth: int | None = None
    prefetch: int = 0
    """Steps that it pulls while one runs, if it has them by then."""
    state: MemberState = MemberState.CONNECTING
    reason: str = "not connected yet"
    """Why it is not there, for the words of an error."""
    epoch: int = 0
    """Grows with each connection."""
    in_flight: dict[int, Closure] = field(default_factory=dict)
    """By step, in the order of dispatch."""
    alone: bool = False
    """Runs a suspect: gets nothing beside it."""
    retired: bool = False
    """It is let go: it gets nothing any more, whatever its state."""
    avoided: bool = False
    """Its closures fail for its own sake: it gets some only if all others do too."""
    building: int = 0
    """Resources that it is building."""
    completed: int = 0
    losses: int = 0
    last_error: str = ""
    """Of a step that failed there, in words."""
    round_trip: float = 0.0
    """Seconds to it and back; 0 if not known yet."""
    _measured_at: float = 0.0
    _count: float = 0.0
    _seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Closures that end here per second while there is work; 0 if not known yet."""
        return self._count / self._seconds if self._seconds else 0.0

    @property
    def depth(self) -> int:
        """How many closures it may have in flight."""
        if self.fixed_depth is not None:
            return self.fixed_depth
        at_work = MIN_DEPTH + self.prefetch
        ahead = max(WORK_AHEAD, min(2 * self.round_trip, MOST_AHEAD))
        return min(at_work + round(self.rate * ahead), max(at_work, MAX_DEPTH))

    @property
    def is_open(self) -> bool:
        """Whether it may get closures at all."""
        return self.state is MemberState.OPEN and not self.retired

    @property
    def free(self) -> int:
        """How many more closures it may get now."""
        if not self.is_open or self.alone:
            return 0
        has, depth = len(self.in_flight), self.depth
        free = max(0, depth - has)
        if self.fixed_depth is not None or has < MIN_DEPTH + self.prefetch:
            return free
        # A message wakes three threads of each side, which costs as much as a short
        # step does: so it is not sent for one step where the worker has some.
        return free if 3 * free >= depth else 0


@dataclass(frozen=True, slots=True)
class Grant:
    """So many closures may go to the member; ``alone``: one suspect."""

    member: Member
    count: int
    alone: bool = False


class Members:
    """All workers of the session, which prefetch so many steps."""

    def __init__(
        self,
        names: Sequence[str],
        closures_in_flight: int | None = None,
        prefetch: int = 0,
    ) -> None:
        if closures_in_flight is not None and not (
            1 <= closures_in_flight <= MOST_IN_FLIGHT
        ):
            raise ValueError(
                f"closures_in_flight={closures_in_flight}: expected 1 to "
                f"{MOST_IN_FLIGHT}, or None to let it follow the speed of each worker"
            )
        self._depth, self._prefetch = closures_in_flight, prefetch
        self._roomy: dict[int, Member] = {}
        """Those that may have room: others have none. Of a thousand workers that are
        all busy, a turn looks at those alone of which something has ended."""
        self.members: list[Member] = []
        """Those that the cluster has, in the order in which they came. Replaced as a
        whole, for other threads look at it."""
        self._at: dict[int, Member] = {}
        self._epochs: dict[int, int] = {}
        """The last ones of workers that were removed: should one be back in its
        place, what it held is still gone."""
        self._ended = 0
        """On those that were removed."""
        self._lost = 0
        for place, name in enumerate(names):
            self.add(place, name)
        self.alone_since: float | None = None
        """Since when no worker is there; None while one is."""
        self._reserved: Member | None = None
        self._throughput = Throughput()

    @property
    def usable(self) -> list[Member]:
        return [
            m
            for m in self.members
            if m.state in (MemberState.OPEN, MemberState.BUILDING) and not m.retired
        ]

    @property
    def in_flight(self) -> int:
        return sum(len(member.in_flight) for member in self.members)

    @property
    def completed(self) -> int:
        """Closures that ended, on all of them, and on those that were removed."""
        return self._ended + sum([member.completed for member in self.members])

    @property
    def losses(self) -> int:
        """How often one was lost, those that were removed later included."""
        return self._lost + sum([member.losses for member in self.members])

    def rate(self, now: float) -> float:
        """Closures that ended per second, on all of them, of late."""
        return self._throughput.rate(now, self.completed)

    def start(self, now: float) -> None:
        """Begins to count how long nobody is there."""
        if self.alone_since is None and not self.usable:
            self.alone_since = now

    def absent(self) -> str:
        """The workers that are not there, and why, in words."""
        if not self.members:
            return "all were removed"
        gone = [m for m in self.members if m not in self.usable]
        return "; ".join(f"{m.name}: {m.reason}" for m in gone)

    def oldest(self) -> str:
        """The closure that workers have had for longest, in words; none: no words."""
        heads = [
            (next(iter(m.in_flight.values())), m) for m in self.members if m.in_flight
        ]
        if not heads:
            return ""
        closure, member = min(heads, key=lambda head: head[0].step)
        return f" (the oldest: step {closure.step}, {closure.name}, on {member.name})"

    def add(self, place: int, name: str) -> Member:
        """A worker that the cluster has from now on; it is not connected yet."""
        assert place not in self._at, place
        member = Member(place, name, self._depth, self._prefetch)
        member.epoch = self._epochs.pop(place, 0)
        self._at[place] = member
        self.members = [*self.members, member]
        return member

    def retire(self, place: int, reason: str, now: float) -> None:
        """The worker gets nothing any more; what it has it may end."""
        member = self._at[place]
        member.retired, member.reason = True, reason
        self._missing(member, now)

    def remove(self, place: int) -> None:
        """The cluster has it no more. It was `lost`, so it has nothing."""
        member = self._at.pop(place)
        assert not member.in_flight, member
        self._roomy.pop(place, None)
        self.members = [each for each in self.members if each is not member]
        self._epochs[place] = member.epoch
        self._ended += member.completed
        self._lost += member.losses

    def connected(self, place: int) -> int:
        """The worker is in our session and builds its resources; returns its epoch."""
        member = self._at[place]
        assert member.state in (MemberState.CONNECTING, MemberState.LOST), member
        assert not member.in_flight, member
        member.state, member.reason = MemberState.BUILDING, ""
        member.epoch += 1
        member.building, member.alone, member.avoided = 0, False, False
        # It may be another process, on another machine: its speed is measured anew.
        member._count = member._seconds = 0.0
        member.round_trip = 0.0
        if not member.retired:
            self.alone_since = None
        return member.epoch

    def measured(self, place: int, epoch: int, round_trip: float) -> None:
        """So many seconds are to the worker and back, on this connection."""
        member = self._at.get(place)
        if member is not None and member.epoch == epoch:
            member.round_trip = round_trip

    def build(self, place: int, count: int = 1) -> None:
        """So many resources are being built there: no closure goes there before."""
        member = self._at[place]
        assert member.state in (MemberState.OPEN, MemberState.BUILDING), member
        member.building += count
        member.state = MemberState.BUILDING

    def built(self, place: int, epoch: int, count: int = 1) -> None:
        """So many of them are built (or failed, for good); the last one opens it."""
        member = self._at[place]
        if member.epoch != epoch or member.state is not MemberState.BUILDING:
            return
        assert member.building >= count, member
        member.building -= count
        if member.building == 0:
            member.state = MemberState.OPEN
            self._roomy[place] = member

    def leaving(self, place: int, reason: str, now: float) -> None:
        """The worker shuts down: it takes no more closures."""
        member = self._at[place]
        if member.state in (MemberState.OPEN, MemberState.BUILDING):
            member.state, member.reason = MemberState.LEAVING, reason
            self._missing(member, now)

    def lost(
        self, place: int, reason: str, now: float, *, counts: bool = True
    ) -> list[Closure]:
        """The worker is gone; returns what it had in flight, in order of dispatch.

        Args:
            counts: It is a loss of the worker's own.
        """
        member = self._at[place]
        if member.state in (MemberState.CONNECTING, MemberState.LOST):
            member.reason = reason
            return []
        member.state, member.reason = MemberState.LOST, reason
        member.losses += counts
        member.building, member.alone = 0, False
        orphans = list(member.in_flight.values())
        member.in_flight.clear()
        self._missing(member, now)
        return orphans

    def grants(self, ordinary: int, suspects: int) -> list[Grant]:
        """Who gets how many of the closures that wait, the least loaded first."""
        grants = self._grant_alone(suspects)
        if not ordinary:
            return grants
        takers = self._with_room()
        # It is being emptied, for a suspect.
        if self._reserved is not None:
            takers = [(m, free) for m, free in takers if m is not self._reserved]
        if any(m.avoided for m, _ in takers):
            # Also one that has no room now: to wait for it is better than to fail.
            sound = any(m.is_open and not m.avoided for m in self.members)
            takers = [(m, free) for m, free in takers if not (m.avoided and sound)]
        if ordinary >= sum([free for _, free in takers]):
            return grants + [Grant(member, free) for member, free in takers]
        return grants + _level(takers, ordinary)

    def _with_room(self) -> list[tuple[Member, int]]:
        """Members, and how many closures each may get."""
        roomy = [(m, free) for m in self._roomy.values() if (free := m.free)]
        roomy.sort(key=lambda pair: pair[0].place)
        self._roomy = {member.place: member for member, _ in roomy}
        return roomy

    def dispatched(
        self,
        member: Member,
        closures: Sequence[Closure],
        now: float,
        *,
        alone: bool = False,
    ) -> None:
        """The closures are on their way to the member."""
        assert member.state is MemberState.OPEN, member
        assert not member.alone, member
        assert not (alone and member.in_flight), member
        member.alone = alone
        if not member.in_flight:
            member._measured_at = now
        if self._throughput.next_mark < 0:  # the first of all begins
            self._throughput.mark(now, 0, 0)
        for closure in closures:
            member.in_flight[closure.step] = closure

    def ended(self, member: Member, count: int, now: float) -> None:
        """So many closures of the member ended, or came back, since it was last asked.
        It may have room now: to be called whenever it has less in flight."""
        self._roomy[member.place] = member
        if not member.in_flight:
            member.alone = False
        if count == 0:
            return
        member.completed += count
        if now >= self._throughput.next_mark:
            completed = self.completed
            self._throughput.mark(now, completed - count, completed)
        # Not 0: two messages may be taken at one reading of the clock.
        elapsed = max(now - member._measured_at, 1e-6)
        kept = math.exp(-elapsed / HORIZON)
        member._count = member._count * kept + count
        member._seconds = member._seconds * kept + elapsed
        member._measured_at = now

    def failed(self, member: Member, error: str) -> None:
        """A step failed on the member, and is not tried again."""
        member.last_error = error

    def avoid(self, place: int, yes: bool) -> None:
        """Whether the worker is to get closures only if there is no other."""
        if (member := self._at.get(place)) is not None:
            member.avoided = yes

    def _missing(self, member: Member, now: float) -> None:
        if self._reserved is member:
            self._reserved = None
        if not self.usable and self.alone_since is None:
            self.alone_since = now

    def _grant_alone(self, suspects: int) -> list[Grant]:
        """One worker at a time is emptied for suspects, until none waits."""
        if not suspects:
            self._reserved = None
            return []
        chosen = self._reserved
        if chosen is None or not chosen.is_open:
            candidates = [m for m in self.members if m.is_open]
            if not candidates:
                return []
            chosen = min(candidates, key=lambda m: len(m.in_flight))
        self._reserved = chosen
        if chosen.in_flight:
            return []
        return [Grant(chosen, 1, alone=True)]


def _level(takers: Sequence[tuple[Member, int]], count: int) -> list[Grant]:
    """Gives each closure to the member that has the least in flight by then."""
    if count == 1:
        return [Grant(min([m for m, _ in takers], key=_load), 1)]
    heap = [(len(m.in_flight), m.place, 0, free) for m, free in takers]
    heapq.heapify(heap)
    given: dict[int, int] = {}
    for _ in range(count):
        load, place, got, free = heap[0]
        given[place] = got + 1
        if got + 1 < free:
            heapq.heapreplace(heap, (load + 1, place, got + 1, free))
        else:
            heapq.heappop(heap)
    return [Grant(m, given[m.place]) for m, _ in takers if m.place in given]


def _load(member: Member) -> tuple[int, int]:
    return len(member.in_flight), member.place
