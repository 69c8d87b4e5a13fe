"""The phases of a step, and of what a parameter server does with it."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


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
