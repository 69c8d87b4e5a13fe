"""All that a store holds, as numbered arrays and plain facts about them, and back.

What the store answers next depends on nothing else: values, versions, slots, optimizers
with their code and trees, and which pushes were applied. Programs are compiled anew.

Slots come back as those of a checkpoint do that was restored before anybody had told
the tree (`Unbound`): the first update takes them, and is bit-identical to what it would
have been.

Decides without I/O. `captured` belongs to the owner of the store, while nothing is
under way there; nobody else has seen the store that `restore` fills.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from zstrat.ps.engine._slots import Unbound
from zstrat.ps.snapshots._snapshot import ServerSnapshot, SnapshotTensor
from zstrat.ps.store._cell import Cell
from zstrat.ps.store._pins import Pin
from zstrat.rows import lasting
from zstrat.wire import StepRun, TensorEntry, VariableEntry, dtype_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.ps.engine._engine import Registered
    from zstrat.ps.engine._slots import HeldVariable, Slots
    from zstrat.ps.store._store import Store

Facts = dict[str, Any]
"""Of JSON's kinds; arrays by their number."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """The tensors of ``snapshot`` are the arrays, in order."""

    facts: Facts
    snapshot: ServerSnapshot


@dataclass(slots=True)
class _Tensors:
    """Pinned arrays, numbered as they come."""

    pinned: list[SnapshotTensor] = field(default_factory=list)

    def add(self, array: np.ndarray) -> int:
        """One that nobody writes to any more."""
        pin = Pin(np.ascontiguousarray(array), frozen=True)
        return self._add(array.dtype.name, array.shape, pin)

    def add_bytes(self, data: bytes) -> int:
        return self.add(np.frombuffer(data, np.uint8))

    def add_cell(self, cell: Cell) -> int:
        return self._add(cell.dtype.name, cell.shape, cell.pin())

    def _add(self, dtype: str, shape: Sequence[int], pin: Pin) -> int:
        entry = TensorEntry(0, 0, "", dtype, list(shape), bool(shape))
        self.pinned.append(SnapshotTensor(entry, pin))
        return len(self.pinned) - 1


def captured(store: Store) -> StoreState:
    """The store as it is now; nothing is copied."""
    tensors, held = _Tensors(), list(store.variables.values())
    facts = {
        "first_version": store.variables.first_version,
        "variables": [_variable(each, tensors) for each in held],
        "slots": [
            [each.entry.key, optimizer, _slots(slots, tensors)]
            for each in held
            for optimizer, slots in each.slots.items()
            if slots.leaves
        ],
        "optimizers": [_optimizer(each, tensors) for each in store.engine],
        "counts": asdict(store.counts),
    }
    applied, facts["memory"] = _memory(store)
    facts["applied"] = tensors.add(np.array(applied, np.int64).reshape(-1, 3))
    return StoreState(facts, ServerSnapshot(tensors.pinned))


def restore(store: Store, facts: Facts, arrays: Sequence[np.ndarray]) -> None:
    """Fills an empty store. The arrays are the store's own from now on.

    Raises:
        KeyError, TypeError, ValueError, IndexError: They do not belong to the facts.
        Exception: Whatever loading an optimizer raises.
    """
    for number, name, code, _ in facts["optimizers"]:
        known = store.engine.load(number, name, arrays[code].tobytes())
        store.engine.register(known)
    store.variables.first_version = int(facts["first_version"])
    for entry, version, lost, shape, dtype, at in facts["variables"]:
        held = _held(store, VariableEntry(*entry), lost, shape, dtype, at, arrays)
        held.version = int(version)
    for key, optimizer, leaves in facts["slots"]:
        held = store.variables[key]
        held.slots[optimizer] = _unbound(leaves, arrays, held.cell.who)
    for number, _, _, trees in facts["optimizers"]:
        for data, keys in trees:
            here = {key: store.variables[key] for key in keys}
            bindings = store.engine.get(number).bindings
            bindings.add(bindings.trace(arrays[data].tobytes(), here.get), keys)
    for name, count in facts["counts"].items():
        setattr(store.counts, name, int(count))
    _remember(store, arrays[facts["applied"]].tolist(), facts["memory"])


def _memory(store: Store) -> tuple[list[tuple[int, int, int]], Facts]:
    """Which pushes were applied: ``(writer, step, part)``, the writer 0 for those of
    closures, and facts for `_remember`."""
    ledgers = [(0, store.ledger), *store.writers.ledgers]
    applied = [(writer, *each) for writer, one in ledgers for each in one.applied]
    return applied, {
        "marks": [[writer, one.low_water, list(one.over)] for writer, one in ledgers],
        "parts": [[*noted[:3], list(noted[3])] for noted in store.parts.noted()],
        "kept": [list(store.kept), list(store.kept_optimizers.items())],
    }


def _remember(store: Store, applied: Sequence[Sequence[int]], facts: Facts) -> None:
    ledgers = {}
    for writer, low_water, over in facts["marks"]:
        known = store.writers.of(writer) if writer else store.ledger
        known.raise_to(low_water)
        known.close([StepRun(*run) for run in over])
        ledgers[writer] = known
    for writer, step, part in applied:
        ledgers[writer].record(step, part)
    for step, attempt, part, names in facts["parts"]:
        if part < 0:
            store.parts.claim(step, attempt, store.ledger)
        else:
            store.parts.take(step, attempt, part, names, store.ledger)
    variables, optimizers = facts["kept"]
    store.kept.update(variables)
    store.kept_optimizers.update(dict(optimizers))


def _variable(held: HeldVariable, tensors: _Tensors) -> list[Any]:
    cell, lost = held.cell, held.cell.lost
    at = -1 if lost else tensors.add_cell(cell)
    shape, dtype = list(cell.shape), cell.dtype.name
    return [list(held.entry), held.version, lost, shape, dtype, at]


def _held(
    store: Store,
    entry: VariableEntry,
    lost: str,
    shape: Sequence[int],
    dtype: str,
    at: int,
    arrays: Sequence[np.ndarray],
) -> HeldVariable:
    array = lasting(tuple(shape), dtype_named(dtype)) if lost else arrays[at]
    if (list(array.shape), array.dtype.name) != (list(shape), dtype):
        raise ValueError(f"variable {entry.name!r} has another value than it should")
    store.variables.hold([entry], [Cell.around(array)])
    held = store.variables[entry.key]
    if lost:
        held.cell.lose(lost)
    return held


def _slots(slots: Slots, tensors: _Tensors) -> list[list[Any]]:
    """Of each leaf: its name, whether it has rows, which of them were loaded (None: all
    are there), its array."""
    filled = slots.filled if isinstance(slots, Unbound) else {}
    return [
        [leaf.name, leaf.rows, filled.get(leaf.name), tensors.add_cell(cell)]
        for leaf, cell in zip(slots.leaves, slots.cells, strict=True)
    ]


def _unbound(
    leaves: Sequence[Sequence[Any]], arrays: Sequence[np.ndarray], who: str
) -> Unbound:
    made = [
        (str(name), bool(rows), filled, arrays[at]) for name, rows, filled, at in leaves
    ]
    return Unbound.around(made, who)


def _optimizer(known: Registered, tensors: _Tensors) -> list[Any]:
    trees = [[tensors.add_bytes(data), keys] for data, keys in known.bindings.told]
    code = tensors.add_bytes(known.code)
    return [known.optimizer, known.name, code, trees]
