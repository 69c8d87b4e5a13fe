"""Copies a store as it is at one moment, as messages that fill an empty one: for a
backup, and for a file (`zstrat.ps.handover`).

Small things are messages at once; values and slots are pinned, and follow in parts
while updates continue. Slots come without a layout: the backup treats them as restored
from a checkpoint, and its optimizers bind them (`Unbound`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import numpy as np

from zstrat.ps.engine._slots import Unbound
from zstrat.ps.snapshots._snapshot import SnapshotTensor
from zstrat.ps.store._ledger import UNNAMED
from zstrat.ps.tables._id_table import TALL
from zstrat.wire import (
    AskParts,
    CopiedSlot,
    CopiedVariable,
    CopyKept,
    CopyLedger,
    CopySlots,
    CopyTree,
    CopyVariables,
    CreateOptimizer,
    CreateTables,
    KeptOptimizer,
    Message,
    Push,
    PushPart,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.ps.engine._slots import HeldVariable, Slots
    from zstrat.ps.store._ledger import Ledger
    from zstrat.ps.store._store import Store

_ENTRIES: Final = 256
"""Variables or slots that one message describes: with long names they fit into a
header."""


@final
class StoreCopy:
    """A store as it is now. Its maker has the turn of all names, and calls `release`
    in the end.

    Raises:
        Exception: Whatever pinning raises; nothing stays pinned.
    """

    def __init__(self, store: Store) -> None:
        self.tensors: list[SnapshotTensor] = []
        """Values and slots, which follow in parts."""
        try:
            for held in store.variables.values():
                self.tensors += _pinned(held)
        except BaseException:  # to the caller
            self.release()
            raise
        self.messages: Sequence[Message] = [
            *_ledgers(store),
            *[Push(0, UNNAMED, 0, 0, [], (), leases=x) for x in store.leases.packed()],
            *_parts(store),
            *_tables(store),
            *_variables(store),
            *_optimizers(store),
            *_slots(store),
            *_kept(store),
            *store.rounds.messages(),
        ]
        """Messages that make the rest, in order."""

    def release(self) -> None:
        for tensor in self.tensors:
            tensor.pin.release()
        self.tensors = []


_CONTENT: Final = (
    "engine",
    "variables",
    "ledger",
    "writers",
    "leases",
    "parts",
    "rounds",
    "counts",
    "kept",
    "kept_optimizers",
)
"""The attributes that are the content of a `Store`."""


def hand_over(source: Store, target: Store) -> None:
    """Moves the content of a store to an empty one. Neither may have a log, nor a
    request that is computed."""
    for name in _CONTENT:
        content = getattr(source, name)
        setattr(source, name, getattr(target, name))
        setattr(target, name, content)
    # A plan that was made for the one cannot be committed to the other.
    source.variables.generation = target.variables.generation + 1


def _pinned(held: HeldVariable) -> Iterator[SnapshotTensor]:
    key, cell = held.entry.key, held.cell
    if not cell.lost:
        yield SnapshotTensor.of(key, 0, "", cell, bool(cell.shape))
    if held.table is not None:
        for name, leaf_cell in held.table.leaves().items():
            yield SnapshotTensor.of(key, 0, name, leaf_cell, name in TALL)
    for number, slots in held.slots.items():
        for cell, leaf in zip(slots.cells, slots.leaves, strict=True):
            yield SnapshotTensor.of(key, number, leaf.name, cell, leaf.rows)


def _ledgers(store: Store) -> Iterator[Message]:
    yield _ledger(0, store.ledger)
    for writer, ledger in store.writers.ledgers:
        yield _ledger(writer, ledger)


def _ledger(writer: int, ledger: Ledger) -> CopyLedger:
    pairs = [
        np.array(each, np.int64).reshape(-1, 2)
        for each in (ledger.applied, ledger.over)
    ]
    return CopyLedger(writer, ledger.low_water, tuple(pairs))


def _parts(store: Store) -> Iterator[Message]:
    for step, attempt, part, names in store.parts.noted():
        if part < 0:
            yield AskParts(0, step, attempt, 0)
        else:
            yield PushPart(0, step, part, 0, attempt, list(names), [], ())


def _tables(store: Store) -> Iterator[Message]:
    for held in store.variables.values():
        if held.table is not None:
            yield CreateTables(0, [held.table.entry], held.table.code)


def _variables(store: Store) -> Iterator[Message]:
    variables = store.variables
    entries = [
        CopiedVariable(
            *held.entry,
            held.version,
            held.cell.dtype.name,
            list(held.cell.shape),
            held.cell.lost,
        )
        for held in variables.values()
    ]
    # One at least: it has the first version, too.
    for at in range(0, max(1, len(entries)), _ENTRIES):
        yield CopyVariables(variables.first_version, entries[at : at + _ENTRIES])


def optimizer_code(store: Store) -> list[Message]:
    """Returns the messages that make the optimizers, bound to nothing. A store that has
    them already may get them again."""
    return [
        CreateOptimizer(0, known.optimizer, known.name, known.code)
        for known in store.engine
    ]


def _optimizers(store: Store) -> Iterator[Message]:
    yield from optimizer_code(store)
    for known in store.engine:
        for data, keys in known.bindings.encoded:
            tree = np.frombuffer(data, np.uint8)
            yield CopyTree(known.optimizer, (tree, np.array(keys, np.int64)))


def _slots(store: Store) -> Iterator[Message]:
    entries = [
        entry
        for held in store.variables.values()
        for optimizer, slots in held.slots.items()
        for entry in _leaves(held.entry.key, optimizer, slots)
    ]
    entries += [
        CopiedSlot(held.entry.key, 0, name, True, cell.dtype.name, list(cell.shape), [])
        for held in store.variables.values()
        if held.table is not None
        for name, cell in held.table.leaves().items()
        if cell.grows
    ]
    for at in range(0, len(entries), _ENTRIES):
        yield CopySlots(entries[at : at + _ENTRIES])


def _kept(store: Store) -> Iterator[Message]:
    if store.kept or store.kept_optimizers:
        names = [KeptOptimizer(*each) for each in store.kept_optimizers.items()]
        keys = np.array(sorted(store.kept), np.int64)
        yield CopyKept(names, store.engine.is_former, (keys,))


def _leaves(key: int, optimizer: int, slots: Slots) -> Iterator[CopiedSlot]:
    for cell, leaf in zip(slots.cells, slots.leaves, strict=True):
        filled = [(0, cell.shape[0] if leaf.rows else 1)]
        if isinstance(slots, Unbound):
            filled = slots.filled[leaf.name]
        ends = [end for run in filled for end in run]
        shape, name = list(cell.shape), cell.dtype.name
        yield CopiedSlot(key, optimizer, leaf.name, leaf.rows, name, shape, ends)
