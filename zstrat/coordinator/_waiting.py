"""Lets calls of the user wait for the loop thread, blocking or in asyncio.

A call repeats a short *attempt* under the lock of the engine. An attempt that cannot
succeed yet returns a condition. The thread that makes the condition true, often the
loop's, rings the bell of the call (`Waiters.notify`). Threads block on a bell and
coroutines await one; all else is the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, final
from weakref import WeakSet

from zstrat.errors import DeadlineExceededError
from zstrat.program import hide_frames
from zstrat.threads import ThreadBell
from zstrat.transport import Bell, Echo, LoopBell, warn_of_blocking

from ._values import RemoteValueStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from threading import Lock

    import numpy as np

    from zstrat.telemetry.timeline import ProgramNotes

    from ._values import Kept, RemoteValue

Ready = Callable[[], bool]
"""A condition: whether an attempt is worth repeating. Called with the lock held."""
Attempt = Callable[[], Ready | None]
"""One attempt of a call: returns None if it succeeded, else the condition for the next
attempt. Called with the lock held."""

B = TypeVar("B", bound=Bell)

_log = logging.getLogger("zstrat.coordinator")

_NOT_READY = RemoteValueStatus.NOT_READY


@dataclass(slots=True)
class Cancelling:
    """A request to cancel waiting closures, and its outcome."""

    cause: str
    """Why closures are cancelled, for the errors of their values."""
    is_done: bool = False
    waited: int = 0
    """Number of waiting closures that were cancelled."""
    running: int = 0
    """Number of closures that workers had at that time."""
    before: int = 0
    """The value of `Queue.cancelled` before the request."""


class LoopSide(Protocol):
    """The requests of the engine to the loop thread, from other threads. The first
    three are called with the lock held: they take no lock, and return at once."""

    def wake(self) -> None:
        """Wakes the loop, as closures wait. Called only if the loop had taken all
        closures before."""

    def cancel_waiting(self, request: Cancelling | None = None) -> None:
        """Makes the loop call `ClosureEngine.cancel_waiting`, and workers drop closures
        that they have not started. Runs on the loop, where Ctrl-C cannot interrupt
        it."""

    def fence(self, end: int, doubtful: list[int]) -> None:
        """Makes the parameter servers end all steps below ``end``, and report to
        `ClosureEngine.fenced` which of the doubtful ones they applied."""

    def fetch_kept(self, kept: Kept) -> list[np.ndarray]:
        """Fetches a result that its worker keeps. Blocks."""

    async def fetch_kept_async(self, kept: Kept) -> list[np.ndarray]:
        """Fetches a result like `fetch_kept`, awaited on any event loop."""


class GuardedQueue(Protocol):
    """The part of `ClosureEngine` that `Waiters` uses."""

    lock: Lock
    """The lock that is held during attempts."""
    notes: ProgramNotes | None
    """Records the program's part of a time line, while one is recorded; else None."""

    def remind(self) -> None:
        """Wakes the loop if a call that should have done so was interrupted. Lock
        held."""

    def unfinished(self) -> str:
        """Describes the closures that have not ended. Lock held."""

    def fetched(self, error: Exception) -> None:
        """Notes that a fetch has raised the error. Takes the lock."""

    @property
    def standstill(self) -> Exception | None:
        """The reason why waiting closures are not handed out, while none runs; None if
        they are. Lock held."""


@final
class UserCall:
    """The context of a call of the user: removes the frames of zstrat from the
    traceback of an error. Ctrl-C is reported to ``interrupted``. Not for calls that
    train in a loop, `schedule` and `fetch`: there a ``try`` costs nothing."""

    def __init__(
        self, interrupted: Callable[[KeyboardInterrupt], None] | None = None
    ) -> None:
        self._interrupted = interrupted

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            hide_frames(error)
        elif isinstance(error, KeyboardInterrupt) and self._interrupted is not None:
            self._interrupted(error)


@final
class Waiters:
    """The waiting calls of the user. Law: ``watchers`` changes only with the lock
    held."""

    def __init__(self, guarded: GuardedQueue) -> None:
        self.watchers: dict[Bell, Ready] = {}
        """The bell and the condition of each call that waits."""
        self.echo: Final = Echo()
        """Prints the output of workers, at the latest when a wait for their closures
        ends."""
        self.fetches = 0
        """Number of values fetched so far."""
        self._guarded = guarded
        self._fetching: WeakSet[Bell] = WeakSet()
        """The bells of fetches that wait. These are rung only at a standstill (no
        closure can run now). Weak, as a loop that was closed does not remove its
        bells."""

    def notify(self) -> None:
        """Rings the bells of the calls whose condition is true. Lock held."""
        if self._fetching and self._guarded.standstill is not None:
            # Fetches have no condition here, as settling their value rings them. So
            # only a standstill, when no value can be settled, has to wake all of them.
            bells, self._fetching = self._fetching, WeakSet()
            for bell in list(bells):
                bell.ring()
        if not self.watchers:
            return
        for bell in [bell for bell, ready in self.watchers.items() if ready()]:
            del self.watchers[bell]
            bell.ring()

    def show(self) -> None:
        """Prints the pending output of workers."""
        self.echo.place = None
        if self.echo.is_behind:
            self.echo.show()

    def block(
        self,
        attempt: Attempt,
        timeout: float | None,
        what: str,
        notice_after: float | None = None,
    ) -> None:
        """Blocks until the attempt succeeds. ``what`` names the wait in errors. Logs
        once if the wait takes more than ``notice_after`` seconds.


        Raises:
            DeadlineExceededError: The attempt did not succeed within ``timeout``
                seconds.
        """
        deadline, notice_at = _deadline(timeout), _deadline(notice_after)
        while (bell := self._attempted(attempt, ThreadBell)) is not None:
            with self._watched(bell):
                warn_of_blocking("the same method of a zs.AsyncClusterCoordinator")
                dues = [due for due in (deadline, notice_at) if due is not None]
                left = min(dues) - time.monotonic() if dues else None
                if not bell.wait(left):
                    if notice_at is not None and min(dues) == notice_at:
                        _log.warning("%s: not done after %s s", what, notice_after)
                        notice_at = None
                        continue
                    with self._guarded.lock:
                        unfinished = self._guarded.unfinished()
                    raise DeadlineExceededError(
                        f"{what} did not end within {timeout} s: {unfinished}, and go "
                        "on"
                    )

    async def wait(self, attempt: Attempt) -> None:
        """Waits until the attempt succeeds, like `block`. Cancellation: the attempt is
        not repeated."""
        while (bell := self._attempted(attempt, LoopBell)) is not None:
            with self._watched(bell):
                await bell.future

    def _attempted(self, attempt: Attempt, make_bell: Callable[[], B]) -> B | None:
        """Makes the attempt. Returns the bell that rings when another attempt may
        succeed, or None if this one has."""
        with self._guarded.lock:
            ready = attempt()
            if ready is None:
                return None
            # A call that Ctrl-C interrupted may not have woken the loop.
            self._guarded.remind()
            bell = make_bell()
            # In the same critical section as the attempt: what makes the condition true
            # comes later, so no wake-up is lost.
            self.watchers[bell] = ready
            return bell

    @contextmanager
    def _watched(self, bell: Bell) -> Iterator[None]:
        """Prints the output of workers in the context of the call while the call
        waits."""
        self.echo.place = copy_context()
        try:
            # So a notebook shows the text in the cell that waits.
            yield
        finally:
            with self._guarded.lock:
                self.watchers.pop(bell, None)
            self.echo.place = None

    def wait_value(self, value: RemoteValue, timeout: float | None) -> None:
        """Blocks until the value is settled (has a result or an error).

        Raises:
            PSUnavailableError, UnavailableError: No closure can run now; the value may
                be settled later.
            DeadlineExceededError: The value was not settled within ``timeout`` seconds.
        """
        self._begin_fetch()
        deadline = _deadline(timeout)
        while (bell := self._bell_of(value, ThreadBell)) is not None:
            began = time.monotonic()
            self.echo.place = copy_context()
            try:
                warn_of_blocking("the remote value itself")
                left = None if deadline is None else deadline - began
                rang = bell.wait(left)
            finally:
                self._end_fetch(value, bell, began)
            if not rang and value.state is _NOT_READY:
                raise DeadlineExceededError(
                    f"fetch: {value!r} did not end within {timeout} s"
                )

    async def wait_value_async(self, value: RemoteValue) -> None:
        """Waits until the value is settled, like `wait_value`. Cancellation: loses
        nothing."""
        self._begin_fetch()
        while (bell := self._bell_of(value, LoopBell)) is not None:
            began = time.monotonic()
            self.echo.place = copy_context()
            try:
                await bell.future
            finally:
                self._end_fetch(value, bell, began)

    def _begin_fetch(self) -> None:
        self.fetches += 1
        if self.echo.is_behind:
            self.echo.show()

    def _bell_of(self, value: RemoteValue, make_bell: Callable[[], B]) -> B | None:
        """Returns a bell that rings when the value is settled, or when no closure can
        run; None if the value is settled."""
        if value.state is not _NOT_READY:
            # Without the lock: most values are settled by the time that they are
            # fetched.
            return None
        with self._guarded.lock:
            if value.state is not _NOT_READY:
                return None
            if (error := self._guarded.standstill) is None:
                bell = make_bell()
                value._listen(bell)
                self._fetching.add(bell)
                return bell
        # Outside of the lock, which this takes. The error is raised again by other
        # calls, and each would add its traceback and context.
        self._guarded.fetched(error)
        error.__context__ = None  # of the call that raised it before
        raise error.with_traceback(None)

    def _end_fetch(self, value: RemoteValue, bell: Bell, began: float) -> None:
        if (notes := self._guarded.notes) is not None:
            notes.fetch(began, time.monotonic())
        if value.state is _NOT_READY:  # else settling it has removed the bell
            with self._guarded.lock:
                value._unlisten(bell)
        self.show()


def _deadline(timeout: float | None) -> float | None:
    """Returns the time ``timeout`` seconds from now; None: no deadline.

    Raises:
        TypeError: The timeout is not a number.
    """
    if timeout is None:
        return None
    try:
        return time.monotonic() + timeout
    except TypeError:
        raise TypeError(
            f"timeout={timeout!r:.80}: expected a number of seconds, or None"
        ) from None
