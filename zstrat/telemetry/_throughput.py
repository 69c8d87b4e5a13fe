"""How much per second, of late: in ten seconds, or more where steps take longer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._phases import StepUnderWay


RECENT: Final = 10
"""Seconds that a window is long, and how many parts it consists of."""
STEADY: Final = 1.5
"""Times a window, in which something comes as often as a window has parts."""
GAPS: Final = 3
"""Where less comes, it is as long as so many gaps between what comes."""


def window(times: Sequence[float], now: float) -> float:
    """Seconds that are to be looked back: `RECENT`, or more where what is looked at
    comes less often: a step of a minute is seen a minute later, too.

    Args:
        times: When something came of late, in that order, once a second at the most.
    """
    return max(float(RECENT), GAPS * usual_gap(times, now))


def usual_gap(times: Sequence[float], now: float) -> float:
    """Seconds from one to the next at the most, but for one: that was a pause; 0 if
    there is no other. Where it comes about once a second by now, gaps before that do
    not count: an evaluation after each epoch is no step that takes as long."""
    late = times[-RECENT - 1 :]
    if len(late) > RECENT and now - late[0] <= STEADY * RECENT:
        times = late
    gaps = sorted([later - sooner for sooner, later in pairwise(times)])
    return gaps[-2] if len(gaps) > 1 else 0.0


MARK: Final = 1.0
"""Seconds between two marks."""
MARKS: Final = 32
"""Where eight workers end a step of a minute within some seconds, four times."""


class _Mark(NamedTuple):
    at: float
    before: float
    """How much there was before what came then,"""
    after: float
    """and with it."""


@final
class Throughput:
    """What was counted per second of late. Keeps no timer: whoever counts says what
    time it is, and leaves a mark about once in `MARK` seconds."""

    __slots__ = ("_marks", "next_mark")

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=MARKS)
        self.next_mark = -math.inf
        """From now on what is counted is to be followed by a `mark`."""

    def mark(self, now: float, before: float, after: float) -> None:
        """Just now it has become more."""
        self._marks.append(_Mark(now, before, after))
        self.next_mark = now + MARK

    def rate(self, now: float, total: float) -> float:
        """Per second, when there is so much by now, in a `window`; 0 if nothing came
        for longer than that."""
        marks = list(self._marks)
        times = [mark.at for mark in marks]
        span, gap = window(times, now), usual_gap(times, now)
        if not marks or now - times[-1] > span:
            return 0.0
        if now - times[-1] <= 1.5 * gap and gap > 1.5 * MARK:
            now, _, total = marks[-1]  # the next one is under way, and has not ended
        first = max(0, bisect_right(times, now - span) - 1)
        began, had = times[first], marks[first].after if first else marks[0].before
        if now - span - began > 1.5 * max(gap, MARK):  # it begins in a pause
            began, had = now - span, marks[first + 1].before
        return (total - had) / max(now - began, MARK)


@final
class Rate:
    """A sum that only grows, and how much of it came per second of late.

    Args:
        since: The time from which on it is counted,
        total: and what it is then.
    """

    __slots__ = ("_throughput", "total")

    def __init__(self, since: float, total: float = 0.0) -> None:
        self.total = total
        self._throughput = Throughput()
        self._throughput.mark(since, total, total)

    def add(self, amount: float, now: float) -> None:
        """Counts what came just now."""
        if amount:
            self.reach(self.total + amount, now)

    def reach(self, total: float, now: float) -> None:
        """Somebody else counts, and has come to ``total`` by now."""
        if total == self.total:
            return
        before, self.total = self.total, total
        if now >= self._throughput.next_mark:
            self._throughput.mark(now, before, total)

    def per_second(self, now: float) -> float:
        """Of the last ten seconds, or of all if that is less, but at least of one; of
        more where it comes less often (`window`)."""
        return self._throughput.rate(now, self.total)


@final
class TimeShares:
    """What a thread, or a loop, spends its time with of late (`window`)."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring: deque[tuple[int, Counter[str]]] = deque(maxlen=RECENT + 1)
        """Seconds of the clock, and seconds spent that were told in each."""

    def add(self, name: str, seconds: float, now: float) -> None:
        """Adds what was spent with this until now."""
        if not seconds:
            return
        second = math.floor(now)
        if not self._ring or self._ring[-1][0] != second:
            self._ring.append((second, Counter()))
        self._ring[-1][1][name] += seconds  # type: ignore[assignment]

    def shares(
        self, now: float, under_way: StepUnderWay | None = None
    ) -> dict[str, float]:
        """The parts of the time by name, together one at the most: what is not told is
        not spent with any of them. What took long is told when it ends, and may fill
        more than the window.

        Args:
            under_way: What has not ended, and is told when it does.
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
        began = recent[0][0] if recent else now
        whole = max(now - began, sum(spent.values()))
        return {name: seconds / whole for name, seconds in spent.items()}
