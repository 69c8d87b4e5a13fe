"""What a task keeps of its steps while the time line of its run is taken. Bounded.

Belongs to the loop, as its recorder does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

from ._phases import PhaseSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ._phases import Phase


class TrafficPoint(NamedTuple):
    """Bytes that the process had got and sent by then; ``at`` by its clock."""

    at: float
    got: int
    sent: int


@final
class SpanCapture:
    """One capture, of one session.

    Args:
        limit: Spans that are kept, the last ones, and points of traffic.
        until: None is kept that begins later: who asked may be gone.
        moved: Says how many bytes the process has got, and has sent.
    """

    def __init__(
        self, limit: int, until: float, moved: Callable[[], tuple[int, int]]
    ) -> None:
        self.until: Final = until
        self._moved = moved
        self.spans: Final[deque[PhaseSpan]] = deque(maxlen=limit)
        self.traffic: Final[deque[TrafficPoint]] = deque(maxlen=limit)
        self.is_cut = False
        """Spans had to be forgotten."""

    def add(self, phase: Phase, spans: Iterable[tuple[float, float, float]]) -> None:
        """Steps were in a phase: number, begin and end of each."""
        kept = self.spans
        for step, began, ended in spans:
            if began <= self.until:
                self.is_cut |= len(kept) == kept.maxlen
                kept.append(PhaseSpan(int(step), phase, began, ended))

    def sample(self, now: float) -> None:
        """Notes how many bytes there were until now."""
        if now <= self.until:
            self.traffic.append(TrafficPoint(now, *self._moved()))
