"""The result of a collective operation that its caller does not wait for at once.

The operation may end on the loop's thread, on an engine's, or in the call that starts
it. Any number of threads and coroutines may wait for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from zstrat.errors import DeadlineExceededError, ZstratError
from zstrat.threads import ThreadBell
from zstrat.transport import LoopBell, copied_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from zstrat.transport import Bell

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of an operation under way. Await it on any event loop, or call
    `result`, as often as you like.

    Cancelling the wait does not cancel the operation, in which other ranks take part:
    its arrays must not be changed before the operation has ended.

    Args:
        words: The operation that runs, as text for logs and errors.
        over: Called once when the operation has ended, before its waiters wake up.
    """

    __slots__ = (
        "_bells",
        "_error",
        "_finish",
        "_is_over",
        "_lock",
        "_over",
        "_value",
        "words",
    )

    def __init__(self, words: str, over: Callable[[], object] = lambda: None) -> None:
        self.words, self._over = words, over
        self._lock = threading.Lock()
        self._bells: list[Bell] = []
        self._is_over = False
        self._finish: Callable[[], T] | None = None
        self._value: T | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Returns whether the operation has ended, so that `result` would not wait."""
        return self._is_over

    def result(self, timeout: float | None = None) -> T:
        """Blocks until the operation has ended, and returns its result.

        Raises:
            DeadlineExceededError: ``timeout`` seconds have passed; the operation
                continues.
            Exception: CollectiveTimeoutError, PeerLostError, InvalidArgumentError or
                UnavailableError, as the blocking call.
        """
        if not self._is_over:
            bell = ThreadBell()
            if self._enlist(bell) and not bell.wait(timeout):
                raise DeadlineExceededError(
                    f"{self.words} is not over after {timeout} s"
                )
        return self._outcome()

    def __await__(self) -> Generator[object, None, T]:
        if not self._is_over:
            bell = LoopBell()
            if self._enlist(bell):
                yield from bell.future
        return self._outcome()

    def settle(self, finish: Callable[[], T]) -> None:
        """Notes that the operation has succeeded. ``finish`` makes the result, on the
        thread that asks for it first."""
        self._finish = finish
        self._end()

    def fail(self, error: Exception) -> None:
        """Notes that the operation has failed, and makes `result` raise the error."""
        self._error = error
        self._end()

    def _enlist(self, bell: Bell) -> bool:
        with self._lock:
            if not self._is_over:
                self._bells.append(bell)
            return not self._is_over

    def _end(self) -> None:
        # Before its waiters wake up: the next call of theirs may need the slot.
        self._over()
        with self._lock:
            self._is_over = True
            bells, self._bells = self._bells, []
        for bell in bells:
            bell.ring()

    def _outcome(self) -> T:
        if self._error is not None:
            if not isinstance(self._error, ZstratError):
                raise self._error
            # A copy for each caller, with its own traceback.
            raise copied_error(self._error)
        with self._lock:
            if self._finish is not None:
                # Under the lock: two callers must not make two results. In their
                # threads, not on the loop, as it may copy much.
                self._value, self._finish = self._finish(), None
        return cast("T", self._value)  # not None for want of one: `settle` was called
