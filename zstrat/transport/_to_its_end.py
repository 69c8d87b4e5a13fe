"""Completes work even if the caller that awaits the work is cancelled."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ._loop import LoopBell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Future

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Awaits work that must be completed, such as a cleanup.

    Cancellation: is raised when the work is done.
    """
    task, is_cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            # `wait` does not cancel what it waits for, as awaiting the task would.
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        # An error is not what ends this; if it were not fetched, asyncio would log it.
        _ = task.cancelled() or task.exception()
        raise asyncio.CancelledError
    return task.result()


async def on_own_thread(
    function: Callable[[], T], undo: Callable[[T], object] = lambda result: None
) -> T:
    """Runs the function on a new thread, and returns its result. `asyncio.to_thread`
    would not do: all its threads may be waiting for this call, and it skips cancelled
    calls.

    Cancellation: the function still runs, then ``undo`` is called with its result; the
    caller does not wait for either.
    """
    bell = LoopBell()
    pool = ThreadPoolExecutor(1, "zstrat call")
    try:
        future = pool.submit(function)
        future.add_done_callback(lambda _: bell.ring())
        try:
            await bell.future
        except BaseException:  # to the caller: nobody gets the result
            pool.submit(partial(_undo, undo, future))
            raise
        return future.result()
    finally:
        pool.shutdown(wait=False)


def _undo(undo: Callable[[T], object], future: Future[T]) -> None:
    if future.exception() is None:
        undo(future.result())
