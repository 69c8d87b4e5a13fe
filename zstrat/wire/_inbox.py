"""The body that is on its way in: one at a time, in chunks or where it lies.

A message whose header announces arrays that are not in its frames waits here for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.errors import ProtocolError

from ._body import Allocate, Assembly, Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._codec import Announced
    from ._lane import Lane
    from ._messages import Chunk, Message, Placed


class Inbox:
    def __init__(self, allocate: Allocate, lane: Lane | None) -> None:
        self._allocate, self._lane = allocate, lane
        self._incoming: tuple[Announced, Assembly] | None = None

    @property
    def is_busy(self) -> bool:
        """A body is under way: no other message of the ordered kind may come."""
        return self._incoming is not None

    def begin(self, announced: Announced) -> None:
        """The header of a message whose body follows."""
        self._incoming = announced, Assembly(announced.specs, self._allocate)

    def take(self, chunk: Chunk, frames: Sequence[Frame]) -> None:
        """The next chunk of the body.

        Raises:
            ProtocolError: It is not the next one, or none was announced.
            MemoryError: There is no memory for the body; says how much it is.
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

    def adopt(self, placed: Placed) -> None:
        """The body lies in memory that the peer shares with us.

        Raises:
            ProtocolError: It cannot lie there, or none was announced.
        """
        assembly = self._assembly(placed.stream)
        memory = None
        if self._lane is not None:
            memory = self._lane.body(placed.offset, assembly.nbytes)
        if memory is None:
            raise ProtocolError(
                f"no {assembly.nbytes} bytes at {placed.offset} of memory that we share"
            )
        assembly.adopt(memory)

    def whole(self) -> tuple[int, Message] | None:
        """Number and message, once the body is complete."""
        if self._incoming is None or not self._incoming[1].is_complete:
            return None
        announced, assembly = self._incoming
        self._incoming = None
        return announced.request, announced.build(assembly.arrays())

    def drop(self) -> None:
        self._incoming = None

    def _assembly(self, stream: int) -> Assembly:
        if self._incoming is None or self._incoming[0].request != stream:
            raise ProtocolError(f"a part of body {stream}, which was not announced")
        return self._incoming[1]
