"""What a peer sent while it did not read what waits for it.

A peer that asks, and does not read the answers, would fill the memory of whoever
answers. So above a bound of answers that wait, its messages are kept as they came, up
to as many bytes again; and one that reads nothing at all for long is given up.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from zstrat.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._body import Frame
    from ._outbox import Outbox

_OBJECTS: Final = 256
"""Bytes that a message costs beside those of its frames, about."""

_LOOKS: Final = 10
"""Ticks, at the least, in which a peer read nothing before it is given up."""


class Backlog:
    """Of one connection; without a bound if ``most`` is infinite."""

    __slots__ = (
        "_given",
        "_looked_at",
        "_most",
        "_nbytes",
        "_patience",
        "_still",
        "messages",
    )

    def __init__(self, most: float, patience: float, now: float) -> None:
        self.messages: deque[Sequence[Frame]] = deque()
        """Those that are kept, in order."""
        self._most, self._nbytes = most, 0
        self._patience = patience
        self._given, self._still, self._looked_at = 0, 0.0, now

    def keep(self, frames: Sequence[Frame]) -> None:
        """Keeps a message.

        Raises:
            ProtocolError: They are too many.
        """
        self._nbytes += _OBJECTS + sum(map(len, frames))
        if self._nbytes > self._most:
            raise ProtocolError("it asks on, and does not read the answers")
        self.messages.append(frames)

    def take(self) -> Sequence[Frame]:
        """The first of them, which is kept no longer."""
        frames = self.messages.popleft()
        self._nbytes -= _OBJECTS + sum(map(len, frames))
        return frames

    def drop(self) -> None:
        self.messages.clear()

    def is_deaf(self, outbox: Outbox, now: float) -> bool:
        """Whether the peer has taken nothing of what waits for it in all its time. To
        be asked at every tick: if this process slept, the peer could not be served."""
        since, self._looked_at = now - self._looked_at, now
        if not len(outbox) or outbox.given != self._given:
            self._given, self._still = outbox.given, 0.0
        else:
            self._still += min(since, self._patience / _LOOKS)
        return self._still > self._patience
