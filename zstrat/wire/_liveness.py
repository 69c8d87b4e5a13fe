"""When a connection was last used, and whether the peer behind it counts as lost.

A peer that greets has ``handshake`` seconds for it; later it may be silent for
``patience``, and away for ``reconnect`` if the network below is broken. A process that
slept itself does not blame its peer. No clock: the owner says what time it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zstrat.config import Timeouts


class Liveness:
    """``sent_at`` and ``heard_at`` are written by the owner, once per message."""

    __slots__ = ("_ticked_at", "_times", "broken_at", "heard_at", "sent_at")

    def __init__(self, times: Timeouts, now: float) -> None:
        self._times = times
        self.sent_at = self.heard_at = self._ticked_at = now
        self.broken_at: float | None = None
        """Since when the network below is gone."""

    def tick(self, now: float) -> None:
        """Time has passed; to be called at `due` at the latest."""
        overslept = now - self._ticked_at - 2 * self._times.beat
        self._ticked_at = now
        if overslept > 0:
            # This process was stopped or blocked: what the peer said in the meantime,
            # or its return, is still in the socket, so the silence is ours. What was
            # heard since is of now, and no credit for later.
            self.heard_at = min(now, self.heard_at + overslept)
            if self.broken_at is not None:
                self.broken_at = min(now, self.broken_at + overslept)

    @property
    def due(self) -> float:
        return self._ticked_at + self._times.beat / 2

    def is_quiet(self, now: float) -> bool:
        """Whether it is time for a beat: nothing else was said."""
        return now - self.sent_at >= self._times.beat

    def is_lost(self, now: float, *, greeted: bool) -> bool:
        times = self._times
        if self.broken_at is not None:
            return now - self.broken_at > times.reconnect
        patience = times.patience if greeted else times.handshake
        return now - self.heard_at > patience

    def loss(self, now: float, *, greeted: bool) -> str:
        """Why the peer is lost, in words."""
        if self.broken_at is not None:
            reconnect = self._times.reconnect
            return f"its connection broke and did not come back within {reconnect:g} s"
        silence = now - self.heard_at
        if not greeted:
            return f"it did not greet within {silence:.1f} s"
        return f"it was silent for {silence:.1f} s"
