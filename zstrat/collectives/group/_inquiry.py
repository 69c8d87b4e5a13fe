"""Finds the ranks to blame for a call that does not end.

To find the ranks that keep a call waiting, a rank that waits asks the ranks that it
waits for about their progress, and then the ranks that these wait for, transitively. A
rank is guilty if it does not answer, has not made the call, or makes another call. If
all remaining ranks wait for each other, none is guilty: the data is under way, and the
timeout was too short.

`FailureInquiry` decides without I/O; `inquire` asks the ranks, all at the same time.
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
"""Description of an ended call whose own description is no longer kept."""


class FailureInquiry:
    """The inquiry of one rank about one call.

    Args:
        rank: The rank that asks.
        words: Description of the call.
    """

    def __init__(self, rank: int, words: str) -> None:
        self.rank, self._words = rank, words
        self._known = {rank}
        self.guilty: dict[int, str] = {}
        """For each guilty rank a text that says what it did wrong."""
        self.differs: dict[int, str] = {}
        """For each rank that makes a different call the description of that call."""
        self._has_ended = False

    @property
    def has_ended_elsewhere(self) -> bool:
        """Whether another rank has ended the generation, and no rank is guilty: the
        notice with the reason is then under way on another connection."""
        return self._has_ended and not self.guilty

    def ask(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of ``ranks`` that are to be asked now, because they were not
        asked before."""
        # Each rank once, or ranks that wait for each other would be asked without end.
        fresh = sorted(set(ranks) - self._known)
        self._known.update(fresh)
        return fresh

    def answered(self, rank: int, state: CallState) -> list[int]:
        """Notes the answer of a rank about its progress; returns further ranks to
        ask."""
        self._has_ended = self._has_ended or state.is_broken
        if not state.about:
            if not state.is_broken:  # else it can no longer call it
                self.guilty[rank] = "has not called it"
            return []
        # It made the call long ago, or an engine did: whatever it was, nobody waits for
        # it.
        if state.is_over and state.about == FORGOTTEN:
            return []
        if state.about != self._words:
            self.differs[rank] = state.about
            self.guilty[rank] = f"calls {state.about} instead"
            return []
        return [] if state.is_over else self.ask(state.waits)

    def has_left(self) -> None:
        """Notes that an asked rank has left the generation and forms the next one."""
        self._has_ended = True

    def silent(self, rank: int, reason: str) -> None:
        """Notes that a rank did not answer, and why."""
        self.guilty[rank] = reason


def verdict(
    inquiry: FailureInquiry, call: str, name: Callable[[int], str], timeout: float
) -> ZstratError:
    """Returns the error with which an inquiry ends the generation on all ranks.

    Args:
        call: Name of the call: operation, number and group.
        name: Returns the name of a rank.
    """
    # First: ranks that make different calls time out, too, which would hide the cause.
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
            f"does not know why; it waited {timeout:g} s: call reform()"
        )
    if not inquiry.guilty:
        return CollectiveTimeoutError(
            f"{call}: all ranks take part, but {timeout:g} s were not enough: give the "
            "call more (timeout=), or check the network between the ranks"
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
    """Asks ``ranks`` and the ranks that they name, until all have answered or failed.

    Cancellation: cancels the questions.
    """
    asking: dict[asyncio.Future[Message], int] = {}

    def ask_all(more: Iterable[int]) -> None:
        for rank in more:
            try:
                asking[ask(rank)] = rank
            except ZstratError as error:  # the link is closed, or full of questions
                inquiry.silent(rank, f"cannot be asked: {error}")

    try:
        ask_all(inquiry.ask(ranks))
        while asking:
            # As answers come: a silent rank must not hold up questions to others.
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                ask_all(_follow_up(inquiry, asking.pop(future), future))
    finally:
        for future in asking:
            future.cancel()  # or asyncio logs errors that were not retrieved


def _follow_up(
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
