"""`OptimizerRounds`: decides which contributions are the members of a round, and when
it closes. Without clock or socket.

The law of this file: a contribution that was accepted is a member of exactly one round,
or is counted as dropped. Only here is it decided which; the parameter servers are given
the members, so no two of them differ.

    OPEN ──all workers have contributed, or the grace is over──▶ CLOSING
      ▲                                                            │
      └──────────────── all servers have applied it ───────────────┘

While a round is closing, contributions are to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from zstrat.wire import RoundMember

from ._round_statistics import RoundStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from zstrat.variables import Rounds
    from zstrat.wire import PlainTree, StepContribution


class Contributed(NamedTuple):
    """A contribution: the worker, when it was reported, what the servers know, and
    whether it is for a round that was closed before."""

    worker: int
    at: float
    member: RoundMember
    is_late: bool


@dataclass(slots=True)
class ClosingRound:
    """A round that is to be closed."""

    number: int
    members: list[RoundMember]
    operands: Sequence[np.ndarray] | None
    """What the optimizer computes from all gradients; None: it is not known yet."""


@final
@dataclass(slots=True)
class OptimizerRounds:
    """The rounds of one optimizer. Workers are known by their place."""

    optimizer: int
    name: str
    policy: Rounds
    number: int = 0
    """The open round: how many were closed."""
    is_closing: bool = False
    """Whether the round before the open one is being applied."""
    coupled: bool = False
    """Whether the optimizer computes operands from all gradients of a round."""
    statistics: RoundStatistics = field(default_factory=RoundStatistics)
    _members: dict[int, Contributed] = field(default_factory=dict)
    """Contributions to the open round, by step."""
    _enough_at: float | None = None
    """When the open round could do without the others."""

    def contributed(self, worker: int, given: StepContribution, now: float) -> None:
        """Takes a contribution that all servers have."""
        self.coupled |= given.coupled
        is_late = given.base < self.number
        if is_late:
            is_dropped = self.policy.drops_late
            self.statistics.contributed_late(worker, is_dropped=is_dropped)
            if is_dropped:
                return
        member = RoundMember(given.step, given.attempt, given.weight)
        self._members[given.step] = Contributed(worker, now, member, is_late)

    @property
    def steps(self) -> list[int]:
        """The steps whose contributions wait."""
        return list(self._members)

    def is_open_below(self, step: int) -> bool:
        """Returns whether a contribution of a step below ``step`` waits. From any
        thread."""
        return any(each < step for each in self.steps)

    @property
    def _on_time(self) -> list[Contributed]:
        """The contributions for the open round itself. Late ones are members besides:
        if they took the place of others, those would be late, too, from then on."""
        return [each for each in self._members.values() if not each.is_late]

    @property
    def contributors(self) -> set[int]:
        """The workers that have contributed to the open round."""
        return {each.worker for each in self._on_time}

    def size(self, there: int) -> int:
        """Returns the number of contributions that a round waits for, of ``there``
        workers."""
        return self.policy.workers or there

    def enough(self, there: int) -> int:
        """Returns the number of contributions that a round needs."""
        return max(1, self.size(there) - self.policy.backup)

    def due(self, there: int, now: float) -> float | None:
        """Returns when the open round is to be closed; None: it waits for more
        contributions."""
        count = len(self._on_time)
        if self.is_closing or count < self.enough(there):
            self._enough_at = None
            return None
        if count >= self.size(there):
            return now
        if self._enough_at is None:
            self._enough_at = now
        return self._enough_at + self.policy.grace

    def close(self) -> ClosingRound:
        """Closes the open round with the contributions that there are."""
        assert not self.is_closing, self.name
        found = list(self._members.values())
        self.statistics.closing((each.at, each.worker) for each in self._on_time)
        members = sorted([each.member for each in found])
        operands = None if self.coupled and members else ()
        closing = ClosingRound(self.number, members, operands)
        self._members, self._enough_at = {}, None
        self.number, self.is_closing = self.number + 1, True
        return closing

    def closed(self, now: float) -> None:
        """Notes that all servers have applied the round."""
        self.is_closing = False
        self.statistics.applied(now)

    def restart(self) -> None:
        """Begins again with the first round, without contributions."""
        self.number, self.is_closing = 0, False
        self._members, self._enough_at = {}, None

    def metrics(
        self, there: int, now: float, most: int | None = None
    ) -> dict[str, PlainTree]:
        """Returns the numbers of the rounds with ``there`` workers, for
        `ClusterCoordinator.metrics`; see `RoundStatistics.metrics` for ``most``."""
        return {
            "workers": self.size(there),
            "backup": self.policy.backup,
            "waiting": len(self._members),
            **self.statistics.metrics(now, most),
        }


@final
class SessionRounds:
    """The rounds of all optimizers of a session, by number of the optimizer."""

    def __init__(self) -> None:
        self._rounds: dict[int, OptimizerRounds] = {}
        self.flush_below = 0
        """Once no closure is left, rounds with contributions of steps below this are
        closed with what they have: a call waits for them. Any thread raises it."""

    def __bool__(self) -> bool:
        """Whether an optimizer has rounds."""
        return bool(self._rounds)

    def __iter__(self) -> Iterator[OptimizerRounds]:
        return iter(tuple(self._rounds.values()))

    def add(self, optimizer: int, name: str, policy: Rounds) -> None:
        """Adds an optimizer that was created on the servers."""
        self._rounds[optimizer] = OptimizerRounds(optimizer, name, policy)

    def get(self, optimizer: int) -> OptimizerRounds | None:
        """Returns the rounds of the optimizer; None if it has none."""
        return self._rounds.get(optimizer)

    def is_open_below(self, step: int) -> bool:
        """Returns whether a contribution of a step below ``step`` waits, or a round is
        being applied. From any thread."""
        return any(each.is_closing or each.is_open_below(step) for each in self)

    @property
    def waiting(self) -> int:
        """Number of ended steps of which a contribution waits."""
        return len({step for each in self for step in each.steps})

    @property
    def contributors(self) -> set[int]:
        """The workers that have contributed to an open round."""
        return {worker for each in self for worker in each.contributors}

    def metrics(
        self, there: int, now: float, most: int | None = None
    ) -> dict[str, PlainTree]:
        """Returns the numbers of all rounds with ``there`` workers, by name of the
        optimizer; the second one of a name has its number behind it."""
        metrics: dict[str, PlainTree] = {}
        for each in self:
            taken = each.name in metrics
            name = f"{each.name} {each.optimizer}" if taken else each.name
            metrics[name] = each.metrics(there, now, most)
        return metrics
