"""The order in which operations use an engine that takes one at a time.

A turn is drawn where the operation gets its number, so that it stands in the same order
on all ranks; its owner waits for it, uses the engine, and passes it on.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from zstrat.transport import ThreadBell

if TYPE_CHECKING:
    from types import TracebackType


class CallTurn:
    """A place in the order; a context manager: entered when it has come."""

    __slots__ = ("_bell", "_turns")

    def __init__(self, turns: CallTurns, bell: ThreadBell | None) -> None:
        self._turns, self._bell = turns, bell

    def __enter__(self) -> None:
        if self._bell is None:
            return
        try:
            self._bell.wait(None)  # bounded: every operation before it has a deadline
        except BaseException:  # Ctrl-C: nobody leaves what was not entered
            self._turns.give_up(self._bell)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._turns.pass_on()


class CallTurns:
    """Turns of one generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[ThreadBell] = deque()
        self._is_taken = False

    def draw(self) -> CallTurn:
        """The next turn. It must be entered, whatever happens, and is then left."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return CallTurn(self, None)
            bell = ThreadBell()
            self._waiting.append(bell)
            return CallTurn(self, bell)

    def pass_on(self) -> None:
        """Whoever is next has its turn."""
        with self._lock:
            self._ring_next()

    def give_up(self, bell: ThreadBell) -> None:
        """Whoever waits for ``bell`` does not want its turn any more."""
        with self._lock:
            if bell in self._waiting:
                self._waiting.remove(bell)
            else:  # it had come, unheard
                self._ring_next()

    def _ring_next(self) -> None:
        if self._waiting:
            self._waiting.popleft().ring()
        else:
            self._is_taken = False
