"""The variables of one parameter server: versions, reads, and pushes that apply whole.

Decides without I/O and without a clock. Anything that changes the store happens in
three parts, so that the middle one may run on another thread:

1. `plan_push` / `plan_create` (loop): validates everything, touches nothing;
2. ``plan.compute()`` (any thread): does the arithmetic. It owns the variables that it
   names until it is committed: no other plan and no read may use them meanwhile
   (`zstrat.ps._turns` sees to that);
3. `commit` (loop): versions, ledger, statistics.

A version is a number that grows by one with every applied update, and never returns
for a key, not even when the variable is deleted and created anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    StaleSessionError,
)
from zstrat.wire import Push, Pushed, Read, UpdateOp, VariableEntry

from ._arithmetic import OPTIMIZERS, SCATTERS, check, compute
from ._cell import Cell
from ._engine import OptimizerEngine, Registered, Slots, Step, fitting
from ._ledger import Ledger

_OPS: Final[dict[int, UpdateOp]] = {int(op): op for op in UpdateOp}


@dataclass(slots=True)
class Held:
    """One variable: its value, its version and, per optimizer, its slots."""

    entry: VariableEntry
    cell: Cell
    version: int
    slots: dict[int, Slots] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """What the store did since it was opened."""

    pulls: int = 0
    reads: int = 0
    unchanged: int = 0
    pushes: int = 0
    updates: int = 0
    duplicates: int = 0


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    held: Held
    op: UpdateOp
    optimizer: Registered | None
    operands: Sequence[np.ndarray]

    def compute(self) -> None:
        """A plain update; those of an optimizer go through `Registered.apply`."""
        cell = self.held.cell
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
        """Applies the updates in order. What can fail, compiling, comes first."""
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

    def _runs(self) -> Iterable[_Run]:
        """Neighbours of one optimizer whose order does not matter, and what is between."""
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


class Store:
    """All variables that one task holds for one session.

    ``task`` names the parameter server in errors.
    """

    def __init__(self, engine: OptimizerEngine, *, task: str = "ps") -> None:
        self._task = task
        self._engine = engine
        self._held: dict[int, Held] = {}
        self._ledger = Ledger()
        self._generation = 0
        self._first_version = 0
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: int) -> bool:
        return key in self._held

    # ---- reading -----------------------------------------------------------------

    def read(self, reads: Sequence[Read]) -> tuple[list[int], tuple[np.ndarray, ...]]:
        """Versions of all, and values of those that the reader does not know yet.

        The arrays are read-only views of live memory whose content never changes.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        versions, arrays = [], []
        for key, known in reads:
            held = self._held.get(key)
            if held is None:
                raise self._unknown(key)
            versions.append(held.version)
            if held.version != known:
                arrays.append(held.cell.lease())
        counts = self.counts
        counts.pulls += 1
        counts.reads += len(versions)
        counts.unchanged += len(versions) - len(arrays)
        return versions, tuple(arrays)

    def nbytes(self, keys: Iterable[int]) -> int:
        """Bytes of those variables that exist."""
        return sum(held.cell.nbytes for key in keys if (held := self._held.get(key)))

    # ---- creating ----------------------------------------------------------------

    def create(
        self, entries: Sequence[VariableEntry], arrays: Sequence[np.ndarray]
    ) -> None:
        """Creates all or none; a variable of the same key, shape and dtype stays as it is.

        Raises:
            AlreadyExistsError: A key is taken by a variable of another shape or dtype.
            InvalidArgumentError: The message is not one array per entry, keys repeat.
        """
        plan = self.plan_create(entries, arrays)
        plan.compute()
        self.commit_create(plan)

    def plan_create(
        self, entries: Sequence[VariableEntry], arrays: Sequence[np.ndarray]
    ) -> CreatePlan:
        if len(entries) != len(arrays):
            raise InvalidArgumentError(
                f"{self._task}: {len(entries)} variables came with {len(arrays)} values"
            )
        if len({entry.key for entry in entries}) != len(entries):
            raise InvalidArgumentError(f"{self._task}: a key of new variables repeats")
        new = [
            pair for pair in zip(entries, arrays, strict=True) if self._is_new(*pair)
        ]
        values = [array for _, array in new]
        work = sum(array.nbytes for array in values)
        return CreatePlan(self._generation, [entry for entry, _ in new], values, work)

    def commit_create(self, plan: CreatePlan) -> None:
        self._check_generation(plan.generation)
        for entry, cell in zip(plan.entries, plan.cells, strict=True):
            self._held[entry.key] = Held(entry, cell, self._first_version)

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes all or none.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        for key in keys:
            if key not in self._held:
                raise self._unknown(key)
        for key in set(keys):
            version = self._held.pop(key).version
            self._first_version = max(self._first_version, version + 1)

    def clear(self) -> None:
        """Drops the session's variables, optimizers and memory of pushes. A plan that is
        still computing cannot be committed any more."""
        self._held.clear()
        self._engine.clear()
        self._ledger = Ledger()
        self._generation += 1
        self._first_version = 0

    # ---- pushing -----------------------------------------------------------------

    def push(self, push: Push) -> Pushed:
        """Plan, compute and commit at once."""
        plan = self.plan_push(push)
        if isinstance(plan, Pushed):
            return plan
        plan.compute()
        return self.commit_push(plan)

    def plan_push(self, push: Push) -> PushPlan | Pushed:
        """Validates a push; changes nothing but the low-water mark.

        Returns:
            A plan to compute and commit, or the answer if the push is a duplicate.

        Raises:
            NotFoundError: A variable or optimizer does not exist.
            InvalidArgumentError: An update does not fit its variable.
            BusyError: The step could not be remembered.
        """
        self._ledger.raise_to(push.low_water)
        if self._ledger.is_duplicate(push.step, push.part):
            self.counts.duplicates += 1
            return Pushed(applied=False, versions=self._versions(push))
        self._ledger.admit(push.step)
        return self._validated(push)

    def commit_push(self, plan: PushPlan) -> Pushed:
        """Counts the versions up and remembers the step.

        Raises:
            StaleSessionError: The store was cleared while the plan computed.
        """
        self._check_generation(plan.generation)
        for update in plan.updates:
            update.held.version += 1
        self._ledger.record(plan.push.step, plan.push.part)
        self.counts.pushes += 1
        self.counts.updates += len(plan.updates)
        return Pushed(applied=True, versions=self._versions(plan.push))

    def _validated(self, push: Push) -> PushPlan:
        arrays, at, work, optimizes = push.arrays, 0, 0, False
        planned: list[PlannedUpdate] = []
        for key, code, optimizer, count in push.updates:
            held = self._held.get(key)
            if held is None:
                raise self._unknown(key)
            op = _OPS.get(code)
            if op is None or not 0 < count <= len(arrays) - at:
                raise InvalidArgumentError(
                    f"{self._task}: an update of variable {held.entry.name!r} has the "
                    f"operation {code} with {count} of {len(arrays) - at} arrays left"
                )
            operands = arrays[at : at + count]
            at += count
            work += _work(op, held, operands)
            if op in OPTIMIZERS:
                optimizes = True
                known = self._engine.check(
                    optimizer, op, held.entry, held.cell, operands
                )
                planned.append(PlannedUpdate(held, op, known, operands))
            else:
                self._check_plain(optimizer, op, held, operands)
                planned.append(PlannedUpdate(held, op, None, operands))
        if at != len(arrays):
            raise InvalidArgumentError(
                f"{self._task}: a push has {len(arrays)} arrays, its updates take {at}"
            )
        return PushPlan(self._generation, push, planned, work, optimizes)

    def _check_plain(
        self, optimizer: int, op: UpdateOp, held: Held, operands: Sequence[np.ndarray]
    ) -> None:
        name = held.entry.name
        if optimizer:
            raise InvalidArgumentError(
                f"variable {name!r}: {op.name} takes no optimizer, got {optimizer}"
            )
        check(op, operands, held.cell.shape, held.cell.dtype, name)

    # ---- statistics --------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Cheap: one pass over the variables, none over their values."""
        held, counts = self._held.values(), self.counts
        return {
            "variables": len(held),
            "bytes": sum(each.cell.nbytes for each in held),
            "held_bytes": sum(each.cell.held_bytes for each in held),
            "slot_bytes": sum(
                s.nbytes for each in held for s in list(each.slots.values())
            ),
            "pulls": counts.pulls,
            "reads": counts.reads,
            "unchanged": counts.unchanged,
            "pushes": counts.pushes,
            "updates": counts.updates,
            "duplicates": counts.duplicates,
            "remembered_steps": len(self._ledger),
            "low_water": self._ledger.low_water,
        }

    def _is_new(self, entry: VariableEntry, array: np.ndarray) -> bool:
        held = self._held.get(entry.key)
        if held is None:
            return True
        cell = held.cell
        if (cell.shape, cell.dtype) == (array.shape, array.dtype):
            return False
        raise AlreadyExistsError(
            f"{self._task} holds key {entry.key} as {held.entry.name!r}, {cell.dtype.name}"
            f"{list(cell.shape)}; {entry.name!r}, {array.dtype.name}{list(array.shape)}, "
            "cannot be created under it"
        )

    def _versions(self, push: Push) -> list[int]:
        """Of a duplicate, a variable may be gone: -1."""
        held = self._held
        return [held[u.key].version if u.key in held else -1 for u in push.updates]

    def _check_generation(self, generation: int) -> None:
        if generation != self._generation:
            raise StaleSessionError(
                f"{self._task}: the session ended while its request was computed"
            )

    def _unknown(self, key: int) -> NotFoundError:
        return NotFoundError(
            f"{self._task} holds no variable with key {key} (it holds {len(self._held)}): "
            "it was deleted, or created in another session"
        )


def _work(op: UpdateOp, held: Held, operands: Sequence[np.ndarray]) -> int:
    """Bytes moved, roughly. Rows are scattered; a scatter that must copy moves it all."""
    if op not in SCATTERS:
        return held.cell.nbytes
    rows = 16 * operands[0].size + 8 * operands[-1].nbytes
    return rows + (held.cell.nbytes if held.cell.is_shared else 0)
