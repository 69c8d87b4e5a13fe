"""What a connection asks of memory that two processes of one host share.

`zstrat.transport` has the memory; a connection without any sends bodies in chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized

    import numpy as np

    from zstrat.wire._arrays import ArraySpec
    from zstrat.wire._link_messages import Hello, Offer

MIN_CHANNEL_BYTES: Final = 64 * 1024
"""A smaller body costs less to copy twice than to place and release."""

PLACE: Final = 64
"""A frame as short as this stands for a body above `MIN_CHANNEL_BYTES`, and says where
that is stored."""

MAX_CHANNEL_BYTES: Final = 64 * 2**20
"""A larger body is copied bit by bit: in one go that would hold up the loop."""


def is_placeable(specs: Sequence[ArraySpec]) -> bool:
    """Whether the body of these arrays may be in shared memory."""
    return sum([spec.nbytes for spec in specs]) > MIN_CHANNEL_BYTES


class SharedMemoryChannel(Protocol):
    """The memory of both sides of one connection. Nothing here raises."""

    @property
    def unread(self) -> Sized:
        """Bodies of the peer that nothing reads any more, and it was not told so."""

    @property
    def most_unread(self) -> int:
        """How many of them make a message worth while."""

    def offer(self, to: Hello) -> Offer | None:
        """Our memory, for the first body that is worth it; None if there is none."""

    def agreed(self, proof: bytes) -> bool:
        """The peer has mapped our memory, or cannot if the proof is empty. False if it
        claims what is not so."""

    def accept(self, offer: Offer, of: Hello) -> bytes:
        """Maps the memory of the peer: the proof of that; empty if it cannot be."""

    def place(self, raws: Sequence[np.ndarray], nbytes: int) -> int | None:
        """Copies a body into our memory: its offset, or None if it does not fit now."""

    def begin(
        self, raws: Sequence[np.ndarray], nbytes: int
    ) -> tuple[int, Iterator[None]] | None:
        """The same, but the body is there when the iterator ends: each step copies
        some."""

    def body(self, offset: int, nbytes: int) -> memoryview | None:
        """The body in the peer's memory, read-only; None if it cannot be there."""

    def released(self, offsets: Sequence[int]) -> None:
        """The peer does not read these bodies of ours any more."""

    def take_unread(self) -> list[int]:
        """What is `unread`, to tell the peer."""

    def close(self) -> None:
        """Lets go of the memory; arrays in the peer's stay readable."""
