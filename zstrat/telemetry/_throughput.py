"""Computes recent rates, and defines the phases of steps and requests, whose spans may
be captured for a time line.

Rates are over ten seconds, or more if steps take longer. Steps have phases on workers,
requests on parameter servers.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections import Counter, deque
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Phase(enum.StrEnum):
    """A phase of a step. The phases of different steps overlap on a worker: while one
    step computes, the next one is drawn and pulled."""

    WAIT = "wait"
    """The time from the closure's arrival at the worker until its preparation
    begins."""
    DRAW = "draw"
    """The preparation of a step: arguments, elements of datasets, the compiled
    program."""
    PULL = "pull"
    """The time from the first request for values until all values have arrived."""
    COMPUTE = "compute"
    """The compiled program of a step, from its start until its results are in
    memory."""
    PUSH = "push"
    """The time from handing over the updates of a step until all servers have
    acknowledged them."""
    APPLY = "apply"
    """On a parameter server: the time from the turn of a push until the push is
    applied."""
    SEND = "send"
    """On a parameter server: while answers to one peer wait to be sent. Answers that
    are sent at once are not counted."""


WORKER_PHASES: Final = (Phase.WAIT, Phase.DRAW, Phase.PULL, Phase.COMPUTE, Phase.PUSH)
PS_PHASES: Final = (Phase.APPLY, Phase.SEND)


class StepUnderWay(NamedTuple):
    """The step that a worker runs now: its number, its current phase, and the phase's
    begin by the worker's clock."""

    phase: Phase
    step: int
    began: float


class PhaseSpan(NamedTuple):
    """One phase of one step: ``began`` and ``ended`` by the clock of its process, in
    seconds. ``step`` is -1 for requests of no step."""

    step: int
    phase: Phase
    began: float
    ended: float


class TrafficPoint(NamedTuple):
    """Bytes that the process received and sent until ``at``, by its clock."""

    at: float
    got: int
    sent: int


@final
class SpanCapture:
    """A bounded capture of spans and traffic of one session. Belongs to the loop.

    Args:
        limit: Most spans, and most points of traffic, to keep; earlier ones are
            dropped.
        until: Time after which spans are dropped, because the program that asked may be
            lost.
        moved: Returns the bytes that the process has received and sent.
    """

    def __init__(
        self, limit: int, until: float, moved: Callable[[], tuple[int, int]]
    ) -> None:
        self.until: Final = until
        self._moved = moved
        self.spans: Final[deque[PhaseSpan]] = deque(maxlen=limit)
        self.traffic: Final[deque[TrafficPoint]] = deque(maxlen=limit)
        self.is_cut = False
        """Whether spans were dropped."""

    def add(self, phase: Phase, spans: Iterable[tuple[float, float, float]]) -> None:
        """Adds spans of a phase: step number, begin and end of each."""
        kept = self.spans
        for step, began, ended in spans:
            if began <= self.until:
                self.is_cut |= len(kept) == kept.maxlen  # it drops the oldest one
                kept.append(PhaseSpan(int(step), phase, began, ended))

    def sample(self, now: float) -> None:
        """Adds a point of traffic."""
        if now <= self.until:
            self.traffic.append(TrafficPoint(now, *self._moved()))


RECENT: Final = 10
"""Length of the window of recent time in seconds, and number of its parts."""
STEADY: Final = 1.5
"""Events are steady if the last `RECENT` events came within this multiple of a
window."""
GAPS: Final = 3
"""Length of a window of recent time for rare events, as a multiple of the gap between
events."""


def window(times: Sequence[float], now: float) -> float:
    """Returns the length of the window in seconds: `RECENT`, or more for rare events: a
    step that takes a minute is still in the window a minute later.

    Args:
        times: Times of recent events, ascending, at most one per second.
    """
    return max(float(RECENT), GAPS * usual_gap(times, now))


def usual_gap(times: Sequence[float], now: float) -> float:
    """Returns the second longest gap between events, as the longest may be a pause; 0
    if there is only one. If events come about once a second now, earlier gaps do not
    count: an evaluation after an epoch is not a long step."""
    late = times[-RECENT - 1 :]
    if len(late) > RECENT and now - late[0] <= STEADY * RECENT:
        times = late
    gaps = sorted([later - sooner for sooner, later in pairwise(times)])
    return gaps[-2] if len(gaps) > 1 else 0.0


MARK: Final = 1.0
"""Seconds between two marks of a counter."""
MARKS: Final = 32
"""Number of marks that are kept: enough for four steps of a minute of eight workers."""


class _Mark(NamedTuple):
    at: float
    before: float
    """Value of the counter before the increase that the mark notes."""
    after: float
    """Value of the counter after that increase."""


@final
class Throughput:
    """Computes the recent rate of a counter from *marks*, notes of its value. It has no
    timer: the caller passes the time, and makes a mark about once in `MARK` seconds."""

    __slots__ = ("_marks", "next_mark")

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=MARKS)
        self.next_mark = -math.inf
        """Time from which on the next increase of the counter has to be followed by a
        `mark`."""

    def mark(self, now: float, before: float, after: float) -> None:
        """Notes that the counter has grown from ``before`` to ``after`` just now."""
        self._marks.append(_Mark(now, before, after))
        self.next_mark = now + MARK

    def rate(self, now: float, total: float) -> float:
        """Returns the rate per second over the last `window`, given the present value
        ``total`` of the counter; 0 if it has not grown for longer than a window."""
        marks = list(self._marks)
        times = [mark.at for mark in marks]
        span, gap = window(times, now), usual_gap(times, now)
        if not marks or now - times[-1] > span:
            return 0.0
        # The time since the last mark counts only when it is longer than usual: until
        # then a long step would seem to slow down, and jump back at its end.
        if now - times[-1] <= 1.5 * gap and gap > 1.5 * MARK:
            now, _, total = marks[-1]  # the next one is under way, and has not ended
        # From the last mark before the window on: a rate is between two marks.
        first = max(0, bisect_right(times, now - span) - 1)
        began, had = times[first], marks[first].after if first else marks[0].before
        if now - span - began > 1.5 * max(gap, MARK):  # it begins in a pause
            began, had = now - span, marks[first + 1].before
        # Over a second at least: two marks may be next to each other.
        return (total - had) / max(now - began, MARK)


@final
class Rate:
    """A counter that only grows, with its recent rate.

    Args:
        since: Time at which counting starts.
        total: Value of the counter at that time.
    """

    __slots__ = ("_throughput", "total")

    def __init__(self, since: float, total: float = 0.0) -> None:
        self.total = total
        self._throughput = Throughput()
        self._throughput.mark(since, total, total)

    def add(self, amount: float, now: float) -> None:
        """Adds an amount to the counter now."""
        if amount:
            self.reach(self.total + amount, now)

    def reach(self, total: float, now: float) -> None:
        """Sets the counter to ``total``, its present value where it is kept
        elsewhere."""
        if total == self.total:
            return
        before, self.total = self.total, total
        if now >= self._throughput.next_mark:
            self._throughput.mark(now, before, total)

    def per_second(self, now: float) -> float:
        """Returns the rate of the last ten seconds, or since the start if that is less
        time, but over at least one second; for rare events over more seconds
        (`window`)."""
        return self._throughput.rate(now, self.total)


@final
class TimeShares:
    """The shares of recent time that a thread or loop spends on each activity."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring: deque[tuple[int, Counter[str]]] = deque(maxlen=RECENT + 1)
        """For each recent second of the clock, the seconds that `add` was given in it,
        by name."""

    def add(self, name: str, seconds: float, now: float) -> None:
        """Adds seconds that an activity has taken until now."""
        if not seconds:
            return
        second = math.floor(now)
        # By whole seconds of the clock: old ones fall out of the ring by themselves.
        if not self._ring or self._ring[-1][0] != second:
            self._ring.append((second, Counter()))
        self._ring[-1][1][name] += seconds  # type: ignore[assignment]

    def shares(
        self, now: float, under_way: StepUnderWay | None = None
    ) -> dict[str, float]:
        """Returns the share of recent time by name of the activity; the sum is at most
        one. A long phase is added only when it ends, and may be longer than the window.

        Args:
            under_way: The current phase, which was not added yet.
        """
        ring = list(self._ring)
        since = math.floor(now) - window([second for second, _ in ring], now)
        recent = [each for each in ring if each[0] >= since]
        spent: Counter[str] = Counter()
        for _, some in recent:
            spent.update(some)
        if under_way is not None:
            seconds = max(0.0, now - under_way.began)
            spent[str(under_way.phase)] += seconds  # type: ignore[assignment]
        if not spent:
            return {}
        # A phase is added when it ends, and may have begun before the first second
        # here: then the shares are of the time that was spent.
        began = recent[0][0] if recent else now
        whole = max(now - began, sum(spent.values()))
        return {name: seconds / whole for name, seconds in spent.items()}
