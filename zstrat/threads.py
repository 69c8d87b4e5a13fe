"""Threads and waits between threads that stay correct after Ctrl-C.

Python raises KeyboardInterrupt at any point of the main thread. Inside the locks of
`concurrent.futures.Future`, `threading.Event` and `threading.Condition`, which are
written in Python, it leaves the lock acquired, and the event loop, or the end of the
program, would block on it forever. Law: objects that the main thread shares with other
threads have no such lock. The classes here only use locks written in C, whose acquire
Ctrl-C interrupts.

A bell (`ThreadBell`) ends one wait of a thread, however often it is rung, and may be
rung while holding a lock. A latch opens once, for all waiting threads. A promise is a
latch with a result.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GLANCE: Final = 1.0
"""Longest time in seconds that one acquire blocks before it is repeated. A signal that
arrives just before an acquire blocks does not interrupt it: Python handles Ctrl-C only
at the next one."""


class ThreadBell:
    """Wakes the thread that blocks in `wait`."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Held from the start, so that `wait` blocks until `ring` releases it.
        self._lock.acquire()

    def ring(self) -> None:
        # Raises if the bell was rung already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Blocks the thread until the bell is rung; returns False after ``timeout``
        seconds.

        Raises:
            ValueError: ``timeout`` is NaN.
        """
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout=nan: expected seconds, or None")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            # A lock refuses negative seconds.
            if self._lock.acquire(timeout=max(0.0, min(left, GLANCE))):
                return True
            if left <= GLANCE:
                return False


@final
class Latch:
    """An event that happens once: it is opened by any thread or a signal handler, and
    stays open."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self.is_open = True
        # Raises if the latch is open already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks the calling thread until the latch is open; returns False after
        ``timeout`` seconds. Several threads may wait."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # The lock only wakes: if Ctrl-C loses it, other threads check `is_open` again
        # after `GLANCE`.
        while not self.is_open:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._lock.acquire(timeout=min(left, GLANCE)):
                self.open()  # wakes the next thread
        return True


@final
class SteadyThread(threading.Thread):
    """A thread that the main thread may start and join safely.

    Ctrl-C inside `threading.Thread.start` can leave a thread that never runs, because
    it waits for a lock. Before Python 3.13, Ctrl-C inside `join` makes later calls
    believe that the thread has ended.
    """

    def __init__(
        self, target: Callable[..., object], args: Iterable[Any] = (), *, name: str
    ) -> None:
        # A daemon: the interpreter must not wait for it before it runs exit handlers,
        # which end the thread.
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._over = Latch()
        self._process: int | None = None
        """Id of the process that started the thread; a forked process does not have the
        thread."""

    def start(self) -> None:
        """Starts the thread and waits until it runs.

        Cancellation: after Ctrl-C the thread may run, may not run, or may start a
        moment later.

        Raises:
            RuntimeError: The system has no more threads, the interpreter is shutting
                down, or the thread was started before.
        """
        if self.ident is not None:
            raise RuntimeError("threads can only be started once")
        begun: SimpleQueue[BaseException | None] = SimpleQueue()
        # Before it runs: `is_alive` may be asked by the thread itself.
        self._process = os.getpid()
        try:
            _thread.start_new_thread(self._begin, (begun,))
        except RuntimeError:
            self._over.open()
            raise
        error = begun.get()
        if error is not None:
            raise error

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.open()

    def is_alive(self) -> bool:
        """Returns whether the thread was started and has not ended."""
        return self._process == os.getpid() and not self._over.is_open

    def join(self, timeout: float | None = None) -> None:
        """Blocks until the thread has ended, at most ``timeout`` seconds; returns at
        once if it was not started."""
        if self.is_alive() and self.ident == _thread.get_ident():
            raise RuntimeError("cannot join current thread")
        if self.is_alive() and not self._over.wait(timeout):
            return
        # Its function has ended; what is left is Python's own end of the thread.
        if super().is_alive():
            super().join()

    def _begin(self, begun: SimpleQueue[BaseException | None]) -> None:
        try:
            super().start()
        except BaseException as error:  # raised by `start`
            if self.ident is None:  # otherwise an earlier, interrupted start succeeded
                self._over.open()
            begun.put(error)
        else:
            begun.put(None)


T = TypeVar("T")


@final
class Promise(Generic[T]):
    """A result or an error of one thread, for any number of waiting threads."""

    __slots__ = ("_error", "_latch", "_value")

    def __init__(self) -> None:
        self._latch = Latch()
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def is_there(self) -> bool:
        return self._latch.is_open

    def settle(self, value: T) -> None:
        # Before the latch opens, because a waiting thread reads it at once.
        self._value = value
        self._latch.open()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._latch.open()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the promise has a result or an error; returns False after
        ``timeout`` seconds."""
        return self._latch.wait(timeout)

    def get(self) -> T:
        """Blocks until the promise has a result or an error; returns the result or
        raises the error."""
        self._latch.wait()
        if self._error is not None:
            raise self._error
        return cast("T", self._value)  # set, as `settle` was called
