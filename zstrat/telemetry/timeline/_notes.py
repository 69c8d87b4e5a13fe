"""What a program notes of its own while a time line is taken.

Whichever thread has something to say appends to a list, which needs no lock; beyond its
bound nothing is noted, and that is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Callable


class Dispatched(NamedTuple):
    """Closures that were sent to a worker in one message, and when that was made."""

    worker: str
    closures: int
    began: float
    ended: float


@final
class ProgramNotes:
    """Of one time line. Times are those of `time.monotonic`.

    Args:
        waiting, running: Closures, when it begins.
        limit: Notes of each kind that are kept.
        steps: After so many closures ``done`` is called, once, by whoever tells of the
            last one; None: never.
    """

    def __init__(
        self,
        began: float,
        waiting: int,
        running: int,
        limit: int,
        *,
        steps: int | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        self._goal, self._done = steps, done
        self.began: Final = began
        self.waiting: Final = waiting
        self.running: Final = running
        self._limit: Final = limit
        self.scheduled: Final[list[tuple[int, float, float]]] = []
        """Step, and the begin and end of the call that has put it into the queue."""
        self.dispatched: Final[list[Dispatched]] = []
        self.ended: Final[list[tuple[int, float]]] = []
        """How many closures a worker has reported as ended, and when."""
        self.fetched: Final[list[tuple[float, float]]] = []
        """When somebody began to wait for a value, and had it."""
        self.steps = 0
        """Closures that have ended since."""
        self.is_full = False
        """Something was not noted any more."""

    def schedule(self, step: int, began: float, ended: float) -> None:
        """A call has put a closure into the queue."""
        if self._has_room(len(self.scheduled)):
            self.scheduled.append((step, began, ended))

    def dispatch(self, worker: str, closures: int, began: float, ended: float) -> None:
        """Closures were sent to a worker."""
        if self._has_room(len(self.dispatched)):
            self.dispatched.append(Dispatched(worker, closures, began, ended))

    def end(self, closures: int, now: float) -> None:
        """A worker has reported so many as ended."""
        self.steps += closures
        if self._goal is not None and self.steps >= self._goal:
            done, self._done = self._done, None
            if done is not None:
                done()
        if self._has_room(len(self.ended)):
            self.ended.append((closures, now))

    def fetch(self, began: float, ended: float) -> None:
        """Somebody has waited for a value."""
        if self._has_room(len(self.fetched)):
            self.fetched.append((began, ended))

    def _has_room(self, count: int) -> bool:
        if count < self._limit:
            return True
        self.is_full = True
        return False
