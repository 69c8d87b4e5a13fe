"""Recorders inside replica functions, which pass updates of variables on to the step.

Laws of the file. A variable that replicas share is updated once: their operands are
combined here first, and the recorder outside of the replicas records the result. A
replica updates its own copy at once, by itself.

There are three kinds of replicas. One of several that are mapped over devices as one
program (`_regions`) and the only one of its process (below) combine operands
through their `Team`. A sequential one (`_sequential`) waits for the others.
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
    from contextlib import AbstractContextManager

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
        outer: The recorder of the step, or of a part of it.
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
        """Returns whether an update without an optimizer changes only this replica's
        copy of the variable, so that it need not be reduced over the replicas."""
        if isinstance(update.target, Table):
            return False  # rows over several variables are always combined
        return updates_copies(update.variable, self._team.local)

    @abc.abstractmethod
    def _update_own(self, update: VariableUpdate) -> None:
        """Updates the value that this replica alone has."""

    def _update_shared(self, update: VariableUpdate) -> None:
        """Combines the operands of all replicas and updates the shared value once."""
        team = self._team
        combined = team.aggregate(update.variable, update.op, update.operands)
        self.outer.update(update._replace(operands=combined))


@final
class SoleReplica(ReplicaRecorder):
    """The only replica of its process: its function is called, and nothing is mapped.
    Its updates are combined with those of other processes."""

    def _is_own(self, update: VariableUpdate) -> bool:
        # The rules of TF: each process has a copy that it updates by itself.
        variable = update.variable
        return (
            variable.aggregation is VariableAggregation.NONE
            or variable.synchronization is VariableSynchronization.ON_READ
        )

    def _update_own(self, update: VariableUpdate) -> None:
        self.outer.update(update)


@contextlib.contextmanager
def recording_by(current: TraceRecorder | None) -> Iterator[None]:
    """Makes a recorder the current one inside."""
    before = recorder.set(current)
    try:
        yield
    finally:
        recorder.reset(before)


def as_sole_replica(team: Team) -> AbstractContextManager[None]:
    """Runs the body as the one replica of this process."""
    outer = recorder.get()
    return recording_by(SoleReplica(Immediate() if outer is None else outer, team))


def merged() -> AbstractContextManager[None]:
    """Runs the body once for all replicas: its updates are not aggregated."""
    current = recorder.get()
    return recording_by(current.outer if isinstance(current, SoleReplica) else current)
