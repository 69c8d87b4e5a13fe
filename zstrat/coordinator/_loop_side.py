"""What the engine, on the threads of the user, asks of the loop thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from ._values import Kept


@dataclass(slots=True)
class Cancelling:
    """A wish that what waits be cancelled, and what came of it."""

    cause: str
    """What the cancelled values say of it."""
    is_carried_out: bool = False
    waited: int = 0
    """Closures that waited, and were cancelled at once."""
    running: int = 0
    """Closures that were with workers."""
    before: int = 0
    """Closures of the queue that had been cancelled before."""


class LoopSide(Protocol):
    """What is asked of the loop thread, from any other. The first three are called with
    the lock held: they take no lock and return at once."""

    def wake(self) -> None:
        """Closures wait. Called seldom: only if the loop had taken all there were."""
        ...

    def drain(self, wish: Cancelling | None = None) -> None:
        """Has the loop call `ClosureEngine.drain` and drop what the workers have not
        begun. There, because Ctrl-C cannot strike in the middle of it."""
        ...

    def fence(self, end: int, doubtful: list[int]) -> None:
        """The parameter servers are to end all steps below ``end``, and to say which of
        the doubtful ones they have applied; `ClosureEngine.fenced` hears of it."""
        ...

    def bring(self, kept: Kept) -> list[np.ndarray]:
        """Fetches a result that is kept on its worker; blocks."""
        ...

    async def bring_async(self, kept: Kept) -> list[np.ndarray]:
        """`bring`, awaited on any event loop."""
        ...
