"""A call that is cancelled at whichever await."""

from __future__ import annotations

import asyncio
import itertools
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator


@types.coroutine
def driven(
    work: Coroutine[Any, Any, object], number: int, is_late: bool, struck: list[int]
) -> Generator[Any, Any, object]:
    """``work``, that its own task cancels at its await of that number: while it waits
    there, or when what it waits for has come and it has not gone on yet."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    error, result = None, None
    for count in itertools.count(1):
        try:
            waits = work.send(result) if error is None else work.throw(error)
        except StopIteration as end:
            return end.value
        if count == number:
            struck.append(number)
            if is_late and waits is not None:
                waits.add_done_callback(lambda _: task.cancel())
            else:
                loop.call_soon(task.cancel)
        error, result = None, None
        try:
            result = yield waits
        except BaseException as raised:
            error = raised
    raise AssertionError("it ends by itself")


async def awaited(work: Coroutine[Any, Any, object], *how: Any) -> object:
    return await driven(work, *how)


async def cancelled_everywhere(
    make: Callable[[], Coroutine[Any, Any, object]],
) -> AsyncIterator[bool]:
    """Cancels a call at each of its awaits in turn; yields behind each whether that
    ended it."""
    for is_late in (False, True):
        for number in itertools.count(1):
            struck: list[int] = []
            task = asyncio.create_task(awaited(make(), number, is_late, struck))
            async with asyncio.timeout(100):
                await asyncio.wait([task])
            if task.cancelled():
                yield True
            else:
                task.result()
                yield False
            if not struck:
                break
