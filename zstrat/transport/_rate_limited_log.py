"""Bounds how often a line is logged that strangers can provoke at will."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import logging

PAUSE: Final = 10.0
"""Seconds between two lines: as often as a person can read them."""


class RateLimitedLog:
    """Writes at most one line to ``logger`` in `PAUSE` seconds, and counts all of
    them."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._written_at = logger, -PAUSE
        self.count = 0
        """Lines so far, written or not."""

    def write(
        self,
        level: int,
        text: str,
        *args: object,
        error: BaseException | None = None,
    ) -> None:
        """Counts a line, and logs it with the count if the last one is long ago.

        Args:
            error: Has its traceback logged, too.
        """
        self.count += 1
        now = time.monotonic()
        if now - self._written_at >= PAUSE:
            self._written_at = now
            text = f"{text} (%d so far)"
            self._logger.log(level, text, *args, self.count, exc_info=error)
