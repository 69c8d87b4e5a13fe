"""How much per second, of late."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Final, final

from ._histogram import RECENT

MARK: Final = 1.0
"""Seconds between two marks."""


@final
class Throughput:
    """What was counted per second in the last `RECENT` seconds. Keeps no timer: whoever
    counts says what time it is, and leaves a mark about once in `MARK` seconds."""

    __slots__ = ("_marks", "next_mark")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=round(RECENT / MARK) + 2)
        """Times, and how much there was before."""
        self.next_mark = -math.inf
        """From now on a count is to be preceded by a `mark`."""

    def mark(self, now: float, total: float) -> None:
        """There is so much so far, and more comes now."""
        self._marks.append((now, total))
        self.next_mark = now + MARK

    def rate(self, now: float, total: float) -> float:
        """Per second, when there is so much so far; 0 if nothing came of late."""
        since = now - RECENT
        marks = list(self._marks)
        recent = [mark for mark in marks if mark[0] > since]
        before = marks[: len(marks) - len(recent)]
        if before and before[-1][0] > since - MARK:  # some came behind it, before
            recent.insert(0, before[-1])
        elif before and recent:  # a pause: between the two there was none
            recent.insert(0, (since, recent[0][1]))
        if not recent:
            return 0.0
        began, had = recent[0]
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
        self._throughput.mark(since, total)

    def add(self, amount: float, now: float) -> None:
        """So much came just now."""
        if amount:
            self.reach(self.total + amount, now)

    def reach(self, total: float, now: float) -> None:
        """Somebody else counts, and has come to ``total`` by now."""
        if total == self.total:
            return
        if now >= self._throughput.next_mark:
            self._throughput.mark(now, self.total)
        self.total = total

    def per_second(self, now: float) -> float:
        """Of the last ten seconds, or of all if that is less, but at least of one."""
        return self._throughput.rate(now, self.total)


@final
class TimeShares:
    """What a thread, or a loop, spends the last `RECENT` seconds with."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring: deque[tuple[int, Counter[str]]] = deque(maxlen=RECENT + 1)
        """Seconds of the clock, and seconds spent that were told in each."""

    def add(self, name: str, seconds: float, now: float) -> None:
        """So much was spent with this until now."""
        if not seconds:
            return
        second = math.floor(now)
        if not self._ring or self._ring[-1][0] != second:
            self._ring.append((second, Counter()))
        self._ring[-1][1][name] += seconds  # type: ignore[assignment]

    def shares(self, now: float) -> dict[str, float]:
        """The parts of the time by name, together one at the most: what is not told is
        not spent with any of them. What took long is told when it ends, and may fill
        more than the window."""
        since = math.floor(now) - RECENT
        recent = [each for each in self._ring if each[0] >= since]
        if not recent:
            return {}
        spent: Counter[str] = Counter()
        for _, some in recent:
            spent.update(some)
        whole = max(now - recent[0][0], sum(spent.values()))
        return {name: seconds / whole for name, seconds in spent.items()}
