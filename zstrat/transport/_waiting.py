"""How a thread or a coroutine of the user waits for the loop thread.

A bell is made only when somebody really has to wait, is rung at most once, and is rung
with the engine's lock held. Waiting on a thread's bell is an acquire of a lock, which
Ctrl-C interrupts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from typing import Final, Protocol

GLANCE: Final = 1.0
"""Seconds. A signal that arrives just before the acquire begins to block does not
interrupt it: Python would see Ctrl-C at the next acquire only."""


class Bell(Protocol):
    """Ends one wait."""

    def ring(self) -> None: ...


class ThreadBell:
    """Wakes the thread that blocks in `wait`."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
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

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        # A closed loop raises, and has nobody who waits on it any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
