"""Bounds how often a line is logged that strangers can provoke at will."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE: Final = 10.0
"""Seconds between two lines: as often as a person can read them."""


class RateLimit:
    """Lets one line pass in `PAUSE` seconds. ``count`` is how often a line was due."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._said_at = clock, -PAUSE
        self.count = 0

    def may_log(self) -> bool:
        """Counts one more line that is due; true if it is to be written now."""
        self.count += 1
        now = self._clock()
        if now - self._said_at < PAUSE:
            return False
        self._said_at = now
        return True
