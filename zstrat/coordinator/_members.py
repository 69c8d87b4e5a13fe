"""`Members`: decides which workers get closures, and how many.

The law of this file: a closure is in flight on one worker at most, and a worker gets
closures only while it is OPEN: connected, in the session, and with all its per-worker
resources built. No worker waits for the recovery of another.

    CONNECTING ──connected──▶ BUILDING ──built──▶ OPEN
        │                      ▲  │  ▲──new resource─┤  └─shuts down─▶ LEAVING
        └────────── LOST ──────┘  └──────────────────┴──────▶ LOST ◀──────┘

Each worker holds the closures that it runs, the steps that it prefetches, and some
more: work for 20 ms, or for two round trips to it if that is longer. That hides the
round trip, and little is lost with the worker. The number (`depth`) follows the rate at
which its closures end. A worker gets more when a third of them have ended, or when it
has only those that it runs and prefetches; with ``closures_in_flight`` it always holds
so many. Each connection of a worker has its `epoch`: reports of an earlier one are
stale.
"""

from __future__ import annotations

import enum
import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zstrat.telemetry import Throughput

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ._queue import Closure

WORK_AHEAD: Final = 0.020
"""Seconds of work that a worker holds ahead of time. That hides a round trip, and the
up to 5 ms for which a busy user thread keeps Python's interpreter lock from our
loop."""
MOST_AHEAD: Final = 0.4
"""The most seconds of work for a worker that is far away, which holds two round trips
of work: a third of that ends before it gets more. No two places on earth are further
apart; a longer round trip was one to a busy process."""
MIN_DEPTH: Final = 2
"""The least number of closures that a worker may hold: one runs, and the next one is
prepared before the first has ended and been acknowledged."""
MAX_DEPTH: Final = 512
MOST_IN_FLIGHT: Final = 16384
"""The most closures that a worker takes at a time: more than half a second of the
quickest steps."""
HORIZON: Final = 0.25
"""Seconds after which measurements of a worker's rate count for a third. Outcomes come
in bursts: a rate is a sum of closures over a sum of seconds, never a mean of quotients,
which one short interval would blow up."""


class MemberState(enum.Enum):
    """The state of a worker; the drawing is in the docstring of the module."""

    CONNECTING = "connecting"
    BUILDING = "building"
    OPEN = "open"
    LEAVING = "leaving"
    """The worker finishes the closures that it runs, and takes no more."""
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Member:
    """One worker: its state, its closures and its rate. Only `Members` changes it."""

    place: int
    name: str
    fixed_depth: int | None = None
    prefetch: int = 0
    """Steps whose variables the worker pulls while another step runs."""
    state: MemberState = MemberState.CONNECTING
    reason: str = "not connected yet"
    """Why the worker is not connected, for errors."""
    epoch: int = 0
    """Number of the task's entry into the session (`TaskSession.entry`)."""
    in_flight: dict[int, Closure] = field(default_factory=dict)
    """Closures that the worker has, by step, in the order of dispatch."""
    started: int = 0
    """Number of closures that the worker got and did not give back. When the worker
    joins, or gets closures again, the count begins with the number that the slowest
    worker had ended by then."""
    alone: bool = False
    """Whether the worker runs a suspect (a closure that may kill workers), which runs
    alone."""
    retired: bool = False
    """Whether the worker is being removed, and gets no closures whatever its state."""
    avoided: bool = False
    """Whether closures fail on this worker, so that it gets closures only if all other
    workers are avoided, too."""
    building: int = 0
    """Number of resources that the worker is building."""
    completed: int = 0
    losses: int = 0
    has_contributed: bool = False
    """Whether the worker has contributed to the open round of an optimizer."""
    last_error: str = ""
    """The error of the last step that failed on this worker."""
    round_trip: float = 0.0
    """Seconds of a round trip to the worker; 0 if not measured yet."""
    _measured_at: float = 0.0
    _count: float = 0.0
    _seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Closures that end on this worker per second while it has some; 0 if not
        measured yet."""
        return self._count / self._seconds if self._seconds else 0.0

    @property
    def depth(self) -> int:
        """The most closures that the worker may have in flight."""
        if self.fixed_depth is not None:
            return self.fixed_depth
        at_work = MIN_DEPTH + self.prefetch
        ahead = max(WORK_AHEAD, min(2 * self.round_trip, MOST_AHEAD))
        return min(at_work + round(self.rate * ahead), max(at_work, MAX_DEPTH))

    @property
    def finished(self) -> int:
        """Number of closures in `started` that have ended: the worker's clock for
        bounded staleness."""
        return self.started - len(self.in_flight)

    @property
    def is_open(self) -> bool:
        """Whether the worker may get closures."""
        return self.state is MemberState.OPEN and not self.retired

    @property
    def free(self) -> int:
        """Number of closures that the worker may get now, in addition to those in
        flight."""
        if not self.is_open or self.alone:
            return 0
        has, depth = len(self.in_flight), self.depth
        free = max(0, depth - has)
        # It may run dry before a third of a large depth has ended, so it is filled at
        # once.
        if self.fixed_depth is not None or has < MIN_DEPTH + self.prefetch:
            return free
        # A message wakes three threads on each side, which costs as much as a short
        # step. So it is not sent for a single step while the worker has others.
        return free if 3 * free >= depth else 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to send ``count`` closures to a member; ``alone``: one suspect
    closure, which runs alone."""

    member: Member
    count: int
    alone: bool = False


class Members:
    """All workers of the session, and the decision which of them get closures. Each
    worker prefetches ``prefetch`` steps.

    Args:
        staleness: A worker gets its closure c + staleness + 1 when every worker that is
            not avoided has ended c of its own (Ho et al., "More Effective Distributed
            ML via a Stale Synchronous Parallel Parameter Server", 2013). None: workers
            do not wait for each other.
    """

    def __init__(
        self,
        closures_in_flight: int | None = None,
        prefetch: int = 0,
        staleness: int | None = None,
    ) -> None:
        if closures_in_flight is not None and not (
            1 <= closures_in_flight <= MOST_IN_FLIGHT
        ):
            raise ValueError(
                f"closures_in_flight={closures_in_flight}: expected 1 to "
                f"{MOST_IN_FLIGHT}, or None to follow the speed of each worker"
            )
        self._depth, self._prefetch = closures_in_flight, prefetch
        self._is_paced, self.staleness = False, staleness
        self.largest_lead: int | None = None if staleness is None else 0
        """The most closures by which a worker was ahead of the slowest one when it got
        closures; None without ``staleness``, when this is not measured."""
        self._perhaps_free: dict[int, Member] = {}
        """Members that may get closures, so that a turn need not look at a thousand
        busy workers."""
        self.members: list[Member] = []
        """Present members, in the order in which they joined. The list is replaced as a
        whole, as other threads read it."""
        self._at: dict[int, Member] = {}
        self._ended = 0
        """Number of closures that ended on members removed since."""
        self._lost = 0
        self.alone_since: float | None = None
        """Time since which there is no worker; None while there is one."""
        self._reserved: Member | None = None
        self._throughput = Throughput()
        self._rates = 0.0
        """The sum of the rates of all members."""

    @property
    def usable(self) -> list[Member]:
        return [
            m
            for m in self.members
            if m.state in (MemberState.OPEN, MemberState.BUILDING) and not m.retired
        ]

    @property
    def sound(self) -> list[Member]:
        """The usable members that are not avoided, or all of them if all are avoided.
        Only these get closures, and no worker waits for any other."""
        return _sound(self.usable)

    @property
    def completed(self) -> int:
        """Number of closures that ended on all members, including removed ones."""
        return self._ended + sum([member.completed for member in self.members])

    @property
    def losses(self) -> int:
        """Number of times that a member was lost, including removed ones."""
        return self._lost + sum([member.losses for member in self.members])

    def rate(self, now: float) -> float:
        """Returns the number of closures that ended per second on all members, over the
        last seconds."""
        return self._throughput.rate(now, self.completed)

    def start(self, now: float) -> None:
        """Starts to measure for how long there is no worker."""
        if self.alone_since is None and not self.usable:
            self.alone_since = now

    def absent(self) -> str:
        """Describes the workers that cannot be used, with the reasons."""
        if not self.members:
            return "all were removed"
        sound = self.sound
        return "; ".join(
            f"{m.name}: {m.reason or 'it cannot reach a parameter server'}"
            for m in self.members
            if m not in sound
        )

    def oldest(self) -> str:
        """Describes the closure that has been in flight longest; "" if there is
        none."""
        # Copied in one step of the interpreter: the loop may end closures meanwhile.
        heads = [
            (closure, member)
            for member in self.members
            for closure in list(member.in_flight.values())[:1]
        ]
        if not heads:
            return ""
        closure, member = min(heads, key=lambda head: head[0].step)
        return f" (the oldest: step {closure.step}, {closure.name}, on {member.name})"

    def add(self, place: int, name: str) -> Member:
        """Adds a worker that is not connected yet."""
        assert place not in self._at, place
        depth = MIN_DEPTH if self._depth is None and self._is_paced else self._depth
        member = Member(place, name, depth, self._prefetch)
        self._at[place] = member
        self.members = [*self.members, member]
        return member

    def pace(self) -> None:
        """Limits each worker to two steps, from when steps contribute to rounds: one
        step runs, and one waits for its round to be closed."""
        self._is_paced = True
        for member in self.members:
            if self._depth is None:
                member.fixed_depth = MIN_DEPTH

    @property
    def waits_for_idle_worker(self) -> bool:
        """Whether a worker that has not contributed to the open round is idle, while
        one that has contributed holds closures."""
        sound = self.sound
        idle = any(not m.in_flight and not m.has_contributed for m in sound)
        return idle and any(m.in_flight and m.has_contributed for m in sound)

    def note_rounds(self, places: Collection[int]) -> None:
        """Notes which workers have contributed to the open round: the others get
        closures first."""
        for member in self.members:
            member.has_contributed = member.place in places

    def retire(self, place: int, reason: str, now: float) -> None:
        """Gives the worker no more closures. It may end the closures that it has."""
        member = self._at[place]
        member.retired, member.reason = True, reason
        self._note_unusable(member, now)

    def remove(self, place: int) -> None:
        """Removes a worker. Call it after `lost`."""
        member = self._at.pop(place)
        assert not member.in_flight, member
        self._perhaps_free.pop(place, None)
        self.members = [m for m in self.members if m is not member]
        self._ended += member.completed
        self._lost += member.losses

    def connected(self, place: int, epoch: int) -> None:
        """Notes that the worker has joined with the entry number ``epoch``, and starts
        to build its resources."""
        member = self._at[place]
        assert member.state in (MemberState.CONNECTING, MemberState.LOST), member
        assert not member.in_flight, member
        member.state, member.reason = MemberState.BUILDING, ""
        member.epoch = epoch
        # What was true of an earlier connection, or process, is not of this one.
        member.building, member.alone, member.avoided = 0, False, False
        member.round_trip = 0.0
        if not member.retired:
            self.alone_since = None
        # From 0 on it would be the slowest, and all others would wait until it has
        # caught up.
        member.started = self._slowest(besides=member)

    def measured(self, place: int, epoch: int, round_trip: float) -> None:
        """Notes the seconds of a round trip on the connection with this ``epoch``."""
        member = self._at.get(place)
        if member is not None and member.epoch == epoch:
            member.round_trip = round_trip

    def build(self, place: int, count: int = 1) -> None:
        """Notes that the worker builds ``count`` resources; until they are built the
        worker gets no closure."""
        member = self._at[place]
        assert member.state in (MemberState.OPEN, MemberState.BUILDING), member
        member.building += count
        member.state = MemberState.BUILDING

    def built(self, place: int, epoch: int, count: int = 1) -> None:
        """Notes that ``count`` resources are built or have failed; after the last one
        the worker may get closures."""
        member = self._at[place]
        # An answer of an earlier connection, whose resources are gone.
        if member.epoch != epoch or member.state is not MemberState.BUILDING:
            return
        assert member.building >= count, member
        member.building -= count
        if member.building == 0:
            member.state = MemberState.OPEN
            self._perhaps_free[place] = member

    def leaving(self, place: int, reason: str, now: float) -> None:
        """Notes that the worker shuts down, and takes no more closures."""
        member = self._at[place]
        if member.state in (MemberState.OPEN, MemberState.BUILDING):
            member.state, member.reason = MemberState.LEAVING, reason
            self._note_unusable(member, now)

    def lost(
        self, place: int, reason: str, now: float, *, counts: bool = True
    ) -> list[Closure]:
        """Notes a lost worker; returns the closures that it had, in order of dispatch.

        Args:
            counts: Count this as a loss; False if the worker was removed.
        """
        member = self._at[place]
        # The loss of one connection may be noticed twice, by its session and by a send.
        # It counts once, and the newer reason is the better one.
        if member.state in (MemberState.CONNECTING, MemberState.LOST):
            member.reason = reason
            return []
        member.state, member.reason = MemberState.LOST, reason
        member.losses += counts
        member.building, member.alone = 0, False
        # What comes back may be another process on another machine.
        self._rates -= member.rate
        member._count = member._seconds = 0.0
        orphans = list(member.in_flight.values())
        member.in_flight.clear()
        self._note_unusable(member, now)
        return orphans

    def grants(self, ordinary: int, suspects: int, running: int) -> list[Grant]:
        """Distributes waiting closures over the members, the least loaded first.

        Args:
            ordinary, suspects: Numbers of waiting closures; suspects run alone.
            running: Number of closures in flight on all members.
        """
        grants = self._grant_alone(suspects)
        if not ordinary:
            return grants
        takers = self._with_room()
        # The reserved member is being emptied for a suspect.
        if self._reserved is not None:
            takers = [(m, free) for m, free in takers if m is not self._reserved]
        if any(m.avoided for m, _ in takers):
            # A sound member may have no room now; better to wait for it than to fail.
            sound = self.sound
            takers = [(m, free) for m, free in takers if m in sound]
        if self._depth is None and not self._is_paced:
            takers = self._within_share(takers, ordinary + running)
        if ordinary < sum([free for _, free in takers]):
            given = _spread_evenly(takers, ordinary)
        else:
            given = [Grant(member, free) for member, free in takers]
        return grants + (_round_robin(given) if self._is_paced else given)

    def _with_room(self) -> list[tuple[Member, int]]:
        """Returns the members that may get closures, and how many each may get."""
        if (staleness := self.staleness) is not None:
            # Any of them may have room when the slowest has ended a closure.
            most = self._slowest() + staleness + 1
            bounded = [(m, min(m.free, most - m.started)) for m in self.members]
            return [(member, free) for member, free in bounded if free > 0]
        able = [(m, free) for m in self._perhaps_free.values() if (free := m.free)]
        able.sort(key=lambda pair: pair[0].place)
        self._perhaps_free = {member.place: member for member, _ in able}
        return able

    def _within_share(
        self, takers: Sequence[tuple[Member, int]], left: int
    ) -> list[tuple[Member, int]]:
        """Limits members to their share, by rate, of the closures that are ``left``.
        Before the end of an epoch the share is more than a member may hold. Near the
        end all workers would wait for a slow one with more: so a member gets a k-th
        closure if it ends k of them before the others end the rest. An idle member
        always gets one, as rates of closures of another kind may mislead."""
        found = []
        for member, free in takers:
            if rate := member.rate:
                # Solved k / rate <= (left + 1 - k) / (all rates - rate) for k.
                # Of equal rates the quotient is an integer in exact arithmetic, which
                # rounding must not push below itself: hence the 1e-9.
                share = max(1, math.floor((left + 1) * rate / self._rates + 1e-9))
                free = min(free, share - len(member.in_flight))
            if free > 0:
                found.append((member, free))
        return found

    def _slowest(self, besides: Member | None = None) -> int:
        """Returns how many closures the slowest worker that is not avoided has ended,
        leaving out ``besides``."""
        others = _sound([member for member in self.usable if member is not besides])
        default = 0 if besides is None else besides.finished
        return min([member.finished for member in others], default=default)

    def dispatched(
        self,
        member: Member,
        closures: Sequence[Closure],
        now: float,
        *,
        alone: bool = False,
    ) -> None:
        """Notes that these closures are being sent to the member."""
        assert member.state is MemberState.OPEN, member
        assert not member.alone, member
        assert not (alone and member.in_flight), member
        member.alone = alone
        if not member.in_flight:
            member._measured_at = now
        if self._throughput.next_mark < 0:  # the first closure of all
            self._throughput.mark(now, 0, 0)
        for closure in closures:
            member.in_flight[closure.step] = closure
        member.started += len(closures)
        if self.largest_lead is not None:
            lead = member.started - self._slowest() - 1
            self.largest_lead = max(self.largest_lead, lead)

    def ended(self, member: Member, count: int, now: float) -> None:
        """Notes that ``count`` closures of the member ended. Call this whenever the
        member has fewer closures in flight, as it may then take more."""
        self._perhaps_free[member.place] = member
        if not member.in_flight:
            member.alone = False
        if count == 0:
            return
        member.completed += count
        if now >= self._throughput.next_mark:
            completed = self.completed
            self._throughput.mark(now, completed - count, completed)
        # Not 0: two messages may be handled at one reading of the clock.
        elapsed = max(now - member._measured_at, 1e-6)
        kept, before = math.exp(-elapsed / HORIZON), member.rate
        member._count = member._count * kept + count
        member._seconds = member._seconds * kept + elapsed
        member._measured_at = now
        self._rates += member.rate - before

    def failed(self, member: Member, error: str) -> None:
        """Notes the error of a step that failed on the member and is not retried."""
        member.last_error = error

    def avoid(self, place: int, avoided: bool) -> None:
        """Avoids the worker, so that it gets closures only if all other workers are
        avoided, too; with False ends that."""
        if (member := self._at.get(place)) is not None:
            if member.avoided and not avoided:  # as one that joins
                started = self._slowest(besides=member) + len(member.in_flight)
                member.started = max(member.started, started)
            newly, member.avoided = avoided and not member.avoided, avoided
            # `_slowest` left them out while others were sound; one that was far behind
            # would now stop everybody.
            if newly and all(each.avoided for each in self.usable):
                for each in self.usable:  # all get closures again
                    least = member.finished + len(each.in_flight)
                    each.started = max(each.started, least)

    def _note_unusable(self, member: Member, now: float) -> None:
        """Notes that a worker gets no closures from now on."""
        if self._reserved is member:
            self._reserved = None
        if not self.usable and self.alone_since is None:
            self.alone_since = now

    def _grant_alone(self, suspects: int) -> list[Grant]:
        """Reserves one worker for suspects (closures that may kill workers): gives it
        no other closure until it is empty, then one suspect after the other, until none
        waits."""
        if not suspects:
            self._reserved = None
            return []
        chosen = self._reserved
        if chosen is not None and chosen.alone:
            # With it this worker may have reached the bound of staleness: the next
            # suspect waits all the same, as it could kill a second worker.
            return []
        # Not one that is avoided while others are sound: it is idle, so it would be
        # chosen each time, and the suspect would fail there and come back.
        candidates = [member for member in self.sound if member.is_open]
        if self.staleness is not None:
            # Who waits at the bound is idle, too; the slowest one never waits there.
            most = self._slowest() + self.staleness
            candidates = [member for member in candidates if member.started <= most]
        if chosen not in candidates:
            chosen = min(candidates, key=lambda m: len(m.in_flight), default=None)
        self._reserved = chosen
        if chosen is None:
            return []
        # It is reserved, so it gets nothing more, and is empty soon.
        if chosen.in_flight:
            return []
        return [Grant(chosen, 1, alone=True)]


def _sound(usable: list[Member]) -> list[Member]:
    if not any(m.is_open and not m.avoided for m in usable):
        return usable  # better these than none
    return [member for member in usable if not member.avoided]


def _round_robin(grants: Sequence[Grant]) -> list[Grant]:
    """Gives each member one closure, then each a second one, and so on, so that
    closures of one round of an optimizer follow each other."""
    most = max([grant.count for grant in grants], default=0)
    return [Grant(g.member, 1) for at in range(most) for g in grants if g.count > at]


def _spread_evenly(takers: Sequence[tuple[Member, int]], count: int) -> list[Grant]:
    """Gives each closure to the member with the fewest in flight."""
    # The usual case of a program that fetches each value before its next call: no heap.
    if count == 1:
        return [Grant(min([m for m, _ in takers], key=_load), 1)]
    heap = [(*_load(m), 0, free) for m, free in takers]
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
    return len(member.in_flight) + member.has_contributed, member.place
