"""The phases of a step, and of what a parameter server does with it; and what a task
keeps of them while the time line of its run is taken.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Phase(enum.StrEnum):
    """What a step was at. Those of a worker overlap with those of other steps: while
    one computes, the next one is drawn and pulled."""

    WAIT = "wait"
    """From the closure's arrival at the worker until its preparation begins."""
    DRAW = "draw"
    """Its preparation: arguments, elements of datasets, the program."""
    PULL = "pull"
    """From the request for values until they are there, all levels together."""
    COMPUTE = "compute"
    """The program, from its start until its results are in memory."""
    PUSH = "push"
    """From handing over the updates until all servers have acknowledged them."""
    APPLY = "apply"
    """On a parameter server: from the turn of a push until it is applied."""
    SEND = "send"
    """On a parameter server: while answers to one peer wait for their way, or for the
    peer to read. What leaves at once is not counted."""


WORKER_PHASES: Final = (Phase.WAIT, Phase.DRAW, Phase.PULL, Phase.COMPUTE, Phase.PUSH)
PS_PHASES: Final = (Phase.APPLY, Phase.SEND)


class StepUnderWay(NamedTuple):
    """A phase that a worker is at, of a step, and since when by its own clock."""

    phase: Phase
    step: int
    began: float


class PhaseSpan(NamedTuple):
    """One phase of one step: ``began`` and ``ended`` by the clock of its process, in
    seconds. ``step`` is -1 for what no step has asked for."""

    step: int
    phase: Phase
    began: float
    ended: float


class TrafficPoint(NamedTuple):
    """Bytes that the process had got and sent by then; ``at`` by its clock."""

    at: float
    got: int
    sent: int


@final
class SpanCapture:
    """One capture, of one session. Bounded. Belongs to the loop, as its recorder does.

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
