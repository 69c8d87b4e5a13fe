"""A line that says how far a long operation is, for people: on a terminal alone."""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

_PAUSE: Final = 0.1
"""Seconds between two lines: faster than anybody reads."""
_LONG: Final = 0.5
"""Seconds after which an operation is long enough to talk about."""
_WIDTH: Final = 24


class ProgressBar:
    """``saving ckpt-5 [######      ] 1.2 of 4.8 GB``, rewritten in place.

    Args:
        total: Bytes.
        out: Left out: standard error.
    """

    def __init__(self, what: str, total: int, out: TextIO | None = None) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._out = sys.stderr if out is None else out
        self._is_shown = self._out is not None and self._out.isatty()
        self._next = time.monotonic() + _LONG
        self._has_written = False

    def add(self, size: int) -> None:
        """So many bytes more are done."""
        self._done += size
        if self._is_shown and (now := time.monotonic()) >= self._next:
            self._next = now + _PAUSE
            self._show()

    def end(self) -> None:
        """Removes the line."""
        if self._has_written:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._has_written = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _show(self) -> None:
        share = min(1.0, self._done / self._total) if self._total else 1.0
        bar = "#" * round(share * _WIDTH)
        size = f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
        self._out.write(f"\r{self._what} [{bar:<{_WIDTH}}] {size}\x1b[K")
        self._out.flush()
        self._has_written = True
