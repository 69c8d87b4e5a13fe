"""Who keeps a call waiting. Decides whom to ask and what the answers mean; asks nobody.

A rank that waits asks those that it waits for how far they are; who waits in turn names
others, and they are asked, too. Guilty is who does not answer, who has not called, or
who calls something else. If all that is left wait for each other, nobody is guilty: the
bytes are on their way, and the call was given too little time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zstrat.errors import CollectiveTimeoutError, InvalidArgumentError

from ._membership import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zstrat.errors import ZstratError
    from zstrat.wire import CallState


FORGOTTEN: Final = "?"
"""What a rank says of a call that is over and that it knows no more of than that."""


class Inquiry:
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
    def is_told(self) -> bool:
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
    inquiry: Inquiry, call: str, name: Callable[[int], str], timeout: float
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
    if inquiry.is_told:
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
