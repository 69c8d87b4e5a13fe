"""Who works on the body of a message while it arrives.

A body in chunks is copied into memory, and the message handed on when it is whole. A
*sink* does something else with each chunk, which is still in the processor's cache:
what has been worked on by then need not be read again. It gets the same memory to work
in, and gives the answer when the body is whole; if that never happens, it is forgotten
with its memory, and nobody is told.

A sink has no copy of what it took. If it cannot answer without one, it answers `Again`,
and the request is sent once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ._messages import Message

if TYPE_CHECKING:
    from ._arrays import ArraySpec
    from ._body import Frame


class Sink(Protocol):
    def take(self, memory: memoryview, offset: int, chunk: Frame) -> None:
        """The next chunk, of any size, whose place in ``memory`` begins at ``offset``.

        ``memory`` is as long as the body, the same for all chunks, and undefined where
        the sink has written nothing. Must not raise.
        """

    def finish(self) -> Message | Awaitable[Message]:
        """The body is whole: the outcome of the request, like that of its handler."""


Absorb = Callable[[Message, "Sequence[ArraySpec]"], "Sink | None"]
"""Asked at the header of a request whose body follows in chunks: the message without
its arrays, and what they will be. None: the body is wanted as it is. Must not raise."""
