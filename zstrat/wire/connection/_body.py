"""Bodies larger than one frame: `cut` divides them into chunks, `Assembly` joins the
chunks, and a `Sink` works on them as they arrive.

The arrays of a message are one after the other in a *body*, each at a multiple of 64
bytes, so that the memory which receives the body can serve as arrays that XLA takes
without a copy. `cut` makes the chunks in order, and `Assembly` takes them in that order
alone: a gap is an error, for a lost chunk must never look like data.

Long arrays are sent as views. Arrays below `SMALL` are gathered into common chunks, for
a frame of its own costs more than the copy.

Normally the chunks of a body are copied into memory, and the message is handed on when
the body is whole. A *sink* instead processes each chunk as it arrives, for example
applies a push to variables, while the chunk is still in the processor's cache. A sink
gets memory of the length of the body to work in, and gives the answer to the request
when the body is whole; if the body never becomes whole, the sink is dropped with its
memory, without a call. A sink keeps no copy of the chunks that it took. If it cannot
answer without a copy, it answers `Again`, and the sender sends the request once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from zstrat.errors import ProtocolError
from zstrat.wire._arrays import ArraySpec, array_from
from zstrat.wire._messages import Message

ALIGNMENT: Final = 64
"""Alignment in bytes that XLA needs of host memory to use it in place."""

SMALL: Final = 64 * 1024

Frame = bytes | memoryview

Allocate = Callable[[int], memoryview]
"""Returns writable memory of that many bytes, at a multiple of `ALIGNMENT`."""


def aligned(position: int) -> int:
    """Returns the next multiple of `ALIGNMENT` at or above ``position``."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def cut(raws: Sequence[np.ndarray], chunk: int) -> Iterator[tuple[int, memoryview]]:
    """Yields offset and bytes of each chunk of the body that consists of the arrays
    ``raws`` (uint8 [nbytes])."""
    gathered, start, position, small = bytearray(), 0, 0, min(SMALL, chunk)
    for raw in raws:
        position, size = aligned(position), raw.nbytes
        if gathered and (size >= small or position + size - start > chunk):
            yield start, memoryview(gathered)
            gathered = bytearray()
        if size >= small:
            view = raw.data
            for at in range(0, size, chunk):
                yield position + at, view[at : at + chunk]
        elif size:
            if not gathered:
                start = position
            # Padding up to the alignment of this array.
            gathered.extend(bytes(position - start - len(gathered)))
            gathered += raw.data
        position += size
    if gathered:
        yield start, memoryview(gathered)


class Assembly:
    """The incoming body of one announced message, whose chunks are collected, or given
    to a ``sink``."""

    __slots__ = (
        "_allocate",
        "_jumps",
        "_memory",
        "_offsets",
        "_position",
        "nbytes",
        "sink",
        "specs",
    )

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        allocate: Allocate,
        sink: Sink | None = None,
    ) -> None:
        self.specs, self.sink = specs, sink
        self._offsets: list[int] = []
        self._jumps: dict[int, int] = {}
        position = end = 0
        for spec in specs:
            position, size = aligned(position), spec.nbytes
            self._offsets.append(position)
            position += size
            if size:
                end = position
                self._jumps[position] = aligned(position)
        self.nbytes, self._position = end, 0
        self._allocate = allocate
        self._memory = memoryview(b"")

    @property
    def is_complete(self) -> bool:
        return self._position >= self.nbytes

    def take(self, offset: int, chunk: Frame) -> None:
        """Takes the next chunk of the body.

        Raises:
            ProtocolError: The chunk is not the next one, or the body becomes longer
                than announced.
            MemoryError: There is no memory for the body.
        """
        position = self._position
        # Only the padding after an array may be left out: a hole anywhere else would
        # hand stale memory to the reader.
        if offset != position and offset != self._jumps.get(position):
            raise ProtocolError(f"body: expected the chunk at {position}, got {offset}")
        end = offset + len(chunk)
        if end > self.nbytes or end == offset:
            raise ProtocolError(
                f"body: expected 1 to {self.nbytes - offset} bytes at {offset}, "
                f"got {len(chunk)}"
            )
        # With the first chunk, not at the header: a peer has to send something before
        # it gets memory.
        if not position:
            self._memory = self._allocate(self.nbytes)
        if self.sink is None:
            self._memory[offset:end] = chunk
        else:
            self.sink.take(self._memory, offset, chunk)
        self._position = end

    def adopt(self, memory: memoryview) -> None:
        """Takes the whole body at once, in memory where it already is."""
        if self._position:
            raise ProtocolError(f"body: {self._position} bytes of it came in chunks")
        self._memory, self._position = memory, self.nbytes

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns the arrays of the complete body: read-only views that keep it
        alive."""
        memory, make = self._memory.toreadonly(), np.ndarray
        return tuple(
            [
                # Empty arrays have no place in the body; it may even end before them.
                make(spec.shape, spec.dtype, memory, at)
                if spec.nbytes
                else array_from(spec, b"")
                for spec, at in zip(self.specs, self._offsets, strict=True)
            ]
        )


class Sink(Protocol):
    """Processes a body while it arrives, and then answers the request: see the top of
    this file."""

    def take(self, memory: memoryview, offset: int, chunk: Frame) -> None:
        """Takes the next chunk of the body, of any size, whose position in ``memory``
        begins at ``offset``.

        ``memory`` is as long as the body, the same for all chunks, and undefined where
        the sink has written nothing. Must not raise.
        """

    def finish(self) -> Message | Awaitable[Message]:
        """Returns the outcome of the request, as its handler would. Called when the
        body is whole."""


Absorb = Callable[[Message, "Sequence[ArraySpec]"], "Sink | None"]
"""Called with the header of each request whose body follows in chunks: with the message
without its arrays, and the specs of the arrays. Returns a sink for the body, or None to
get the body whole. Must not raise."""
