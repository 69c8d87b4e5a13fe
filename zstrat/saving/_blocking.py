"""One coroutine for both forms of a call, and a thread for what it does with files.

The blocking form runs the coroutine to its end in a loop on a thread of its own: a
notebook's thread has a loop already, and Ctrl-C in the middle of a loop could lose the
next step of a task, which would then be waited for in vain. It cancels the coroutine,
which cleans up as a cancelled task does. Files are touched on one named thread an
operation, one call after the other. Who waits at a terminal is told how far it is
(`ProgressBar`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TextIO, TypeVar

from zstrat.program import hide_frames
from zstrat.transport import Portal, warn_of_blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


T = TypeVar("T")
P = ParamSpec("P")


held_up: Final[ContextVar[asyncio.AbstractEventLoop | None]] = ContextVar(
    "zstrat_held_up", default=None
)
"""The loop that stands still until a blocking call returns; None: there is none. Set by
`run_blocking` alone."""


def run_blocking(work: Coroutine[Any, Any, T], twin: str = "") -> T:
    """Runs the coroutine to its end, also where a loop is running already. Its errors
    come with the user's lines alone.

    Args:
        twin: What a program with a running loop awaits instead, if there is something.

    Cancellation: Ctrl-C cancels it, and is raised when it has cleaned up.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    token = held_up.set(loop)
    try:
        if twin:
            warn_of_blocking(twin)
        portal = Portal("zstrat saving")
        portal.at_close(_others_over)
        try:
            return portal.run(work, math.inf, "saving or restoring")
        finally:
            portal.close()
    except Exception as error:  # to the caller
        hide_frames(error)
        raise
    finally:
        held_up.reset(token)
        # Ctrl-C before anybody had it: Python would say that nobody awaited it.
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()


async def _others_over() -> None:
    """Waits for what Ctrl-C has cancelled to clean up; else the end of the loop would
    cancel that, too."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


class FileThread:
    """The thread that an operation does its file work on; an async context manager.

    Cancellation: a call that has begun ends before the next one begins.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "zstrat disk")

    async def __call__(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, functools.partial(function, *args, **kwargs)
        )

    async def make(
        self,
        undo: Callable[[T], object],
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Calls a function whose result has to be undone. Cancellation: it is undone,
        once it was made."""
        making = self._pool.submit(functools.partial(function, *args, **kwargs))
        try:
            return await asyncio.shield(asyncio.wrap_future(making))
        except asyncio.CancelledError:
            making.add_done_callback(functools.partial(_undo, undo))
            raise

    async def __aenter__(self) -> FileThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        # What is under way is a piece of a file: waiting for it takes milliseconds.
        self._pool.shutdown()


def _undo(undo: Callable[[T], object], made: Future[T]) -> None:
    if not made.cancelled() and made.exception() is None:
        undo(made.result())


_PAUSE: Final = 0.1
"""Seconds between two lines: faster than anybody reads."""
_REPORT_AFTER_SECONDS: Final = 0.5
"""Seconds after which an operation is long enough to talk about."""
_WIDTH: Final = 24
"""Characters of the bar itself: numbers beside it fit into a terminal of 80."""


class ProgressBar:
    """``saving ckpt-5 [######      ] 1.2 of 4.8 GB``, rewritten in place.

    Args:
        total: Bytes.
        out: Left out: standard error.
    """

    def __init__(self, what: str, total: int, out: TextIO | None = None) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._out = sys.stderr if out is None else out
        self._is_shown = self._out is not None and self._out.isatty()
        self._next = time.monotonic() + _REPORT_AFTER_SECONDS
        self._has_written = False

    def add(self, size: int) -> None:
        """Notes that so many bytes more are done."""
        self._done += size
        if self._is_shown and (now := time.monotonic()) >= self._next:
            self._next = now + _PAUSE
            self._show()

    def end(self) -> None:
        """Removes the line from the terminal."""
        if self._has_written:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._has_written = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _show(self) -> None:
        share = min(1.0, self._done / self._total) if self._total else 1.0
        bar = "#" * round(share * _WIDTH)
        size = f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
        self._out.write(f"\r{self._what} [{bar:<{_WIDTH}}] {size}\x1b[K")
        self._out.flush()
        self._has_written = True
