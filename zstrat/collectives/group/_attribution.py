"""Who keeps a call waiting: decides whom to ask and what answers mean, and asks them.

A rank that waits asks those that it waits for how far they are; who waits in turn names
others, and they are asked, too. Guilty is who does not answer, who has not called, or
who calls something else. If all that is left wait for each other, nobody is guilty: the
bytes are on their way, and the call was given too little time.

Who decides asks nobody. An inquiry is carried out beside it, and asks the ranks that it
names all at the same time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from zstrat.errors import (
    CollectiveTimeoutError,
    DeadlineExceededError,
    InvalidArgumentError,
    PeerLostError,
    StaleSessionError,
    ZstratError,
)
from zstrat.wire import CallState

from ._rendezvous import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.wire import Message

FORGOTTEN: Final = "?"
"""What a rank says of a call that is over and that it knows no more of than that."""


class FailureInquiry:
    """One rank's inquiry about one call.

    Args:
        rank: Who asks.
        words: What it calls.
    """

    def __init__(self, rank: int, words: str) -> None:
        self.rank, self._words = rank, words
        self._known = {rank}
        self.guilty: dict[int, str] = {}
        """Rank -> what it has done, or not."""
        self.differs: dict[int, str] = {}
        """Rank -> what it calls instead."""
        self._has_ended = False

    @property
    def has_ended_elsewhere(self) -> bool:
        """Nobody is guilty, and another rank has ended the generation: it knows why,
        and its notice is under way on another connection."""
        return self._has_ended and not self.guilty

    def ask(self, ranks: Iterable[int]) -> list[int]:
        """Those among ``ranks`` that are to be asked and were not yet."""
        fresh = sorted(set(ranks) - self._known)
        self._known.update(fresh)
        return fresh

    def answered(self, rank: int, state: CallState) -> list[int]:
        """A rank said how far it is; who else is to be asked."""
        self._has_ended = self._has_ended or state.is_broken
        if not state.about:
            if not state.is_broken:  # else it cannot call it any more
                self.guilty[rank] = "has not called it"
            return []
        if state.is_over and state.about == FORGOTTEN:
            return []
        if state.about != self._words:
            self.differs[rank] = state.about
            self.guilty[rank] = f"calls {state.about} instead"
            return []
        return [] if state.is_over else self.ask(state.waits)

    def has_left(self) -> None:
        """A rank knows nothing of the generation any more: it has ended it, and has
        gone on to form the next one."""
        self._has_ended = True

    def silent(self, rank: int, reason: str) -> None:
        """A rank did not answer."""
        self.guilty[rank] = reason


def verdict(
    inquiry: FailureInquiry, call: str, name: Callable[[int], str], timeout: float
) -> ZstratError:
    """The error that all ranks get.

    Args:
        call: What was called, which call it was, and in which group.
        name: What messages call a rank.
    """
    if inquiry.differs:
        rank, words = next(iter(inquiry.differs.items()))
        return InvalidArgumentError(
            f"the ranks do not make the same calls: {name(inquiry.rank)} makes {call}; "
            f"{name(rank)} makes {words} instead: make the same calls in the same "
            "order on all ranks, or give calls that may overtake each other a tag"
        )
    if inquiry.has_ended_elsewhere:
        return CollectiveTimeoutError(
            f"{call}: another rank has ended the generation, and {name(inquiry.rank)} "
            f"has not heard why; it waited {timeout:g} s: call reform()"
        )
    if not inquiry.guilty:
        return CollectiveTimeoutError(
            f"{call}: all ranks take part, but {timeout:g} s were not enough: give it "
            "more (timeout=), or look at the network between them"
        )
    who = [f"{name(rank)} {what}" for rank, what in sorted(inquiry.guilty.items())]
    return CollectiveTimeoutError(
        f"{call}: {listed(who)}; {name(inquiry.rank)} waited {timeout:g} s. If that "
        "rank is only slow, give calls more time (timeout=); if it is gone, call "
        "reform()"
    )


async def inquire(
    inquiry: FailureInquiry,
    ranks: Sequence[int],
    ask: Callable[[int], asyncio.Future[Message]],
) -> None:
    """Asks ``ranks`` and whom they name, until all have answered or it is too late.

    Cancellation: the questions are given up.
    """
    asking: dict[asyncio.Future[Message], int] = {}

    def go_on(more: Iterable[int]) -> None:
        for rank in more:
            try:
                asking[ask(rank)] = rank
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


def _heard(
    inquiry: FailureInquiry, rank: int, future: asyncio.Future[Message]
) -> list[int]:
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
