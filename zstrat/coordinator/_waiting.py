"""What calls of the user ask of the loop thread, and how they wait for it.

A call repeats a short *attempt* under the lock of the engine. An attempt that cannot
succeed yet says what it waits for; the thread that changes that, often the loop's,
rings the bell of the call (`Waiters.notify`). Threads block and coroutines
await, but both wait for the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, final
from weakref import WeakSet

from zstrat.errors import DeadlineExceededError
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
"""A quick look, under the lock, whether an attempt is worth repeating."""
Attempt = Callable[[], Ready | None]
"""Done if it returns None; else what to wait for before the next attempt."""

B = TypeVar("B", bound=Bell)

_NOT_READY = RemoteValueStatus.NOT_READY


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

    def cancel_waiting(self, wish: Cancelling | None = None) -> None:
        """Has the loop call `ClosureEngine.cancel_waiting`, and drop what the workers
        have not begun. There, because Ctrl-C cannot strike in the middle of it."""
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


class GuardedQueue(Protocol):
    """What calls of the user wait for (`ClosureEngine`)."""

    lock: Lock
    """Held while something is decided."""
    notes: ProgramNotes | None
    """Where what happens is noted while a time line is taken."""

    def remind(self) -> None:
        """Wakes the loop if a call was interrupted before it could. Lock held."""
        ...

    def unfinished(self) -> str:
        """What there is still to do, in words. Lock held."""
        ...

    def fetched(self, error: Exception) -> None:
        """A fetch raises the error, now. Takes the lock."""
        ...

    @property
    def standstill(self) -> Exception | None:
        """Why nothing that waits will run, while no worker has anything. Lock held."""
        ...


@final
class Waiters:
    """All calls of the user that wait. Law: ``watchers`` changes with the lock held."""

    def __init__(self, guarded: GuardedQueue) -> None:
        self.watchers: dict[Bell, Ready] = {}
        """For each call that waits, what it waits for."""
        self.echo: Final = Echo()
        """What the workers print; shown at the latest when a wait for them ends."""
        self.fetches = 0
        """How often a value was fetched."""
        self._guarded = guarded
        self._fetching: WeakSet[Bell] = WeakSet()
        """Of each fetch that waits: none of them is asked while things go on. A bell is
        here as long as somebody waits: a loop that was closed does not say so."""

    def notify(self) -> None:
        """Wakes the calls whose condition holds now. Lock held."""
        if self._fetching and self._guarded.standstill is not None:
            bells, self._fetching = self._fetching, WeakSet()
            for bell in list(bells):
                bell.ring()
        if not self.watchers:
            return
        for bell in [bell for bell, ready in self.watchers.items() if ready()]:
            del self.watchers[bell]
            bell.ring()

    def show(self) -> None:
        """Shows what the workers that were waited for have printed."""
        self.echo.place = None
        if self.echo.is_behind:
            self.echo.show()

    def block(self, attempt: Attempt, timeout: float | None, what: str) -> None:
        """Repeats the attempt until it succeeds; blocks meanwhile.

        Raises:
            DeadlineExceededError: That took more than ``timeout`` seconds.
        """
        deadline = _deadline(timeout)
        while (bell := self._attempted(attempt, ThreadBell)) is not None:
            with self._watched(bell):
                warn_of_blocking("the same method of a zs.AsyncClusterCoordinator")
                rest = None if deadline is None else deadline - time.monotonic()
                if not bell.wait(rest):
                    with self._guarded.lock:
                        left = self._guarded.unfinished()
                    late = f"{what} did not end within {timeout} s"
                    raise DeadlineExceededError(f"{late}: {left}; they go on")

    async def wait(self, attempt: Attempt) -> None:
        """`block`, awaited. Cancellation: the attempt is not repeated any more."""
        while (bell := self._attempted(attempt, LoopBell)) is not None:
            with self._watched(bell):
                await bell.future

    def _attempted(self, attempt: Attempt, make_bell: Callable[[], B]) -> B | None:
        """The bell that rings when it may succeed; None if it has."""
        with self._guarded.lock:
            ready = attempt()
            if ready is None:
                return None
            # A call that Ctrl-C struck may have queued a closure and told nobody.
            self._guarded.remind()
            bell = make_bell()
            self.watchers[bell] = ready
            return bell

    @contextmanager
    def _watched(self, bell: Bell) -> Iterator[None]:
        """While the call waits, what workers print is shown in its context."""
        self.echo.place = copy_context()
        try:
            yield
        finally:
            with self._guarded.lock:
                self.watchers.pop(bell, None)
            self.echo.place = None

    def wait_value(self, value: RemoteValue, timeout: float | None) -> None:
        """Waits until the value is settled.

        Raises:
            PSUnavailableError, UnavailableError: That will not come to be, as nothing
                runs; the value may be there later.
            DeadlineExceededError: It took more than ``timeout`` seconds.
        """
        self._begin_fetch()
        deadline = _deadline(timeout)
        while (bell := self._bell_of(value, ThreadBell)) is not None:
            began = time.monotonic()
            self.echo.place = copy_context()
            try:
                warn_of_blocking("the remote value itself")
                rest = None if deadline is None else deadline - began
                rang = bell.wait(rest)
            finally:
                self._end_fetch(value, bell, began)
            if not rang and value.state is _NOT_READY:
                raise DeadlineExceededError(
                    f"fetch: {value!r} is not there after {timeout} s"
                )

    async def wait_value_async(self, value: RemoteValue) -> None:
        """`wait_value`, awaited. Cancellation: nothing is lost."""
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
        """What rings when the value is settled, or cannot be; None: it is settled."""
        if value.state is not _NOT_READY:
            return None
        with self._guarded.lock:
            if value.state is not _NOT_READY:
                return None
            if (error := self._guarded.standstill) is None:
                bell = make_bell()
                value._listen(bell)
                self._fetching.add(bell)
                return bell
        self._guarded.fetched(error)
        error.__context__ = None  # of the call that raised it before
        raise error.with_traceback(None)

    def _end_fetch(self, value: RemoteValue, bell: Bell, began: float) -> None:
        self._note_fetch(began)
        if value.state is _NOT_READY:  # else who settled it has forgotten the bell
            with self._guarded.lock:
                value._unlisten(bell)
        self.show()

    def _note_fetch(self, began: float) -> None:
        if (notes := self._guarded.notes) is not None:
            notes.fetch(began, time.monotonic())


def _deadline(timeout: float | None) -> float | None:
    """When as many seconds have passed; None: never.

    Raises:
        TypeError: They are no number.
    """
    if timeout is None:
        return None
    try:
        return time.monotonic() + timeout
    except TypeError:
        raise TypeError(f"timeout={timeout!r:.80}: expected seconds, or None") from None
