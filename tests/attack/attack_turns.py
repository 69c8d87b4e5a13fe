"""A daemon whose event loop notes how long each of its turns takes.

What counts is the processor time of the loop's own thread: on a machine whose cores are
shared the clock tells how busy the others are. Run as a program this is the daemon:

    python attack_turns.py BOOK ps --index 0 --bind 127.0.0.1:0
"""

from __future__ import annotations

import asyncio
import importlib
import mmap
import sys
import time
from dataclasses import dataclass

UNIT = 50_000
"""Nanoseconds of one bucket."""
BUCKETS = 4096
"""The last one is for all that took longer, 0.2 seconds."""


class NotingLoop(asyncio.SelectorEventLoop):
    """Counts turns by their length, and adds up their time, in ``book``."""

    def __init__(self, book):
        super().__init__()
        self._book = book

    def _run_once(self):
        before = time.thread_time_ns()
        super()._run_once()
        took = time.thread_time_ns() - before
        at = min(took // UNIT, BUCKETS - 1)
        self._book[at] += 1
        self._book[BUCKETS + at] += took
        self._book[-1] = max(self._book[-1], took)


def opened(path, *, new):
    """A book: turns by length, nanoseconds by length, nanoseconds of the longest."""
    size = 8 * (2 * BUCKETS + 1)
    with path.open("w+b" if new else "r+b") as file:
        if new:
            file.truncate(size)
        return memoryview(mmap.mmap(file.fileno(), size)).cast("Q")


@dataclass(frozen=True)
class Turns:
    """Those since ``since``, if it is given. Durations in milliseconds."""

    book: tuple[int, ...]
    since: Turns | None = None

    @property
    def count(self):
        return sum(self._counts)

    @property
    def longest(self):
        """Of all that there were."""
        return self.book[-1] / 1e6

    def within(self, share):
        """So long, at most, that share of the turns took."""
        left = share * self.count
        for at, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return (at + 1) * UNIT / 1e6
        return self.longest

    def longer(self, than):
        """Seconds in turns that took longer."""
        first = round(than * 1e6) // UNIT
        return sum(self._times[first:]) / 1e9

    @property
    def _counts(self):
        return self._differences(0)

    @property
    def _times(self):
        return self._differences(BUCKETS)

    def _differences(self, first):
        now = self.book[first : first + BUCKETS]
        if self.since is None:
            return list(now)
        before = self.since.book[first : first + BUCKETS]
        return [b - a for a, b in zip(before, now, strict=True)]


def main():
    from pathlib import Path

    from zstrat.transport import _loop

    _, path, job, *argv = sys.argv
    book = opened(Path(path), new=True)
    daemon = importlib.import_module(f"zstrat.daemons.{job}")
    _loop.new_event_loop = lambda: NotingLoop(book)
    daemon.main(argv)


if __name__ == "__main__":
    main()
