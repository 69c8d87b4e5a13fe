"""Exchanges the messages of two peers about shared memory: offers, answers to offers,
and releases of bodies.

A side offers its memory once per connection, when it has the first body for it. A
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
    """Offers and releases of shared memory on one connection, in both directions.

    ``unread`` has the bodies in the peer's memory that this process no longer reads. If
    it is not empty, call `release_many` before each message that is sent.
    """

    __slots__ = ("_channel", "_is_offered", "_outbox", "_was_offered", "unread")

    def __init__(self, channel: SharedMemoryChannel | None, outbox: Outbox) -> None:
        self._channel, self._outbox = channel, outbox
        self._is_offered = self._was_offered = False
        self.unread: Sized = () if channel is None else channel.unread

    def offer(self, to: Hello) -> None:
        """Offers the memory of this side to the peer, the first time that it would be
        used."""
        self._outbox.wants_channel = False
        # Once: the peer takes a second offer for a breach of the protocol.
        if self._channel is not None and not self._is_offered:
            self._is_offered = True
            offer = self._channel.offer(to)
            if offer is not None:
                self._outbox.say(offer)

    def release_many(self) -> None:
        """Reports to the peer which of its bodies are no longer read, if there are
        enough for a message; otherwise `release` reports them at the next tick."""
        if self._channel is not None and len(self.unread) >= self._channel.most_unread:
            self.release()

    def release(self) -> None:
        """Reports to the peer which of its bodies are no longer read, if there are
        any."""
        if self._channel is not None and self.unread:
            self._outbox.say(Released(self._channel.take_unread()))

    def on_offer(self, offer: Offer, of: Hello | None) -> None:
        """Maps the memory that the peer offers, and answers with the proof.

        Raises:
            ProtocolError: The peer has not greeted yet, or offers memory a second time.
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
        """Handles the peer's answer to the offer of this side.

        Raises:
            ProtocolError: This side has offered no memory, or the proof is wrong, so
                that the peer could not read bodies in the memory.
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
