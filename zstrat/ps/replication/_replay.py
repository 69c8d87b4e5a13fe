"""Copies a store as messages, and replays changes on the copy.

A replay decides nothing: the primary has decided, and this store has made all earlier
changes. `CHANGES` has an entry for each kind of change; long changes are computed on
another thread, and then committed by the same code that the primary has run.

A copy is the content of a store at one moment, as messages that fill an empty store:
for a backup, and for a file (`zstrat.ps.handover`).

Small content is copied to messages at once; values and slots are pinned, and sent later
in parts while updates continue. Slots are sent without a layout: the backup treats them
as restored from a checkpoint, and its optimizers bind them (`Unbound`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.errors import ProtocolError, ZstratError
from zstrat.memory import lasting
from zstrat.ps._requests import OPERATIONS, close_round, computed
from zstrat.ps.engine._slots import HeldVariable, SlotArray, Unbound
from zstrat.ps.snapshots._load_plan import Loading, Source, move_to
from zstrat.ps.snapshots._snapshot import SnapshotTensor
from zstrat.ps.snapshots._table_loading import TableLoading, sent_rows
from zstrat.ps.store._cell import Cell
from zstrat.ps.store._ledger import UNNAMED
from zstrat.ps.store._plan import StorePlan
from zstrat.ps.store._plans import BindPlan
from zstrat.ps.tables._growing_cell import growing
from zstrat.ps.tables._id_table import TALL
from zstrat.wire import (
    AskParts,
    BindOptimizer,
    ChangeProgram,
    CloseRound,
    Contribute,
    CopiedSlot,
    CopiedVariable,
    CopyKept,
    CopyLedger,
    CopyParts,
    CopySlots,
    CopyTree,
    CopyVariables,
    CopyWhole,
    CreateOptimizer,
    CreateTables,
    CreateVariables,
    DeleteVariables,
    Fence,
    HeldRounds,
    KeptOptimizer,
    LoadTensors,
    Message,
    Push,
    PushPart,
    RaiseMark,
    RaiseWriterMark,
    StepRun,
    StoreTable,
    StoreTensors,
    VariableEntry,
    Withdraw,
    dtype_named,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.ps._requests import Running
    from zstrat.ps.engine._slots import Slots
    from zstrat.ps.store._ledger import Ledger
    from zstrat.ps.store._plans import Plan
    from zstrat.ps.store._store import Store
    from zstrat.ps.tables._id_table import IdTable
    from zstrat.wire import CopiedPart


_ENTRIES: Final = 256
"""The most variables or slots that one message describes: with long names they fit into
a header."""


@final
class StoreCopy:
    """The content of a store at this moment. The caller has exclusive use of the whole
    store while it makes the copy, and calls `release` in the end.

    Raises:
        Exception: Any error of pinning; nothing stays pinned.
    """

    def __init__(self, store: Store) -> None:
        self.tensors: list[SnapshotTensor] = []
        """Pinned values and slots, which are sent in parts."""
        try:
            for held in store.variables.values():
                self.tensors += _pinned(held)
        except BaseException:  # to the caller
            self.release()
            raise
        # In this order: a table is created before its rows, and a tree binds variables
        # that are there.
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
        """Messages that fill the rest of an empty store, in order."""

    def release(self) -> None:
        for tensor in self.tensors:
            tensor.pin.release()
        self.tensors = []


_CONTENT: Final = (
    "engine",
    "variables",
    "alike_pushes",
    "ledger",
    "writers",
    "leases",
    "parts",
    "rounds",
    "counts",
    "kept",
    "kept_optimizers",
)
"""Names of the attributes that are the content of a `Store`."""


def hand_over(source: Store, target: Store) -> None:
    """Moves the content of a store to an empty one. Neither may have a log, or a
    request that is being computed."""
    for name in _CONTENT:
        content = getattr(source, name)
        setattr(source, name, getattr(target, name))
        setattr(target, name, content)
    # A plan that was made for the one cannot be committed to the other.
    source.variables.generation = target.variables.generation + 1


def _pinned(held: HeldVariable) -> Iterator[SnapshotTensor]:
    key, cell = held.entry.key, held.cell
    # A lost value has nothing to send; its variable says why it is lost.
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
    """Returns the messages that create the optimizers of a store, without bound
    variables. A store that has the optimizers already may get the messages again."""
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


def replay(store: Store, change: Message) -> Running[None]:
    """Makes a change of the primary again on this store. Run it with `advance`.

    Raises:
        ZstratError: The change failed, which it did not on the primary: the two stores
            differ.
    """
    make = CHANGES.get(type(change))
    if make is None:
        raise ProtocolError(f"{type(change).__name__} is not a change of a store")
    begun = make(store, change)
    # What the row of `CHANGES` returns decides how the rest of the change is made.
    if isinstance(begun, Generator):
        yield from begun
    elif isinstance(begun, Loading | TableLoading):
        yield begun.compute
        begun.commit()
    elif isinstance(begun, StorePlan):
        # With the bound of the primary: what its loop has done is short here, too.
        yield from computed(store, begun)
        store.commit(begun)


def _note_part(store: Store, part: PushPart) -> None:
    with suppress(ZstratError):  # the primary refused it, too
        store.note_part(part)


def _claim(store: Store, asked: AskParts) -> None:
    with suppress(ZstratError):
        store.claim(asked.step, asked.attempt)


def _contribute(store: Store, message: Contribute) -> None:
    # Without a ledger: the primary has kept it, maybe before its step was over.
    store.rounds.contribute(message, None, store.variables, store.engine)


def _loading(store: Store, forgotten: LoadTensors) -> Loading:
    """Drops the slots that the primary has dropped when it loaded others."""
    variables = store.variables
    slots = [(variables[entry.key], entry.optimizer) for entry in forgotten.entries]
    return Loading((), slots)


def _storing(store: Store, message: StoreTensors) -> Loading:
    """Stores values and slots that the primary has loaded or received."""
    places = zip(message.entries, message.arrays, strict=True)
    return Loading([move_to(store, e, Source.of("its copy", a)) for e, a in places])


def _copy_ledger(store: Store, copied: CopyLedger) -> None:
    writer = copied.writer
    ledger = store.writers.of(writer) if writer else store.ledger
    applied, over = copied.arrays
    # Raised first: `record` ignores steps below the mark.
    ledger.raise_to(copied.low_water)
    for step, part in applied.tolist():
        ledger.record(step, part)
    ledger.close_steps([StepRun(*run) for run in over.tolist()])


def _copy_kept(store: Store, kept: CopyKept) -> None:
    (keys,) = kept.arrays
    store.kept.update(keys.tolist())
    store.kept_optimizers.update(kept.optimizers)
    store.engine.is_former = kept.are_loaded


def _copy_tree(store: Store, copied: CopyTree) -> BindPlan:
    tree, bound = copied.arrays
    # Only those that the primary has bound: others of the tree may have come later.
    here = {key: store.variables[key] for key in bound.tolist()}
    known = store.engine.get(copied.optimizer)
    return BindPlan(store.variables.generation, known, tree.tobytes(), here.get)


def _copy_variables(store: Store, copied: CopyVariables) -> None:
    store.variables.first_version = copied.first_version
    for variable in copied.variables:
        _make_room(store, variable)


def _make_room(store: Store, copied: CopiedVariable) -> None:
    entry = VariableEntry(*copied[:4])
    held = store.variables.get(entry.key)
    if held is not None and held.table is not None:  # it has just been created
        held.version = copied.version
        growing(held.cell).extend(copied.shape[0])
    else:
        # Not filled: `CopyParts` writes all of it before anybody reads.
        cell = Cell.around(lasting(tuple(copied.shape), dtype_named(copied.dtype)))
        cell.who = f"{store.variables.task}: variable {entry.name!r}"
        held = store.variables[entry.key] = HeldVariable(entry, cell, copied.version)
    if copied.lost:
        held.cell.lose(copied.lost)


def _copy_slots(store: Store, copied: CopySlots) -> None:
    for slot in copied.slots:
        _make_slot(store, slot)


def _make_slot(store: Store, copied: CopiedSlot) -> None:
    held = store.variables[copied.key]
    if not copied.optimizer and held.table is not None:
        growing(held.table.leaves()[copied.leaf]).extend(copied.shape[0])
        return
    slots = held.slots.get(copied.optimizer)
    if not isinstance(slots, Unbound):
        slots = held.slots[copied.optimizer] = Unbound.like(None)
    leaf = SlotArray(copied.leaf, copied.rows)
    shape, dtype = tuple(copied.shape), dtype_named(copied.dtype)
    slots.make_room(leaf, shape, dtype, held.cell)
    for start, stop in zip(copied.filled[::2], copied.filled[1::2], strict=True):
        slots.fill(leaf.name, start, stop)


def _copy_parts(store: Store, copied: CopyParts) -> None:
    for part, array in zip(copied.parts, copied.arrays, strict=True):
        held = store.variables[part.key]
        cell = _cell_of(held, part)
        # In place: nobody reads or pins an incomplete copy, so this is the value's own
        # memory.
        out = cell.overwrite().reshape(-1).view(np.uint8)
        np.copyto(out[part.start : part.start + array.nbytes], array)
        cell.settle()


def _cell_of(held: HeldVariable, part: CopiedPart) -> Cell:
    if not part.optimizer:
        if held.table is not None and part.leaf:
            # The index is made from the ids, which change with this part.
            held.table.forget_index()
            return held.table.leaves()[part.leaf]
        return held.cell
    slots = held.slots[part.optimizer]
    names = [leaf.name for leaf in slots.leaves]
    return slots.cells[names.index(part.leaf)]


def tables_of(store: Store) -> list[IdTable]:
    """Returns the tables of a store, of which a copy lacks the indices."""
    variables = store.variables.values()
    return [held.table for held in variables if held.table is not None]


def _copied(store: Store, whole: CopyWhole) -> Running[None]:
    """Completes a copied store, because the last message of the copy has arrived: makes
    the indices of its tables."""
    del whole
    # Now, on the thread: a promoted copy must not begin with that in its first request.
    for table in tables_of(store):
        yield table.make_indices


def _as_requested(store: Store, message: Message) -> Message | Plan | Running[Message]:
    """Replays a request that the primary has served."""
    return OPERATIONS[type(message)].begin(store, message)


CHANGES: Final[
    dict[
        type[Message],
        Callable[
            [Store, Any],
            Message
            | Plan
            | Loading
            | TableLoading
            | Running[Message]
            | Running[None]
            | None,
        ],
    ]
] = {
    CreateVariables: _as_requested,
    CreateTables: _as_requested,
    DeleteVariables: _as_requested,
    Withdraw: _as_requested,
    CreateOptimizer: _as_requested,
    BindOptimizer: _as_requested,
    Push: lambda store, push: store.plan_again(push),
    LoadTensors: _loading,
    StoreTensors: _storing,
    StoreTable: sent_rows,
    # Which pushes were applied, and which steps are over.
    PushPart: _note_part,
    AskParts: _claim,
    Fence: lambda store, fence: store.close_steps(fence.low_water, fence.over),
    RaiseMark: lambda store, mark: store.raise_mark(mark.low_water),
    RaiseWriterMark: lambda store, mark: store.writers.of(mark.writer).raise_to(
        mark.low_water
    ),
    Contribute: _contribute,
    CloseRound: close_round,
    ChangeProgram: lambda store, _: store.change_program(),
    # The content of the store before the first change.
    CopyLedger: _copy_ledger,
    CopyKept: _copy_kept,
    CopyVariables: _copy_variables,
    CopySlots: _copy_slots,
    CopyTree: _copy_tree,
    CopyParts: _copy_parts,
    HeldRounds: lambda store, copied: store.rounds.copy(copied),
    CopyWhole: _copied,
}
"""By the class of a change, a function that makes the change at once, or returns what
has to be computed for it, or is a generator that makes it in several steps."""
