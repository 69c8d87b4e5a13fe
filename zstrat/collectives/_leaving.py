"""How a rank leaves a generation: not before the others have what it sent to them.

A socket that is closed gives its last messages little time, and says nothing of them.
So each of the others is asked something; it answers when it has come to that, and so
has taken all that was sent before.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from zstrat.errors import ZstratError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from zstrat.wire import Message

    from ._mesh import Mesh


async def wait_heard(
    mesh: Mesh,
    ranks: Iterable[int],
    question: Message,
    deadline: float,
    heard: asyncio.Future[None],
) -> None:
    """Returns when each of these ranks has what was sent to it, is gone, or it is too
    late; or as soon as somebody settles ``heard``.

    Cancellation: no answer is waited for any more.
    """
    asked: set[asyncio.Future[Message]] = set()

    def over(answer: asyncio.Future[Message]) -> None:
        if not answer.cancelled():
            answer.exception()  # whatever it says
        asked.discard(answer)
        if not asked and not heard.done():
            heard.set_result(None)

    for rank in ranks:
        with suppress(ZstratError):  # its link is closed, or full of questions
            asked.add(mesh.ask(rank, question, deadline))
    for answer in list(asked):
        answer.add_done_callback(over)
    try:
        if asked:
            await heard
    finally:
        for answer in list(asked):
            answer.cancel()
