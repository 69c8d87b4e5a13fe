"""The changes of one store on their way to its backup, by number. No I/O.

Changes are numbered from 1 on in the order in which they became true. They are sent in
that order, and kept until the backup has them: a connection that breaks and comes back
continues where the backup says. Bytes under way are bounded; what waits besides is
bounded by the requests that wait for it (`_log_shipping`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.wire import Message

WINDOW: Final = 32 * 2**20
"""Bytes that may be under way: several hundred of usual pushes, more than a line of 100
Gb/s holds in a millisecond, and next to nothing beside a store."""

MAX_CHANGES_UNDER_WAY: Final = 8192
"""Changes that may be under way: an eighth of what a connection takes."""

_OBJECT: Final = 512
"""Bytes that a change costs beside its arrays, about."""


class _Change(NamedTuple):
    message: Message
    nbytes: int


@final
class ReplicationLog:
    """The changes that the backup does not have yet."""

    def __init__(self) -> None:
        self._kept: deque[_Change] = deque()
        self.head = 0
        """The number of the last change."""
        self.taken = 0
        """The backup has all up to this one."""
        self._sent = 0
        self.nbytes = 0
        """Of all that are kept."""
        self._under_way = 0

    @property
    def is_taken(self) -> bool:
        """Whether the backup has everything."""
        return self.taken == self.head

    def append(self, message: Message) -> int:
        """Adds a change; returns its number."""
        nbytes = nbytes_of(message)
        self._kept.append(_Change(message, nbytes))
        self.nbytes += nbytes
        self.head += 1
        return self.head

    def take(self) -> Message | None:
        """Returns the next change to send, unless too much is under way."""
        place = self._sent - self.taken
        if place == len(self._kept) or place >= MAX_CHANGES_UNDER_WAY:
            return None
        if self._under_way >= WINDOW:
            return None
        change = self._kept[place]
        self._sent += 1
        self._under_way += change.nbytes
        return change.message

    def acknowledge(self, number: int) -> None:
        """The backup has all up to this one. Numbers that come late are ignored.

        Raises:
            ProtocolError: It was not sent.
        """
        if number > self._sent:
            raise ProtocolError(
                f"the backup has change {number} of {self._sent} that were sent"
            )
        while self.taken < number:
            change = self._kept.popleft()
            self.taken += 1
            self.nbytes -= change.nbytes
            self._under_way -= change.nbytes

    def resume(self, number: int) -> None:
        """There is a connection, and the backup has all up to this one: what is behind
        is sent, again if it was already.

        Raises:
            ProtocolError: It was not sent, or was acknowledged before.
        """
        if number < self.taken:
            raise ProtocolError(
                f"the backup has {number} changes, and said that it has {self.taken}"
            )
        self.acknowledge(number)
        self._sent, self._under_way = self.taken, 0


def nbytes_of(message: Message) -> int:
    """Memory of a message, about."""
    arrays: Sequence[object] = getattr(message, "arrays", ())
    code: bytes = getattr(message, "code", b"")
    return _OBJECT + len(code) + sum([array.nbytes for array in arrays])  # type: ignore[attr-defined]
