"""The interface of a connection to memory that two processes of one host share.

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
"""A smaller body costs less to copy twice than to place and release."""

PLACE: Final = 64
"""A frame as short as this stands for a body above `MIN_CHANNEL_BYTES`, and says where
that is stored."""

MAX_CHANNEL_BYTES: Final = 64 * 2**20
"""A larger body is copied in steps: a single copy would block the loop too long."""


def is_placeable(specs: Sequence[ArraySpec]) -> bool:
    """Returns whether the body of these arrays may be sent through shared memory."""
    return sum([spec.nbytes for spec in specs]) > MIN_CHANNEL_BYTES


class SharedMemoryChannel(Protocol):
    """The memory of both sides of one connection. Nothing here raises."""

    @property
    def unread(self) -> Sized:
        """Bodies of the peer that are no longer read, not yet reported to it."""

    @property
    def most_unread(self) -> int:
        """Number of `unread` bodies after which a `Released` message pays."""

    def offer(self, to: Hello) -> Offer | None:
        """Creates our memory, for the first large body; None: not possible."""

    def agreed(self, proof: bytes) -> bool:
        """Notes that the peer has mapped our memory, or cannot if the proof is empty.
        Returns False if the proof is wrong."""

    def accept(self, offer: Offer, of: Hello) -> bytes:
        """Maps the memory of the peer. Returns the proof; empty: not possible."""

    def place(self, raws: Sequence[np.ndarray], nbytes: int) -> int | None:
        """Copies a body into our memory. Returns its offset; None: no room now."""

    def begin(
        self, raws: Sequence[np.ndarray], nbytes: int
    ) -> tuple[int, Iterator[None]] | None:
        """Starts to copy a body into our memory. Returns its offset, and an iterator
        whose steps copy the parts; None: no room now."""

    def body(self, offset: int, nbytes: int) -> memoryview | None:
        """Returns a read-only view of a body in the peer's memory; None: invalid."""

    def released(self, offsets: Sequence[int]) -> None:
        """Frees bodies of ours that the peer no longer reads."""

    def take_unread(self) -> list[int]:
        """Returns and clears `unread`, to report it to the peer."""

    def close(self) -> None:
        """Releases the memory; arrays in the peer's memory stay readable."""
