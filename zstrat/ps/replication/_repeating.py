"""What each change that a primary tells of does to the store of its backup.

Nothing is decided here: the primary has decided, and this store has had all changes
that came before. What takes long is handed back, to be computed on another thread, and
then committed by the same code that the primary has run.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zstrat.errors import ProtocolError, ZstratError
from zstrat.ps._requests import INLINE
from zstrat.ps.engine._slots import HeldVariable, SlotArray, Unbound
from zstrat.ps.snapshots._load_plan import Loading, Move, Source
from zstrat.ps.store._cell import Cell
from zstrat.ps.store._creating import CreatePlan
from zstrat.ps.store._plans import BindPlan, PushPlan
from zstrat.rows import lasting
from zstrat.wire import (
    AskParts,
    BeginAnew,
    BindOptimizer,
    CopyKept,
    CopyLedger,
    CopyParts,
    CopySlots,
    CopyTree,
    CopyVariables,
    CopyWhole,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    Done,
    Fence,
    LoadTensors,
    Message,
    Push,
    PushPart,
    RaiseMark,
    RaiseWriterMark,
    StepRun,
    StoreTensors,
    VariableEntry,
    Withdraw,
    dtype_named,
)

if TYPE_CHECKING:
    from zstrat.ps.store._plans import Plan
    from zstrat.ps.store._store import Store
    from zstrat.wire import CopiedPart, CopiedSlot, CopiedVariable


class Computation(Protocol):
    """``compute`` on any thread, then ``commit`` where the store lives.
    ``is_short``: it takes no longer than waking a thread."""

    @property
    def is_short(self) -> bool: ...
    def compute(self) -> None: ...
    def commit(self) -> object: ...


CHANGES = (
    Push
    | PushPart
    | AskParts
    | Fence
    | RaiseMark
    | RaiseWriterMark
    | CreateVariables
    | DeleteVariables
    | Withdraw
    | CreateOptimizer
    | BindOptimizer
    | LoadTensors
    | StoreTensors
    | BeginAnew
    | CopyLedger
    | CopyKept
    | CopyVariables
    | CopySlots
    | CopyTree
    | CopyParts
    | CopyWhole
)
"""What a log is made of."""


def repeat(store: Store, change: Message) -> Computation | None:
    """Makes a change again, or says what has to be computed for it.

    Raises:
        ZstratError: The primary had no such error: the two stores differ.
    """
    match change:
        case Push():
            return _Planned(store, store.plan_again(change))
        case CreateVariables(variables=entries, arrays=arrays):
            return _Planned(store, store.plan_create(entries, arrays))
        case CreateOptimizer(optimizer=optimizer, name=name, code=code):
            return _planned(store, store.plan_optimizer(optimizer, name, code))
        case BindOptimizer(optimizer=optimizer, arrays=arrays):
            return _planned(store, store.plan_binding(optimizer, arrays))
        case CopyTree(optimizer=optimizer, arrays=(tree, bound)):
            here = {key: store.variables[key] for key in bound.tolist()}
            data, generation = tree.tobytes(), store.variables.generation
            known = store.engine.get(optimizer)
            return _Planned(store, BindPlan(generation, known, data, here.get))
        case LoadTensors() | StoreTensors():
            return _loaded(store, change)
        case DeleteVariables(keys=keys):
            store.delete(keys)
        case Withdraw(keys=keys, optimizers=optimizers):
            store.withdraw(keys, optimizers)
        case BeginAnew():
            store.begin_anew()
        case CopyVariables(first_version=first, variables=variables):
            store.variables.first_version = first
            for variable in variables:
                _make_room(store, variable)
        case CopySlots(slots=slots):
            for slot in slots:
                _make_slot(store, slot)
        case CopyParts(parts=parts, arrays=arrays):
            for part, array in zip(parts, arrays, strict=True):
                _fill(store, part, array)
        case _:
            _remember(store, change)
    return None


def _remember(store: Store, change: Message) -> None:
    """What was applied, and is over."""
    match change:
        case PushPart():
            with suppress(ZstratError):  # it was refused there, too
                store.note_part(change)
        case AskParts(step=step, attempt=attempt):
            with suppress(ZstratError):
                store.claim(step, attempt)
        case Fence(low_water=low_water, over=over):
            store.close_steps(low_water, over)
        case RaiseMark(low_water=low_water):
            store.raise_mark(low_water)
        case RaiseWriterMark(writer=writer, low_water=low_water):
            store.raise_writer_mark(writer, low_water)
        case CopyLedger():
            _copy_ledger(store, change)
        case CopyKept(optimizers=optimizers, arrays=(keys,)):
            store.kept.update(keys.tolist())
            store.kept_optimizers.update(optimizers)
        case CopyWhole():
            pass  # says something about the changes before it
        case _:
            raise ProtocolError(f"{type(change).__name__} is no change of a store")


@dataclass(frozen=True, slots=True)
class _Planned:
    """A change that the store has planned as it plans requests."""

    store: Store
    plan: Plan

    @property
    def is_short(self) -> bool:
        """Whether computing it takes no longer than waking a thread."""
        match self.plan:
            case PushPlan(work=work):
                return work <= INLINE and self.plan.is_compiled
            case CreatePlan(work=work):
                return work <= INLINE
        return False

    def compute(self) -> None:
        self.plan.compute()

    def commit(self) -> object:
        return self.store.commit(self.plan)


def _planned(store: Store, plan: Plan | Done) -> Computation | None:
    return None if isinstance(plan, Done) else _Planned(store, plan)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Values and slots that the primary has loaded, which come with the change."""

    loading: Loading
    is_short: bool = False

    def compute(self) -> None:
        self.loading.prepare()
        self.loading.compute()

    def commit(self) -> object:
        self.loading.commit()
        return None


def _loaded(store: Store, message: LoadTensors | StoreTensors) -> Computation:
    """Values that the primary has stored, or (`LoadTensors`) slots that it forgot."""
    variables, engine = store.variables, store.engine
    if isinstance(message, LoadTensors):
        anew = [(variables[each.key], each.optimizer) for each in message.entries]
        return _Loaded(Loading((), anew))
    moves = [
        Move(
            variables[entry.key],
            engine.get(entry.optimizer) if entry.optimizer else None,
            entry.leaf,
            entry.at,
            Source("its copy", array.dtype, array.shape, partial(_copy, array)),
            entry.rows,
        )
        for entry, array in zip(message.entries, message.arrays, strict=True)
    ]
    return _Loaded(Loading(moves))


def _copy(array: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, array)


def _copy_ledger(store: Store, copied: CopyLedger) -> None:
    writer = copied.writer
    ledger = store.writers.of(writer) if writer else store.ledger
    applied, over = copied.arrays
    ledger.raise_to(copied.low_water)
    for step, part in applied.tolist():
        ledger.record(step, part)
    ledger.close([StepRun(*run) for run in over.tolist()])


def _make_room(store: Store, copied: CopiedVariable) -> None:
    entry = VariableEntry(*copied[:4])
    cell = _room(tuple(copied.shape), copied.dtype)
    cell.who = f"{store.variables.task}: variable {entry.name!r}"
    if copied.lost:
        cell.lose(copied.lost)
    store.variables[entry.key] = HeldVariable(entry, cell, copied.version)


def _room(shape: tuple[int, ...], dtype: str) -> Cell:
    return Cell.around(lasting(shape, dtype_named(dtype)))


def _make_slot(store: Store, copied: CopiedSlot) -> None:
    held = store.variables[copied.key]
    slots = held.slots.get(copied.optimizer)
    if not isinstance(slots, Unbound):
        slots = held.slots[copied.optimizer] = Unbound.like(None)
    leaf = SlotArray(copied.leaf, copied.rows)
    shape, dtype = tuple(copied.shape), dtype_named(copied.dtype)
    slots.make_room(leaf, shape, dtype, held.cell.who)
    for start, stop in zip(copied.filled[::2], copied.filled[1::2], strict=True):
        slots.fill(leaf.name, start, stop)


def _fill(store: Store, part: CopiedPart, array: np.ndarray) -> None:
    cell = _cell_of(store.variables[part.key], part)
    out = cell.overwrite().reshape(-1).view(np.uint8)
    np.copyto(out[part.start : part.start + array.nbytes], array)
    cell.settle()


def _cell_of(held: HeldVariable, part: CopiedPart) -> Cell:
    if not part.optimizer:
        return held.cell
    slots = held.slots[part.optimizer]
    names = [leaf.name for leaf in slots.leaves]
    return slots.cells[names.index(part.leaf)]
