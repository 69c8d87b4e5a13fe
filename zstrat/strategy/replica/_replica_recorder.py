"""What a replica function does to variables, and how the step is told of it.

Laws of the file. What replicas share is updated once: what they do to it is brought
together first, here, and the recorder outside of the replicas is told of the result.
What each replica has of its own it updates at once, by itself.

There are three kinds of replicas. One of several that are mapped over devices as one
program (`_one_program`) and the only one of its process (below) bring things together
by their `Team`. One that takes turns with the others (`_sequential`) waits for them.
"""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any, final

from zstrat.program.trace import Immediate, updates_copies
from zstrat.variables import (
    Table,
    TraceRecorder,
    VariableAggregation,
    VariableSynchronization,
    recorder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import jax

    from zstrat.program.trace import StepIterator
    from zstrat.variables import (
        GradientCall,
        VariableHandle,
        VariableUpdate,
    )

    from ._collective import Team


class ReplicaRecorder(TraceRecorder, abc.ABC):
    """The recorder inside a replica function.

    Args:
        outer: Whom it tells: the recorder of the step, or of a part of it.
        team: The replicas that compute together.
    """

    def __init__(self, outer: TraceRecorder, team: Team) -> None:
        self.outer = outer
        self.live = outer.live
        """Whether values are real, so that nothing is being captured."""
        self._team = team

    def read(self, variable: VariableHandle) -> jax.Array:
        return self.outer.read(variable)

    def update(self, update: VariableUpdate) -> None:
        if update.optimizer is None and self._is_own(update):
            self._update_own(update)
        else:
            self._update_shared(update)

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        return self.outer.lookup(table, ids)

    def optimize(self, call: GradientCall) -> None:
        self.outer.optimize(self._team.aggregate_call(call))

    def drew(self, leaf: object) -> bool:
        return self.outer.drew(leaf)

    def draw(self, iterator: StepIterator) -> Any:
        return self.outer.draw(iterator)

    def require_known_end(self, name: str) -> None:
        self.outer.require_known_end(name)

    def _is_own(self, update: VariableUpdate) -> bool:
        """Whether it is of a value that this replica has by itself. Asked of updates
        without an optimizer."""
        if isinstance(update.target, Table):
            return False  # rows over several variables are always brought together
        return updates_copies(update.variable, self._team.local)

    @abc.abstractmethod
    def _update_own(self, update: VariableUpdate) -> None:
        """Updates the value that this replica has by itself."""

    def _update_shared(self, update: VariableUpdate) -> None:
        """Updates, once, what all replicas share."""
        team = self._team
        combined = team.aggregate(update.variable, update.op, update.operands)
        self.outer.update(update._replace(operands=combined))


@final
class SoleReplica(ReplicaRecorder):
    """The only replica of its process: its function is called, and nothing is mapped.
    What it does is brought together with what those of other processes do."""

    def _is_own(self, update: VariableUpdate) -> bool:
        # TF's rules: each process has a copy that it updates by itself.
        variable = update.variable
        return (
            variable.aggregation is VariableAggregation.NONE
            or variable.synchronization is VariableSynchronization.ON_READ
        )

    def _update_own(self, update: VariableUpdate) -> None:
        self.outer.update(update)


@contextlib.contextmanager
def as_sole_replica(team: Team) -> Iterator[None]:
    """What is inside runs as the one replica of this process."""
    outer = recorder.get()
    before = recorder.set(SoleReplica(Immediate() if outer is None else outer, team))
    try:
        yield
    finally:
        recorder.reset(before)


@contextlib.contextmanager
def merged() -> Iterator[None]:
    """What is inside is done once for all replicas: updates are made as they are."""
    current = recorder.get()
    if not isinstance(current, SoleReplica):
        yield
        return
    before = recorder.set(current.outer)
    try:
        yield
    finally:
        recorder.reset(before)
