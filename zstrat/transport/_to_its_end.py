"""What is carried out to its end, though the program that awaits it is cancelled."""

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
    """Awaits what is to be done in any case, as the end of something that has begun.

    Cancellation: is raised when that is done.
    """
    task, is_cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        _ = task.cancelled() or task.exception()  # an error is not what ends this
        raise asyncio.CancelledError
    return task.result()


async def on_own_thread(
    function: Callable[[], T], undo: Callable[[T], object] = lambda result: None
) -> T:
    """What the function gives. The threads of `asyncio.to_thread` may all be taken by
    what waits for this one, and it drops what is cancelled before they come to it.

    Cancellation: the function is carried out all the same, then ``undo`` of what it
    gave; nobody waits for that.
    """
    bell = LoopBell()
    pool = ThreadPoolExecutor(1, "zstrat call")
    try:
        made = pool.submit(function)
        made.add_done_callback(lambda _: bell.ring())
        try:
            await bell.future
        except BaseException:  # to the caller: nobody has what is made
            pool.submit(partial(_undo, undo, made))
            raise
        return made.result()
    finally:
        pool.shutdown(wait=False)


def _undo(undo: Callable[[T], object], made: Future[T]) -> None:
    if made.exception() is None:
        undo(made.result())
