"""A thread that lives as long as the children that it started.

Linux sends the parent-death signal when the *thread* that started the child ends, not
the process: a child started from a short-lived thread of the user would die with it.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_Job = tuple["Callable[[], None]", "Future[None]"]


class Keeper:
    """Calls functions on its own thread, one after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon thread: the interpreter must not wait for it before it runs the
        # exit handlers, which end the children in an orderly way.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Runs ``function`` on the thread; returns or raises what it does."""
        done: Future[None] = Future()
        self._jobs.put((function, done))
        done.result()

    def close(self) -> None:
        """Ends the thread, and by the kernel's hand whatever child is left."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, done = job
            try:
                function()
            except BaseException as error:
                # Raised again where `call` waits.
                done.set_exception(error)
            else:
                done.set_result(None)
