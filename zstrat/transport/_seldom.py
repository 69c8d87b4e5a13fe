"""How often something may be said in a log that strangers can make it say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE: Final = 10.0
"""Seconds between two lines: as often as a person can read them."""


class Seldom:
    """``count`` is how often there was something to say."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._said_at = clock, -PAUSE
        self.count = 0

    def may_say(self) -> bool:
        """There is something to say. Whether it is time to."""
        self.count += 1
        now = self._clock()
        if now - self._said_at < PAUSE:
            return False
        self._said_at = now
        return True
