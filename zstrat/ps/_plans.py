"""What is about to happen to the store: validated, not yet done.

A plan owns the variables that it names from the moment it is made until it is committed
or given up: no read and no other plan may use them meanwhile. So ``compute()`` may run
on any thread; it fails as a whole or succeeds as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from zstrat.wire import UpdateOp

from ._arithmetic import SCATTERS, compute
from ._cell import Cell
from ._engine import OptimizerEngine, Registered, fitting
from ._slots import Slots, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zstrat.wire import Push, VariableEntry


@dataclass(slots=True)
class Held:
    """One variable: its value, its version and, per optimizer, its slots."""

    entry: VariableEntry
    cell: Cell
    version: int
    slots: dict[int, Slots] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    held: Held
    op: UpdateOp
    optimizer: Registered | None
    operands: Sequence[np.ndarray]

    def compute(self) -> None:
        """A plain update; those of an optimizer go through `Registered.apply`."""
        cell = self.held.cell
        if self.op is UpdateOp.ASSIGN:
            source = out = cell.overwrite()
        elif self.op in SCATTERS:
            source = out = cell.begin_rows(self.operands[0])
        else:
            source, out = cell.begin()
        compute(self.op, source, self.operands, out)
        cell.settle()


@dataclass(frozen=True, slots=True)
class PushPlan:
    """A validated push. ``work`` estimates the bytes that its arithmetic moves."""

    generation: int
    push: Push
    updates: Sequence[PlannedUpdate]
    work: int
    optimizes: bool

    def compute(self) -> None:
        """Applies the updates in order. What can fail comes before the first is
        written: a value that was lost, memory for values beside those that readers look
        at, compiling."""
        self._reserve()
        if not self.optimizes:
            for update in self.updates:
                update.compute()
            return
        runs = list(self._runs())
        for optimizer, steps, _ in runs:
            if optimizer is not None:
                optimizer.prepare(steps)
        for optimizer, steps, plain in runs:
            if optimizer is not None:
                optimizer.apply(steps)
            for update in plain:
                update.compute()

    def _reserve(self) -> None:
        met = set[int]()
        for update in self.updates:
            cell, key = update.held.cell, update.held.entry.key
            if key in met:
                continue
            met.add(key)
            if update.optimizer is None:
                cell.reserve(anew=update.op is UpdateOp.ASSIGN)
            else:
                cell.require()

    @property
    def is_compiled(self) -> bool:
        """Whether every program that it needs is there already."""
        return all(
            update.optimizer is None
            or update.optimizer.is_prepared(update.held.slots, update.operands[0])
            for update in self.updates
        )

    def _runs(self) -> Iterable[_Run]:
        """Neighbours of one optimizer, in any order, and what is between them."""
        run = _Run(None, [], [])
        seen = set[int]()
        for update in self.updates:
            held, key = update.held, update.held.entry.key
            if update.optimizer is not run.optimizer or key in seen:
                yield run
                run = _Run(update.optimizer, [], [])
                seen.clear()
            if update.optimizer is None:
                run.plain.append(update)
            else:
                seen.add(key)
                gradient = fitting(update.operands[0], held.cell.dtype)
                run.steps.append(Step(held.cell, held.slots, gradient))
        yield run


class _Run(NamedTuple):
    """The steps of one optimizer, or updates that are plain."""

    optimizer: Registered | None
    steps: list[Step]
    plain: list[PlannedUpdate]


@dataclass(frozen=True, slots=True)
class CreatePlan:
    """Validated new variables. ``work`` is their bytes."""

    generation: int
    entries: Sequence[VariableEntry]
    arrays: Sequence[np.ndarray]
    work: int
    cells: list[Cell] = field(default_factory=list)

    def compute(self) -> None:
        self.cells.extend(Cell(array) for array in self.arrays)


@dataclass(slots=True)
class OptimizerPlan:
    """A transformation to load, probe and register."""

    generation: int
    engine: OptimizerEngine
    optimizer: int
    name: str
    code: bytes
    loaded: Registered | None = None

    def compute(self) -> None:
        """Imports jax and optax if need be; raises what `OptimizerEngine.load` does."""
        self.loaded = self.engine.load(self.optimizer, self.name, self.code)


Plan = PushPlan | CreatePlan | OptimizerPlan


def work_of(op: UpdateOp, held: Held, operands: Sequence[np.ndarray]) -> int:
    """Bytes moved, roughly: a scatter costs its rows, and all if it must copy."""
    if op not in SCATTERS:
        return held.cell.nbytes
    rows = 16 * operands[0].size + 8 * operands[-1].nbytes
    return rows + (held.cell.nbytes if held.cell.is_shared else 0)
