"""A closure on its way through a worker, and what crosses between thread and loop.

Values that `zstrat.worker._pipeline` moves about and the executor obeys; nothing here
decides.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any, final


class Do(enum.Enum):
    """What the executor is to do now."""

    PREPARE = enum.auto()
    ADVANCE = enum.auto()
    RUN = enum.auto()
    POST = enum.auto()
    WAIT = enum.auto()


@final
@dataclass(slots=True, eq=False)
class Costs:
    """The seconds that the last preparation, advance and run of a function took."""

    prepare: float = math.inf
    advance: float = math.inf
    run: float = math.inf


@final
@dataclass(slots=True, eq=False)
class ClosureStep:
    """One closure on its way: the executor says what it is, the pipeline where."""

    number: int
    task: Any
    """What to run; shared by the steps of a batch."""
    costs: Costs
    work: Any = None
    """What the executor made of the task when it prepared the step."""
    reads: Any = None
    """What is pulled for it, compared by identity; None: nothing."""
    nbytes: int = 0
    levels: int = 0
    """How often it still has to advance, and be pulled again, before it can run."""
    writes: bool = False
    optimizes: bool = False
    """All that it writes are gradients for optimizers."""
    alone: bool = False
    ready: bool = False
    values: Any = None
    error: BaseException | None = None
    """Why its values did not come: it cannot run."""
    ending: Any = None
    """Known before its turn, as it could not be prepared or advanced."""
    dropped: bool = False


@final
@dataclass(slots=True, eq=False)
class SharedPull:
    """One request for values, on behalf of the steps that read the same variables."""

    reads: Any
    steps: list[ClosureStep]


@final
@dataclass(slots=True)
class Post:
    """What crosses to the loop: pushes first, then pulls, so that these read those."""

    pushes: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs of push and the ending that its acknowledgement releases."""
    pulls: list[SharedPull] = field(default_factory=list)
    endings: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pushes or self.pulls or self.endings)
