"""Whether a rank that waits should look again or sleep.

Looking is right while the other rank runs on another core and is about to arrive: a
sleep and a wake-up cost more than what is left to wait. It is wrong when both take
turns on one core, or when something else wants the cores: then every look is taken
from whom is waited for. Nobody can know; a rank goes by what its last waits have shown.

The same 64 MB of 2 ranks on 2 cores take 5.5 ms with looks, 10 with sleeps; beside a
process that keeps one core busy, 11 ms with sleeps and 40 with looks (100 if looks also
yield the core); going by the last waits 5.5 and 11. (`benchmarks.raw_shared`)
"""

from __future__ import annotations

from typing import Final

LOOKS: Final = 2000
"""60 µs: what a chunk of 1 MiB takes, and twice a sleep and a wake-up."""

YIELDS: Final = 20
"""Where ranks outnumber cores each look yields the core, to run who is waited for."""

SLOW: Final = 0.0005
"""Seconds of looking after which it was not the other rank that ran meanwhile."""

MISSES: Final = 4
"""Waits in a row that looks did not end, until there is a rest from looking."""

REST: Final = 64
"""Waits without looks: then one is tried again, at the cost of 1 µs for each."""


class Patience:
    """The looks of one rank. ``is_crowded``: there are more ranks than cores."""

    def __init__(self, is_crowded: bool) -> None:
        self.yields = is_crowded
        self._looks = YIELDS if is_crowded else LOOKS
        self._misses = self._rest = 0

    def looks(self) -> int:
        """How many to take in the wait that begins now."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._looks

    def ended(self, arrived: bool, took: float) -> None:
        """The looks of a wait are over, after ``took`` seconds."""
        if arrived and took <= SLOW:
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= MISSES:
            # The try after the rest is enough to rest again.
            self._rest, self._misses = REST, MISSES - 1
