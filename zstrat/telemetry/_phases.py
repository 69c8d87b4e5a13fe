"""The phases of steps on workers and of requests on parameter servers, and their
capture for a time line.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Phase(enum.StrEnum):
    """A phase of a step. The phases of different steps overlap on a worker: while one
    step computes, the next one is drawn and pulled."""

    WAIT = "wait"
    """From the closure's arrival at the worker until its preparation begins."""
    DRAW = "draw"
    """Its preparation: arguments, elements of datasets, the program."""
    PULL = "pull"
    """From the first request for values until all have arrived."""
    COMPUTE = "compute"
    """The program, from its start until its results are in memory."""
    PUSH = "push"
    """From handing over the updates until all servers have acknowledged them."""
    APPLY = "apply"
    """On a parameter server: from the turn of a push until it is applied."""
    SEND = "send"
    """On a parameter server: while answers to one peer wait to be sent. Answers that
    are sent at once are not counted."""


WORKER_PHASES: Final = (Phase.WAIT, Phase.DRAW, Phase.PULL, Phase.COMPUTE, Phase.PUSH)
PS_PHASES: Final = (Phase.APPLY, Phase.SEND)


class StepUnderWay(NamedTuple):
    """The current phase of a worker: its step and its begin by the worker's clock."""

    phase: Phase
    step: int
    began: float


class PhaseSpan(NamedTuple):
    """One phase of one step: ``began`` and ``ended`` by the clock of its process, in
    seconds. ``step`` is -1 for requests of no step."""

    step: int
    phase: Phase
    began: float
    ended: float


class TrafficPoint(NamedTuple):
    """Bytes that the process received and sent until ``at``, by its clock."""

    at: float
    got: int
    sent: int


@final
class SpanCapture:
    """A bounded capture of spans and traffic of one session. Belongs to the loop.

    Args:
        limit: Number of spans and of points of traffic to keep, the last ones.
        until: Later spans are dropped, because the program that asked may be lost.
        moved: Returns the bytes that the process has received and sent.
    """

    def __init__(
        self, limit: int, until: float, moved: Callable[[], tuple[int, int]]
    ) -> None:
        self.until: Final = until
        self._moved = moved
        self.spans: Final[deque[PhaseSpan]] = deque(maxlen=limit)
        self.traffic: Final[deque[TrafficPoint]] = deque(maxlen=limit)
        self.is_cut = False
        """Whether spans were dropped."""

    def add(self, phase: Phase, spans: Iterable[tuple[float, float, float]]) -> None:
        """Adds spans of a phase: step number, begin and end of each."""
        kept = self.spans
        for step, began, ended in spans:
            if began <= self.until:
                self.is_cut |= len(kept) == kept.maxlen
                kept.append(PhaseSpan(int(step), phase, began, ended))

    def sample(self, now: float) -> None:
        """Adds a point of traffic."""
        if now <= self.until:
            self.traffic.append(TrafficPoint(now, *self._moved()))
