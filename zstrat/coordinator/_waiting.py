"""How a thread or a coroutine of the user waits for the loop thread.

A bell is made only when somebody really has to wait, is rung at most once, and is rung
with the engine's lock held. Waiting on a thread's bell is one acquire of a lock: Ctrl-C
interrupts it at once, and nobody wakes up to look.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol


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
        return self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))


class LoopBell:
    """Wakes the coroutine that awaits ``future``, on whichever loop it runs."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            pass  # the waiter's loop is closed, so nobody waits there any more

    def _set(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
