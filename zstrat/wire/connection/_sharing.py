"""Memory that two processes of one host share, as their connection sees it.

`zstrat.transport` has the memory and gives it to a connection as a *lane*. The peers
talk about it: it is offered, mapped, released. Nothing is offered before there was a
body for it, and only once per connection. A connection without a lane says no to what
it is offered, and sends bodies in chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from zstrat.errors import ProtocolError
from zstrat.wire._messages import Hello, Mapped, Offer, Released

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized

    import numpy as np

    from zstrat.wire._arrays import ArraySpec

    from ._outbox import Outbox

LEAST: Final = 64 * 1024
"""A smaller body costs less to copy twice than to place and release."""

PLACE: Final = 64
"""A frame as short as this stands for a body above `LEAST`: it says where that lies."""

MOST: Final = 64 * 2**20
"""A larger body travels in chunks: copying it in one go would hold up the loop."""


def is_placeable(specs: Sequence[ArraySpec]) -> bool:
    """Whether the body of these arrays may lie in shared memory."""
    return sum([spec.nbytes for spec in specs]) > LEAST


class SharedMemoryLane(Protocol):
    """The memory of both sides of one connection. Nothing here raises."""

    @property
    def unread(self) -> Sized:
        """Bodies of the peer that nothing reads any more, and it was not told so."""

    def offer(self, to: Hello) -> Offer | None:
        """Our memory, for the first body that is worth it; None if there is none."""

    def agreed(self, proof: bytes) -> bool:
        """The peer has mapped our memory, or cannot if the proof is empty. False if it
        claims what is not so."""

    def accept(self, offer: Offer, of: Hello) -> bytes:
        """Maps the memory of the peer: the proof of that; empty if it cannot be."""

    def place(self, raws: Sequence[np.ndarray], nbytes: int) -> int | None:
        """Copies a body into our memory: its offset, or None if it does not fit now."""

    def body(self, offset: int, nbytes: int) -> memoryview | None:
        """The body in the peer's memory, read-only; None if it cannot lie there."""

    def released(self, offsets: Sequence[int]) -> None:
        """The peer does not read these bodies of ours any more."""

    def take_unread(self) -> list[int]:
        """What is `unread`, to tell the peer."""

    def close(self) -> None:
        """Lets go of the memory; arrays in the peer's stay readable."""


RELEASED: Final = 4
"""Bodies that may lie unread in the peer's memory before a message says so: a message
for each would cost more than it frees. What is left is said with the next tick."""


class Sharing:
    """Of one connection. ``unread`` are bodies of the peer that nothing reads any more,
    to be looked at before each message: at `RELEASED` of them call `release`."""

    __slots__ = ("_is_offered", "_lane", "_outbox", "_was_offered", "unread")

    def __init__(self, lane: SharedMemoryLane | None, outbox: Outbox) -> None:
        self._lane, self._outbox = lane, outbox
        self._is_offered = self._was_offered = False
        self.unread: Sized = () if lane is None else lane.unread

    def offer(self, to: Hello) -> None:
        """Offers our memory, the first time that there is a use for it."""
        self._outbox.wants_lane = False
        if self._lane is not None and not self._is_offered:
            self._is_offered = True
            offer = self._lane.offer(to)
            if offer is not None:
                self._outbox.say(offer)

    def release(self) -> None:
        """Says which bodies were read."""
        if self._lane is not None and self.unread:
            self._outbox.say(Released(self._lane.take_unread()))

    def on_offer(self, offer: Offer, of: Hello | None) -> None:
        if of is None:
            raise ProtocolError("expected Hello, got Offer")
        if self._was_offered:
            raise ProtocolError("it offered memory twice")
        self._was_offered = True
        proof = b"" if self._lane is None else self._lane.accept(offer, of)
        self._outbox.say(Mapped(proof))

    def on_mapped(self, mapped: Mapped) -> None:
        if self._lane is None or not self._is_offered:
            raise ProtocolError("it mapped memory that it was not offered")
        if not self._lane.agreed(mapped.proof):
            raise ProtocolError("it has not mapped the memory that it says it has")

    def on_released(self, released: Released) -> None:
        if self._lane is not None:
            self._lane.released(released.offsets)

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()
