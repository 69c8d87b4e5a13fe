"""Who keeps a call waiting. Decides whom to ask and what the answers mean; asks nobody.

A rank that waits asks those that it waits for how far they are; who waits in turn names
others, and they are asked, too. Guilty is who does not answer, who has not called, or
who calls something else. If all that is left wait for each other, nobody is guilty: the
bytes are on their way, and the call was given too little time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.wire import CallState


class Inquiry:
    """One rank's inquiry about one call.

    Args:
        rank: Who asks.
        words: What it calls.
    """

    def __init__(self, rank: int, words: str) -> None:
        self._words = words
        self._known = {rank}
        self._open: set[int] = set()
        self.guilty: dict[int, str] = {}
        """Rank -> what it has done, or not."""
        self.differs: dict[int, str] = {}
        """Rank -> what it calls instead."""

    def ask(self, ranks: Iterable[int]) -> list[int]:
        """Those among ``ranks`` that are to be asked and were not yet."""
        fresh = sorted(set(ranks) - self._known)
        self._known.update(fresh)
        self._open.update(fresh)
        return fresh

    def answered(self, rank: int, state: CallState) -> list[int]:
        """A rank said how far it is; who else is to be asked."""
        self._open.discard(rank)
        if not state.about:
            self.guilty[rank] = "has not called it"
            return []
        if state.about != self._words:
            self.differs[rank] = state.about
            self.guilty[rank] = f"calls {state.about} instead"
            return []
        return [] if state.is_over else self.ask(state.waits)

    def silent(self, rank: int, reason: str) -> None:
        """A rank did not answer."""
        self._open.discard(rank)
        self.guilty[rank] = reason

    def close(self) -> None:
        """Time is up: who was asked and said nothing does not answer."""
        for rank in sorted(self._open):
            self.silent(rank, "does not answer")
