"""The only replica of a process among several.

Nothing is mapped: its function is called, and what it does to variables is brought
together with what the replicas of the other processes do.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from zstrat.variables import (
    GradientCall,
    Optimizer,
    Recorder,
    Table,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    recorder,
)

from ._eager import Immediate
from ._iterator import Drawing
from ._substitution import is_live

if TYPE_CHECKING:
    from collections.abc import Iterator

    import jax

    from zstrat.wire import UpdateOp

    from ._collective import Team
    from ._iterator import StepIterator


@contextlib.contextmanager
def alone(team: Team) -> Iterator[None]:
    """What is inside runs as the one replica of this process: updates are brought
    together with those of the other processes. Nothing is mapped."""
    outer = recorder.get()
    before = recorder.set(_Alone(Immediate() if outer is None else outer, team))
    try:
        yield
    finally:
        recorder.reset(before)


@contextlib.contextmanager
def merged() -> Iterator[None]:
    """What is inside is done once for all replicas: updates are made as they are."""
    current = recorder.get()
    if not isinstance(current, _Alone):
        yield
        return
    before = recorder.set(current.outer)
    try:
        yield
    finally:
        recorder.reset(before)


class _Alone:
    """The recorder inside a replica function that is the only one of its process."""

    def __init__(self, outer: Recorder, team: Team) -> None:
        self.outer = outer
        self._team = team
        self.live = is_live(outer)
        """Whether values are real, so that nothing is being captured."""

    def read(self, variable: Variable) -> jax.Array:
        return self.outer.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[jax.Array, ...],
        optimizer: Optimizer | None,
    ) -> None:
        if optimizer is None and _is_own(variable):
            self.outer.update(variable, op, operands, None)
            return
        combined = self._team.aggregate(variable, op, operands)
        self.outer.update(variable, op, combined, optimizer)

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        return self.outer.lookup(table, ids)

    def update_rows(
        self,
        table: Table,
        op: UpdateOp,
        operands: tuple[jax.Array, jax.Array],
        optimizer: Optimizer | None,
    ) -> None:
        index, rows = operands
        if optimizer is not None or not _is_own(table.components[0]):
            index, rows = self._team.aggregate(table.components[0], op, operands)
        self.outer.update_rows(table, op, (index, rows), optimizer)

    def optimize(self, call: GradientCall) -> None:
        self.outer.optimize(self._team.aggregate_call(call))

    def drew(self, leaf: object) -> bool:
        return self.outer.drew(leaf)

    def draw(self, iterator: StepIterator) -> Any:
        if isinstance(self.outer, Drawing):
            return self.outer.draw(iterator)
        return iterator.draw()


def _is_own(variable: Variable) -> bool:
    """Whether each process has a copy that it updates by itself (TF's rules)."""
    return (
        variable.aggregation is VariableAggregation.NONE
        or variable.synchronization is VariableSynchronization.ON_READ
    )
