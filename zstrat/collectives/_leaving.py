"""How a rank leaves a generation: not before the others have what it sent to them.

A socket that is closed gives its last messages little time, and says nothing of them.
So each of the others is asked something; it answers when it has come to that, and so
has taken all that was sent before. Then it is told at once that this rank leaves,
though others answer later.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from zstrat.errors import ZstratError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from zstrat.wire import Message

    from ._mesh import Mesh


async def wait_heard(
    mesh: Mesh,
    ranks: Iterable[int],
    question: Message,
    deadline: float,
    heard: asyncio.Future[None],
    has_heard: Callable[[int], None],
) -> None:
    """Returns when each of these ranks has what was sent to it, is gone, or it is too
    late; or as soon as somebody settles ``heard``. ``has_heard`` is called with each
    rank that has it.

    Cancellation: no answer is waited for any more.
    """
    asked: set[asyncio.Future[Message]] = set()

    def over(rank: int, answer: asyncio.Future[Message]) -> None:
        if not answer.cancelled() and answer.exception() is None:  # whatever it says
            has_heard(rank)
        asked.discard(answer)
        if not asked and not heard.done():
            heard.set_result(None)

    for rank in ranks:
        with suppress(ZstratError):  # its link is closed, or full of questions
            answer = mesh.ask(rank, question, deadline)
            asked.add(answer)
            answer.add_done_callback(partial(over, rank))
    try:
        if asked:
            await heard
    finally:
        for answer in list(asked):
            answer.cancel()
