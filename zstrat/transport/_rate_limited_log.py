"""Limits how often a log line is written that strangers can provoke at will."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import logging

PAUSE: Final = 10.0
"""Seconds between two lines: about as often as a person can read them."""


class RateLimitedLog:
    """Writes at most one line to ``logger`` in `PAUSE` seconds, and counts all
    lines."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._written_at = logger, -PAUSE
        self.count = 0
        """Number of lines so far, written or not."""

    def write(
        self,
        level: int,
        text: str,
        *args: object,
        error: BaseException | None = None,
    ) -> None:
        """Counts a line, and logs it with the count if the last line was written at
        least `PAUSE` seconds ago.

        Args:
            error: An exception whose traceback is logged, too.
        """
        self.count += 1
        now = time.monotonic()
        if now - self._written_at >= PAUSE:
            self._written_at = now
            text = f"{text} (%d so far)"
            self._logger.log(level, text, *args, self.count, exc_info=error)
