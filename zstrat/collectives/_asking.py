"""Carries an inquiry out: asks the ranks that `_blame` names, all at the same time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from zstrat.errors import (
    DeadlineExceededError,
    PeerLostError,
    StaleSessionError,
    ZstratError,
)
from zstrat.wire import CallState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zstrat.wire import Message

    from ._blame import Inquiry


class Ask(Protocol):
    """Sends the question to a rank."""

    def __call__(self, rank: int, *, deadline: float) -> asyncio.Future[Message]: ...


async def inquire(
    inquiry: Inquiry, ranks: Sequence[int], ask: Ask, deadline: float
) -> None:
    """Asks ``ranks`` and whom they name, until all have answered or it is too late.

    Cancellation: the questions are given up.
    """
    asking: dict[asyncio.Future[Message], int] = {}

    def go_on(more: Iterable[int]) -> None:
        for rank in more:
            try:
                asking[ask(rank, deadline=deadline)] = rank
            except ZstratError as error:  # the link is closed, or full of questions
                inquiry.silent(rank, f"cannot be asked: {error}")

    try:
        go_on(inquiry.ask(ranks))
        while asking:
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                go_on(_heard(inquiry, asking.pop(future), future))
    finally:
        for future in asking:
            future.cancel()  # or asyncio complains of errors that nobody looked at


def _heard(inquiry: Inquiry, rank: int, future: asyncio.Future[Message]) -> list[int]:
    try:
        state = future.result()
    except DeadlineExceededError:
        inquiry.silent(rank, "does not answer")
    except PeerLostError as error:
        inquiry.silent(rank, f"is gone: {error.reason}")
    except StaleSessionError:
        inquiry.has_left()
    except ZstratError as error:
        inquiry.silent(rank, f"answers with {error}")
    else:
        if isinstance(state, CallState):
            return inquiry.answered(rank, state)
        inquiry.silent(rank, f"answers with {type(state).__name__}")
    return []
