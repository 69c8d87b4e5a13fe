"""How threads begin, and how one waits for what another one does.

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
"""Seconds. A signal that arrives just before the acquire begins to block does not
interrupt it: Python would see Ctrl-C at the next acquire only."""


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
        """Blocks the thread; False when ``timeout`` seconds have passed.

        Raises:
            ValueError: They are NaN, which never pass.
        """
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout=nan: expected seconds, or None")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left, GLANCE))):
                return True
            if left <= GLANCE:
                return False


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


@final
class SteadyThread(threading.Thread):
    """A thread that the main thread may begin and wait for.

    Ctrl-C in the middle of `threading.Thread.start` can leave a thread that never
    begins, as that waits for a lock. And before Python 3.13 one in `join` has it
    believed, from then on, that the thread has ended.
    """

    def __init__(
        self, target: Callable[..., object], args: Iterable[Any] = (), *, name: str
    ) -> None:
        # A daemon: the interpreter must not wait for it before it runs what ends it.
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._over = Latch()
        self._process: int | None = None
        """In which it was started: one that is forked later does not have it."""

    def start(self) -> None:
        """Returns when it has begun.

        Cancellation: Ctrl-C finds it begun, or not, or it begins a moment later.

        Raises:
            RuntimeError: The system gives no more threads, the interpreter ends, or it
                was started before: that one goes on.
        """
        if self.ident is not None:
            raise RuntimeError("threads can only be started once")
        begun: SimpleQueue[BaseException | None] = SimpleQueue()
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
        """Whether it was started, and has not ended."""
        return self._process == os.getpid() and not self._over.is_open

    def join(self, timeout: float | None = None) -> None:
        """Blocks until it has ended, ``timeout`` seconds at most; not at all if it was
        not started."""
        if self.is_alive() and self.ident == _thread.get_ident():
            raise RuntimeError("cannot join current thread")
        if self.is_alive() and not self._over.wait(timeout):
            return
        if super().is_alive():
            super().join()

    def _begin(self, begun: SimpleQueue[BaseException | None]) -> None:
        try:
            super().start()
        except BaseException as error:  # to who starts it
            if self.ident is None:  # or else an earlier start, which was struck, came
                self._over.open()
            begun.put(error)
        else:
            begun.put(None)


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
