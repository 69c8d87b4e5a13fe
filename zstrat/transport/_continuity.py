"""Decides when the task at the far end of a link is lost: once per loss, no I/O.

A broken connection is not yet a lost task: it may come back within ``reconnect``
seconds, if it is the same incarnation. Everything else is a loss at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.wire._greeting import described

if TYPE_CHECKING:
    from zstrat.wire import Hello


class Continuity:
    def __init__(self, reconnect: float) -> None:
        self._reconnect = reconnect
        self._hello: Hello | None = None
        self._broken: tuple[str, float] | None = None

    @property
    def due(self) -> float | None:
        """When `tick` has something to decide."""
        return None if self._broken is None else self._broken[1] + self._reconnect

    def opened(self, hello: Hello) -> str | None:
        """A task greeted. Returns why the one before it is lost, if it is."""
        before, self._hello, self._broken = self._hello, hello, None
        if before is None or before.incarnation == hello.incarnation:
            return None
        return f"it was replaced by a new process: {described(hello)}"

    def closed(self, reason: str, broken: bool, now: float) -> str | None:
        """The connection ended. Returns why the task is lost, if it is at once."""
        if self._hello is None:
            return None
        if broken:
            if self._broken is None:
                self._broken = reason, now
            return self.tick(now)
        return self._lose(reason)

    def tick(self, now: float) -> str | None:
        """Time has passed. Returns why the task is lost, if it is now."""
        if self._broken is None or now < self._broken[1] + self._reconnect:
            return None
        return self._lose(self._broken[0])

    def _lose(self, reason: str) -> str:
        self._hello = self._broken = None
        return reason
