"""Receives the ordered messages of a connection: checks the order of their numbers, and
collects their bodies.

A message whose header announces arrays that are not in its frames waits here for its
body, one message at a time: the arrays come in chunks, or are in memory that the peer
shares. A whole message is returned as `Arrived`. ``taken`` counts heavy messages (with
a large body) and chunks, for the credits that the peer gets back. If a peer does not
read the answers that wait for it, its own messages are kept unread in its `Backlog`.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.errors import ProtocolError
from zstrat.wire._arrays import array_from
from zstrat.wire._codec import decode_header
from zstrat.wire._link_messages import Placed

from ._body import Allocate, Assembly, Frame
from ._channel import PLACE, is_placeable
from ._outbox import HEAVY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.config import Limits
    from zstrat.wire._codec import Announced
    from zstrat.wire._link_messages import Chunk
    from zstrat.wire._messages import Message

    from ._body import Absorb, Sink
    from ._channel import SharedMemoryChannel
    from ._deadlines import Carrier
    from ._outbox import Outbox


class Arrived(NamedTuple):
    """A whole message. ``is_heavy``: it has cost its sender a credit. If there is a
    ``sink``, the sink has the arrays, and the message has none."""

    number: int
    message: Message
    is_heavy: bool
    sink: Sink | None = None


_arrived: Final[Callable[[Any], Arrived]] = partial(tuple.__new__, Arrived)


class Inbox:
    """Takes the ordered messages that arrive, and the bodies that follow them.
    ``initiator``: this side sends the requests, and gets answers, which have the
    numbers of their requests and are outside of the order."""

    def __init__(
        self,
        allocate: Allocate,
        channel: SharedMemoryChannel | None,
        limits: Limits,
        *,
        initiator: bool,
        absorb: Absorb | None = None,
    ) -> None:
        self._allocate, self._channel, self._limits = allocate, channel, limits
        self._initiator, self._absorb = initiator, absorb
        self._incoming: tuple[Announced, Assembly] | None = None
        self._place = 0  # of the last message, in the order
        self.taken = 0
        """Number of heavy messages and chunks taken since the last credit was given."""

    def take(self, announced: Announced, frames: Sequence[Frame]) -> Arrived | None:
        """Takes the next message. Returns it if it is whole, or None if its body
        follows.

        Raises:
            ProtocolError: The message is out of order, or its frames are not what its
                header announces.
        """
        number, specs = announced.request, announced.specs
        # One body at a time: the sender sends nothing else of the order before its end.
        if self._incoming is not None:
            kind = announced.message_kind.__name__
            raise ProtocolError(f"{kind} inside the body of another message")
        # Answers have the numbers of their requests, and come as these are done.
        if not (number & 1 and self._initiator):
            self._place += 1
            if number >> 1 != self._place:
                raise ProtocolError(
                    f"expected message {self._place}, got {number >> 1}: some were lost"
                )
        if not specs and len(frames) == 1:
            return _arrived((number, announced.build(()), False, None))
        return self._take_arrays(announced, frames[1:])

    def take_chunk(self, chunk: Chunk, frames: Sequence[Frame]) -> Arrived | None:
        """Takes the next chunk of a body. Returns the whole message after the last
        chunk, else None.

        Raises:
            ProtocolError: The chunk is not the next one of an announced body.
            MemoryError: There is no memory for the body; the error names its size.
        """
        assembly = self._assembly(chunk.stream)
        if len(frames) != 1:
            raise ProtocolError(f"a chunk: expected one frame, got {len(frames)}")
        try:
            assembly.take(chunk.offset, frames[0])
        except MemoryError:
            raise MemoryError(
                f"no memory for the {assembly.nbytes} bytes that it announced"
            ) from None
        self.taken += 1
        return self._whole()

    def drop(self) -> None:
        self._incoming = None

    def _take_arrays(
        self, announced: Announced, raws: Sequence[Frame]
    ) -> Arrived | None:
        specs, kind = announced.specs, announced.message_kind.__name__
        if len(raws) > self._limits.frames:
            raise ProtocolError(
                f"{kind}: expected at most {self._limits.frames} frames, "
                f"got {len(raws)}"
            )
        # No array of so large a body fits into so short a frame, so this is a `Placed`.
        if len(raws) == 1 and len(raws[0]) < PLACE and is_placeable(specs):
            self._incoming = announced, Assembly(specs, self._allocate)
            self._adopt(raws[0])
            return self._whole()
        if len(raws) != len(specs):
            if raws:
                raise ProtocolError(
                    f"{kind}: expected {len(specs)} frames, got {len(raws)}"
                )
            sink = self._sink(announced)
            self._incoming = announced, Assembly(specs, self._allocate, sink)
            # Whole at once if all arrays are empty: then no chunk follows.
            return self._whole()
        message = announced.build(tuple(map(array_from, specs, raws)))
        is_heavy = sum(map(len, raws)) > HEAVY
        self.taken += is_heavy
        return _arrived((announced.request, message, is_heavy, None))

    def _sink(self, announced: Announced) -> Sink | None:
        """Returns the sink for the body of a request, or None. Other messages have no
        sink: notices, answers and sent code are needed whole."""
        if self._absorb is None or announced.outside or not announced.request & 1:
            return None
        return self._absorb(announced.build(()), announced.specs)

    def _adopt(self, place: Frame) -> None:
        """Takes over the body that a `Placed` frame names, in memory that the peer
        shares with this process."""
        placed = decode_header(place, self._limits).build(())
        if not isinstance(placed, Placed):
            raise ProtocolError(f"expected Placed, got {type(placed).__name__}")
        assembly = self._assembly(placed.stream)
        memory = None
        if self._channel is not None:
            memory = self._channel.body(placed.offset, assembly.nbytes)
        if memory is None:
            raise ProtocolError(
                f"no {assembly.nbytes} bytes at {placed.offset} of memory that we share"
            )
        assembly.adopt(memory)
        # A credit for the whole body, as its sender has paid one.
        self.taken += 1

    def _whole(self) -> Arrived | None:
        """Returns the message whose body was being collected, once the body is
        complete, else None."""
        if self._incoming is None or not self._incoming[1].is_complete:
            return None
        announced, assembly = self._incoming
        self._incoming = None
        sink = assembly.sink
        message = announced.build(assembly.arrays() if sink is None else ())
        return _arrived((announced.request, message, True, sink))

    def _assembly(self, stream: int) -> Assembly:
        if self._incoming is None or self._incoming[0].request != stream:
            raise ProtocolError(f"a part of body {stream}, which was not announced")
        return self._incoming[1]


_OBJECTS: Final = 256
"""About how many bytes of Python objects a message takes in addition to its frames.
Counted so that a peer cannot fill the memory with empty messages."""

_LOOKS: Final = 10
"""Fewest ticks without progress until a peer is given up: the time before one tick
counts as a tenth of the timeout at most, as this process may have been late itself."""

_BEATS: Final = 4096
"""Bytes under way to the peer above which they are more than heartbeats. The peer's
machine takes heartbeats whether the peer reads or not, so they prove no progress."""


class Backlog:
    """Keeps the messages of a peer that does not read the answers that wait for it.

    A peer that keeps asking and never reads would fill the memory of the other side. So
    when more than ``most`` bytes of answers wait, the peer's messages are kept unread,
    up to another ``most`` bytes, and a peer that reads nothing for ``timeout`` seconds
    is given up. An infinite ``most`` means no bound.
    """

    __slots__ = (
        "_carrier",
        "_delivered",
        "_given",
        "_looked_at",
        "_most",
        "_nbytes",
        "_still",
        "_timeout",
        "messages",
    )

    def __init__(
        self,
        most: float,
        timeout: float,
        now: float,
        carrier: Carrier,
    ) -> None:
        self.messages: deque[Sequence[Frame]] = deque()
        """The kept messages, oldest first."""
        self._carrier, self._delivered = carrier, 0
        self._most, self._nbytes = most, 0
        self._timeout = timeout
        self._given, self._still, self._looked_at = 0, 0.0, now

    def keep(self, frames: Sequence[Frame]) -> None:
        """Keeps a message of the peer unread, as the newest one.

        Raises:
            ProtocolError: More than ``most`` bytes would be kept.
        """
        self._nbytes += _OBJECTS + sum(map(len, frames))
        if self._nbytes > self._most:
            raise ProtocolError("it sends more requests, and does not read the answers")
        self.messages.append(frames)

    def take(self) -> Sequence[Frame]:
        """Removes and returns the oldest message."""
        frames = self.messages.popleft()
        self._nbytes -= _OBJECTS + sum(map(len, frames))
        return frames

    def drop(self) -> None:
        self.messages.clear()

    def is_deaf(self, outbox: Outbox, now: float) -> bool:
        """Returns whether the peer has read nothing for ``timeout`` seconds although
        messages wait for it. Call it at every tick, as the time is counted tick by
        tick.

        Bytes that a slow network still carries to the peer do not count as unread.
        """
        since, self._looked_at = now - self._looked_at, now
        # Something has left since the last look, or nothing waits.
        if not len(outbox) or outbox.given != self._given:
            self._given, self._still = outbox.given, 0.0
            return False
        carried = self._carrier.carried()
        before, self._delivered = self._delivered, carried.delivered
        # The peer's machine still takes bytes: the line is slow, not the peer.
        if carried.queued > _BEATS and carried.delivered > before:
            self._still = 0.0
        else:
            self._still += min(since, self._timeout / _LOOKS)
        return self._still > self._timeout
