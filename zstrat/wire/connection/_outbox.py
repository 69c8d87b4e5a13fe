"""Queues the messages that one side of a connection has to send, in order and within
its credit.

There are two queues. *Urgent* messages (greetings, heartbeats, credits, goodbyes) leave
at once. *Ordered* messages, all others, leave one after the other, and the whole body
of one before the next message. A message with more than `HEAVY` bytes of body costs a
credit, as does each chunk of a body; while no credit is left, the ordered queue waits.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.wire._codec import encode
from zstrat.wire._link_messages import Chunk, Placed

from ._body import Frame, aligned, cut
from ._channel import MAX_CHANNEL_BYTES, MIN_CHANNEL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from zstrat.config import Limits
    from zstrat.wire._messages import Message

    from ._channel import SharedMemoryChannel

HEAVY: Final = 64 * 1024
"""Bytes of body above which a message costs a credit. Part of the protocol: both sides
have to count alike. Lighter messages are bounded by their number."""

Frames = tuple[Frame, ...]

_NO_CHUNK: Final = 0, memoryview(b"")


class _WaitingFrames(NamedTuple):
    """An ordered message that waits, with the body that follows it in chunks."""

    frames: Frames
    is_heavy: bool
    body: Iterator[tuple[int, memoryview]] | None
    number: int
    nbytes: int
    copying: Iterator[None] | None
    """Copies the body to the place that the message's `Placed` names; the message may
    leave when the copy is complete. None: it is."""


_waiting: Final[Callable[[Any], _WaitingFrames]] = partial(
    tuple.__new__, _WaitingFrames
)


class Outbox:
    """The two queues of one side of a connection: see the top of this file.

    `say` and `put` fill them, and `take` gives out what may leave now.
    """

    def __init__(self, limits: Limits, channel: SharedMemoryChannel | None) -> None:
        self._limits = limits
        self._channel = channel
        self.wants_channel = False
        """Whether a body could have used a channel (shared memory) that did not take
        it."""
        self._urgent: deque[Frames] = deque()
        self._ordered: deque[_WaitingFrames] = deque()
        self._body: Iterator[tuple[int, memoryview]] | None = None
        self._number, self._chunk = 0, _NO_CHUNK
        self._leaving = 0
        """Bytes of the message whose body is leaving in chunks now."""
        self._under_way: deque[int] = deque()
        """For each credit that was spent and has not come back, the number of the
        message that it was spent on."""
        self.nbytes = 0
        """Bytes of the ordered messages that wait, of the message whose body is leaving
        in chunks, and of the promised answers."""
        self.given = 0
        """Number of ordered messages and chunks that `take` has returned so far."""

    def __len__(self) -> int:
        """Returns the number of ordered messages that wait."""
        return len(self._ordered) + (self._body is not None)

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return a message now."""
        # As `take` decides, without taking: asked after each message of a flush.
        if self._urgent:
            return True
        if self._body is None:
            ordered = self._ordered
            if not ordered or not ordered[0].is_heavy:
                return bool(ordered)
            if ordered[0].copying is not None:
                return False
        return self._has_credit

    @property
    def is_copying(self) -> bool:
        """Whether the next ordered message waits for `copy` to copy its body."""
        return (
            self._body is None
            and bool(self._ordered)
            and self._ordered[0].copying is not None
        )

    def copy(self) -> None:
        """Copies the next part of the body of the next message, if it `is_copying`."""
        if self.is_copying:
            first = self._ordered[0]
            assert first.copying is not None
            # The iterator is at its end: the body is where `Placed` says.
            if next(first.copying, self) is self:
                self._ordered[0] = first._replace(copying=None)

    @property
    def is_urgent(self) -> bool:
        return bool(self._urgent)

    def say(self, message: Message) -> None:
        """Queues an urgent message."""
        self._urgent.append((encode(message)[0],))

    def put(self, message: Message, number: int) -> bool:
        """Queues an ordered message as the last one; returns whether its body leaves in
        chunks.

        Raises:
            TypeError, ValueError: The message cannot be sent; it was not queued.
        """
        header, raws = encode(message, number, self._limits.header)
        if not raws:
            nbytes = len(header)
            self.nbytes += nbytes
            self._ordered.append(
                _waiting(((header,), False, None, number, nbytes, None))
            )
            return False
        total = sum([raw.nbytes for raw in raws])
        if total > self._limits.body:
            raise ValueError(
                f"{type(message).__name__}: {total} bytes of arrays, at most "
                f"{self._limits.body} may be sent: send them in several parts"
            )
        if total > MIN_CHANNEL_BYTES and self._channel is not None:
            if self._put_placed(self._channel, header, number, raws, total):
                return False
            # By chunks this time; the channel may be there for the next one.
            self.wants_channel = True
        # A receiver refuses more frames than that: many arrays travel as one body.
        if total <= self._limits.chunk and len(raws) <= self._limits.frames:
            frames: Frames = (header, *[raw.data for raw in raws])
            nbytes = len(header) + total
            self._wait(frames, total > HEAVY, None, number, nbytes)
            return False
        # Cut as it leaves: views of the arrays, which must not change until then.
        body = cut(raws, self._limits.chunk)
        self._wait((header,), False, body, number, len(header) + total)
        return True

    def _put_placed(
        self,
        channel: SharedMemoryChannel,
        header: bytes,
        number: int,
        raws: Sequence[np.ndarray],
        total: int,
    ) -> bool:
        """Queues a message whose body is copied to the memory of this side; returns
        False if the memory has no room."""
        nbytes = sum([aligned(raw.nbytes) for raw in raws])
        offset, copying = None, None
        if total <= MAX_CHANNEL_BYTES:
            offset = channel.place(raws, nbytes)
        elif begun := channel.begin(raws, nbytes):
            offset, copying = begun
        if offset is None:
            return False
        # Costs a credit, as a body in one frame does: the window bounds both.
        frames: Frames = (header, encode(Placed(number, offset))[0])
        self._wait(frames, True, None, number, len(header) + total, copying)
        return True

    def _wait(
        self,
        frames: Frames,
        is_heavy: bool,
        body: Iterator[tuple[int, memoryview]] | None,
        number: int,
        nbytes: int,
        copying: Iterator[None] | None = None,
    ) -> None:
        self.nbytes += nbytes
        self._ordered.append(
            _waiting((frames, is_heavy, body, number, nbytes, copying))
        )

    def credited(self, chunks: int) -> int:
        """Gets back ``chunks`` credits, as the peer has consumed as many heavy messages
        and chunks. Returns the number of the message that the last credit was spent on;
        0 if none was spent."""
        number = 0
        # No more than is under way, whatever it says.
        for _ in range(min(chunks, len(self._under_way))):
            number = self._under_way.popleft()
        return number

    def take(self) -> Frames | None:
        """Returns the frames of the next message to send, or None if no message may
        leave now."""
        if self._urgent:
            return self._urgent.popleft()
        if self._body is not None:
            return self._take_chunk()
        if not self._ordered:
            return None
        if self._ordered[0].is_heavy:
            if not self._has_credit or self._ordered[0].copying is not None:
                return None
            self._under_way.append(self._ordered[0].number)
        waiting = self._ordered.popleft()
        self.given += 1
        if waiting.body is None:
            self.nbytes -= waiting.nbytes
        else:
            self._number, self._body = waiting.number, waiting.body
            # It counts as waiting until its last chunk has left.
            self._leaving = waiting.nbytes
            self._advance()
        return waiting.frames

    def drop(self) -> None:
        """Drops all but urgent messages, as the peer will not take the ordered ones."""
        self._ordered.clear()
        self.nbytes = 0
        self._body, self._chunk = None, _NO_CHUNK

    @property
    def _has_credit(self) -> bool:
        return len(self._under_way) < self._limits.window

    def _take_chunk(self) -> Frames | None:
        if not self._has_credit:
            return None
        self._under_way.append(self._number)
        self.given += 1
        offset, chunk = self._chunk
        self._advance()
        return encode(Chunk(self._number, offset))[0], chunk

    def _advance(self) -> None:
        assert self._body is not None
        following = next(self._body, None)
        if following is None:
            self._body, self._chunk = None, _NO_CHUNK
            self.nbytes -= self._leaving
        else:
            self._chunk = following
