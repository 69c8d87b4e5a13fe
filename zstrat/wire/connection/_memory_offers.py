"""What two peers say about memory that they share: it is offered, mapped, and released.

A side offers its memory when it has the first body for it, and once per connection. A
connection without a channel answers an offer with an empty proof, which means no.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.errors import ProtocolError
from zstrat.wire._link_messages import Hello, Mapped, Offer, Released

if TYPE_CHECKING:
    from collections.abc import Sized

    from ._channel import SharedMemoryChannel
    from ._outbox import Outbox


class MemoryOffers:
    """The offers of both sides of one connection.

    ``unread`` has the bodies in the peer's memory that nothing here reads now. If
    it is not empty, call `release_many` before each message that is sent.
    """

    __slots__ = ("_channel", "_is_offered", "_outbox", "_was_offered", "unread")

    def __init__(self, channel: SharedMemoryChannel | None, outbox: Outbox) -> None:
        self._channel, self._outbox = channel, outbox
        self._is_offered = self._was_offered = False
        self.unread: Sized = () if channel is None else channel.unread

    def offer(self, to: Hello) -> None:
        """Offers our memory, the first time that there is a use for it."""
        self._outbox.wants_channel = False
        # Once: the peer takes a second offer for a breach of the protocol.
        if self._channel is not None and not self._is_offered:
            self._is_offered = True
            offer = self._channel.offer(to)
            if offer is not None:
                self._outbox.say(offer)

    def release_many(self) -> None:
        """Reports to the peer which of its bodies were read, if worth a message; if
        they are not, `release` reports them at the next tick."""
        if self._channel is not None and len(self.unread) >= self._channel.most_unread:
            self.release()

    def release(self) -> None:
        """Reports to the peer which of its bodies were read, if any were."""
        if self._channel is not None and self.unread:
            self._outbox.say(Released(self._channel.take_unread()))

    def on_offer(self, offer: Offer, of: Hello | None) -> None:
        """Maps the memory that the peer offers, and answers with the proof.

        Raises:
            ProtocolError: It has not greeted yet, or offers memory a second time.
        """
        if of is None:
            raise ProtocolError("expected Hello, got Offer")
        # Mapping costs address space, and a peer might ask for it without end.
        if self._was_offered:
            raise ProtocolError("it offered memory twice")
        self._was_offered = True
        proof = b"" if self._channel is None else self._channel.accept(offer, of)
        self._outbox.say(Mapped(proof))

    def on_mapped(self, mapped: Mapped) -> None:
        """Handles the answer to our offer.

        Raises:
            ProtocolError: We have offered none, or the proof is wrong: then the peer
                cannot read what we would put there.
        """
        if self._channel is None or not self._is_offered:
            raise ProtocolError("it mapped memory that it was not offered")
        if not self._channel.agreed(mapped.proof):
            raise ProtocolError("it has not mapped the memory that it says it has")

    def on_released(self, released: Released) -> None:
        if self._channel is not None:
            self._channel.released(released.offsets)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
