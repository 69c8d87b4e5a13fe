"""The interface between a connection and memory that two processes of one host share, a
*channel*.

`zstrat.transport` implements it. A connection without a channel sends bodies in chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized

    import numpy as np

    from zstrat.wire._arrays import ArraySpec
    from zstrat.wire._link_messages import Hello, Offer

MIN_CHANNEL_BYTES: Final = 64 * 1024
"""Bytes up to which a body goes through sockets: to copy a smaller body twice costs
less than to place it in the channel and release it."""

PLACE: Final = 64
"""Bytes of a frame below which the frame is not the body of a message above
`MIN_CHANNEL_BYTES`, but a `Placed` message that says where the body is."""

MAX_CHANNEL_BYTES: Final = 64 * 2**20
"""Bytes above which a body is copied to the channel in steps: a single copy would block
the loop too long."""


def is_placeable(specs: Sequence[ArraySpec]) -> bool:
    """Returns whether the body of these arrays may be sent through shared memory."""
    return sum([spec.nbytes for spec in specs]) > MIN_CHANNEL_BYTES


class SharedMemoryChannel(Protocol):
    """The shared memory of both sides of one connection. No method raises."""

    @property
    def unread(self) -> Sized:
        """Bodies of the peer's memory that this process no longer reads, and has not
        yet reported to the peer."""

    @property
    def most_unread(self) -> int:
        """Number of `unread` bodies from which it pays to report them by a `Released`
        message."""

    def offer(self, to: Hello) -> Offer | None:
        """Creates the memory of this side, for its first large body, and returns the
        offer of it to the peer; None: the two cannot share memory."""

    def agreed(self, proof: bytes) -> bool:
        """Notes the peer's answer to the offer: it has mapped our memory, or cannot if
        the proof is empty. Returns False if the proof is wrong."""

    def accept(self, offer: Offer, of: Hello) -> bytes:
        """Maps the memory that the peer offers. Returns the proof of that; empty: this
        side cannot map it."""

    def place(self, raws: Sequence[np.ndarray], nbytes: int) -> int | None:
        """Copies a body into the memory of this side. Returns its offset; None: there
        is no room now."""

    def begin(
        self, raws: Sequence[np.ndarray], nbytes: int
    ) -> tuple[int, Iterator[None]] | None:
        """Starts to copy a body into the memory of this side. Returns its offset, and
        an iterator whose steps copy the parts; None: there is no room now."""

    def body(self, offset: int, nbytes: int) -> memoryview | None:
        """Returns a read-only view of a body in the peer's memory; None: there is no
        such body."""

    def released(self, offsets: Sequence[int]) -> None:
        """Frees the bodies at these offsets of this side's memory, which the peer no
        longer reads."""

    def take_unread(self) -> list[int]:
        """Returns and clears `unread`, for a report to the peer."""

    def close(self) -> None:
        """Releases the memory of this side; arrays in the peer's memory stay
        readable."""
