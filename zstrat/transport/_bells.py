"""How a thread, or a coroutine, waits for what another thread does.

A bell is made only when somebody really has to wait, ends one wait however often it is
rung, and may be rung with a lock held. A latch opens once, for all who wait, and a
promise is a latch with something behind it. A thread waits by an acquire of a lock,
which Ctrl-C interrupts.

Python raises KeyboardInterrupt in whatever the main thread executes next. Where that is
in the middle of a lock that is written in Python, as the one in each
`concurrent.futures.Future`, `threading.Event` and `threading.Condition`, the lock stays
locked: the loop, or who ends the program, would wait for it for ever. So nothing that
the main thread shares with another one has such a lock; these have none.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from typing import Final, Generic, Protocol, TypeVar, cast, final

GLANCE: Final = 1.0
"""Seconds. A signal that arrives just before the acquire begins to block does not
interrupt it: Python would see Ctrl-C at the next acquire only."""


class Bell(Protocol):
    """Ends one wait."""

    def ring(self) -> None: ...


class ThreadBell:
    """Wakes the thread that blocks in `wait`."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        # One that was rung already raises.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Blocks the thread; False when ``timeout`` seconds have passed."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left, GLANCE))):
                return True
            if left <= GLANCE:
                return False


class LoopBell:
    """Wakes the coroutine that awaits ``future``, on whichever loop it runs."""

    __slots__ = ("__weakref__", "_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        # A closed loop raises, and has nobody who waits on it any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        # Not asked first whether it is done: who asks may be cancelled by Ctrl-C before
        # the next line.
        with contextlib.suppress(asyncio.InvalidStateError):
            self.future.set_result(None)


@final
class Latch:
    """Is opened once, from any thread or a handler of signals, and stays open."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self.is_open = True
        # One that is open already raises.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks any number of threads; False when ``timeout`` seconds have passed."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # The lock only wakes: if Ctrl-C loses it, the others find out by the next look.
        while not self.is_open:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._lock.acquire(timeout=min(left, GLANCE)):
                self.open()  # for the others
        return True


T = TypeVar("T")


@final
class Promise(Generic[T]):
    """A result or an error that one thread has, once, for any that wait for it."""

    __slots__ = ("_error", "_latch", "_value")

    def __init__(self) -> None:
        self._latch = Latch()
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def is_there(self) -> bool:
        return self._latch.is_open

    def settle(self, value: T) -> None:
        self._value = value
        self._latch.open()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._latch.open()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is there; False when ``timeout`` seconds have passed."""
        return self._latch.wait(timeout)

    def get(self) -> T:
        """Blocks until it is there; raises the error, if it is one."""
        self._latch.wait()
        if self._error is not None:
            raise self._error
        return cast("T", self._value)  # not None for want of one: `settle` was called
