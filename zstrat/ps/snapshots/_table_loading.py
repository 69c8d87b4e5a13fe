"""Loads rows of a table of any id, each with its id, from files or a message.

A table that replaces another one is made in other memory, and takes its place when it
is complete: until then the old table stays as it was. Rows that are added to a table
are written in place, a block of rows at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.errors import InvalidArgumentError, NotFoundError
from zstrat.ids import buckets_of, hashes_of
from zstrat.ps.engine._arithmetic import as_rows, is_floating
from zstrat.ps.engine._slots import HeldVariable, SlotArray, Unbound
from zstrat.ps.store._lookups import require_table
from zstrat.ps.tables._growing_cell import growing
from zstrat.ps.tables._id_table import CHANGED, CLOCK, CUT, GONE, TIMES, USES
from zstrat.ps.tables._row_changes import RowChanges
from zstrat.ps.tables._waiting import COUNTS
from zstrat.wire import StoreTable, TableLeaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zstrat.checkpoint import TensorReader
    from zstrat.ps.engine._slots import Slots
    from zstrat.ps.store._cell import Cell
    from zstrat.ps.store._changes import ChangeLog
    from zstrat.ps.store._store import Store
    from zstrat.wire import TableTensor

    from ._snapshot_files import DiskThread

VALUE: Final = TableLeaf(0, "", True)
_USES, _CLOCK = TableLeaf(0, USES, True), TableLeaf(0, CLOCK, False)
_TIMES: Final = TableLeaf(0, TIMES, False)
_COUNTS: Final = TableLeaf(0, COUNTS, True)
"""The leaf of counts: how often each waiting id, which has no row yet, was pushed.
These have ids of their own."""
_CHANGED, _CUT = TableLeaf(0, CHANGED, True), TableLeaf(0, CUT, False)
_GONE: Final = TableLeaf(0, GONE, True)
"""The leaf of removed ids: its "rows" are the ids to remove, if the table has them."""
_OWN: Final = (VALUE, _USES, _CLOCK, _TIMES, _COUNTS, _CHANGED, _CUT, _GONE)
_APART: Final = (_COUNTS, _GONE)
_SAME_RULES: Final = "create the table with the same admission= and eviction= as there"

_BLOCK: Final = 4 * 2**20
"""Bytes of rows that are read, and logged for a backup, at a time."""


class Kind(NamedTuple):
    """The dtype and shape of the data for one leaf; ``shape`` is that of one row, if
    the leaf has rows."""

    dtype: np.dtype
    shape: tuple[int, ...]
    what: str
    """The name of the data in errors."""


@final
class TableLoading:
    """Loads rows into a table for one request, in the phases of `Loading`.

    Args:
        leaves: The leaves for which data will be loaded: value, slots, counts and
            others.
        read: Reads the data, and calls `add` and `put` with it.
        replaces: Whether the loaded rows replace all rows of the table; else they are
            added.
        sent: The message that contains all of the data; None: files do.

    Raises:
        NotFoundError: No variable has the key.
        InvalidArgumentError: The variable is not a table.
    """

    def __init__(
        self,
        store: Store,
        key: int,
        leaves: Mapping[TableLeaf, Kind],
        read: Callable[[TableLoading], None],
        replaces: bool,
        sent: StoreTable | None = None,
    ) -> None:
        held = store.variables[key]
        table = require_table(held)
        self._engine, self._leaves, self._held = store.engine, leaves, held
        self._read, self._replaces, self._sent = read, replaces, sent
        self._is_prepared = False
        self._target = held
        if replaces:
            cell = held.cell.sibling(held.cell.shape[1:], held.cell.dtype, 0)
            cell.who = held.cell.who
            self._target = HeldVariable(held.entry, cell, 0, table=table.empty())

    @property
    def optimizes(self) -> bool:
        return any(leaf.optimizer for leaf in self._leaves)

    def prepare(self) -> None:
        """Makes slots for the data, and checks that all of it fits the table.

        Raises:
            NotFoundError: An optimizer does not exist, or does not keep a slot that is
                loaded.
            InvalidArgumentError: The data for a leaf has another shape or dtype than
                the leaf.
            UnavailableError: The value that rows are added to was lost.
        """
        self._target.cell.require()
        if not self._replaces:
            # Slots that were loaded need their layout before rows can be added to them.
            self._engine.adopt_slots(self._target)
        for leaf, kind in self._leaves.items():
            self._make_place(leaf, kind)
        self._is_prepared = True

    def compute(self) -> None:
        """Reads all data into the table, whether `prepare` was called or not.

        Raises: Any error of ``read``; some rows may have been added.
        """
        if not self._is_prepared:
            self.prepare()
        self._read(self)

    def add(self, ids: np.ndarray, rows: Mapping[TableLeaf, np.ndarray]) -> None:
        """Writes rows ``[n, ...]`` for ids ``[n]``. If the value is not loaded, ids
        without a row get the initial value of the table; if a slot is not loaded, the
        initial slot.

        Raises:
            ResourceExhaustedError: There is no memory for the rows; none was added.
        """
        target = self._target
        assert target.table is not None
        # Their ids have no rows, so they go neither to the value nor to its slots.
        if _COUNTS in rows:
            assert target.table.waiting is not None
            target.table.waiting.put(ids, rows[_COUNTS])
            return
        changes = RowChanges(target, target.table)
        if _GONE in rows:
            changes.remove(ids)
            changes.finish()
            return
        rows = dict(rows)
        changed = rows.pop(_CHANGED, None)
        try:
            begins = VALUE not in rows
            places = changes.rows_of(ids, self._engine, begins=begins)
            height = target.cell.shape[0]
            for leaf, values in rows.items():
                cell = growing(self._cell(leaf))
                if (start := cell.shape[0]) < height:  # of an optimizer without tree
                    # They did not grow with the table, so what comes for other rows is
                    # not known here.
                    cell.extend(height - start)
                    self._fill(leaf, start, height)
                out = cell.begin_rows(places)
                as_rows(out)[places] = as_rows(np.ascontiguousarray(values))
                cell.settle()
        except BaseException:  # to the caller
            changes.undo()
            raise
        changes.finish()
        # After `finish`, which has numbered the rows as a change of now.
        if changed is not None and target.table.changed is not None:
            target.table.changed.begin_rows(places)[places] = changed
            target.table.changed.settle()

    def put(self, leaf: TableLeaf, value: np.ndarray) -> None:
        """Writes a leaf that has no rows: one value for the whole table."""
        cell = self._cell(leaf)
        if leaf == _CLOCK:  # parts of a table may have had other pushes
            value = np.maximum(cell.look(), value)
        if leaf == _CUT:  # of the primary, whose removed ids did not come along
            value = value[[0, 0]]
        cell.overwrite()[...] = value
        cell.settle()
        self._fill(leaf, 0, 1)

    def commit(self, *, whole: bool = True) -> None:
        """Gives the table a new version, so that readers see what has changed. If
        ``whole``, all was loaded, and a table that replaces another one takes its
        place."""
        held, target = self._held, self._target
        if self._replaces and whole:
            assert target.table is not None
            # What was before is not known, even if no rows came.
            cut = target.table.cut + 1
            target.table.set_cut(cut, cut)
            held.cell, held.table, held.slots = target.cell, target.table, target.slots
        # Also after a failure: rows that were added are new, whatever became of the
        # others.
        if whole or not self._replaces:
            held.version += 1

    def log(self, log: ChangeLog, *, whole: bool) -> None:
        """Logs the loaded rows for the backup. If not ``whole``, the load has failed;
        the backup is marked as diverged if the table may have changed."""
        if not whole:
            # A table that would have been replaced is as it was.
            if not self._replaces:
                log.mark_diverged("a load failed half way")
        elif self._sent is not None:
            log.append(replace(self._sent, session=0))
        else:
            # As values, and all of the table: the backup may not see the files.
            for each in self._content():
                log.append(each)

    def _content(self) -> Iterator[StoreTable]:
        """Yields messages that transfer the whole table as it is now; call it after
        `commit`."""
        # Copies, as the log sends them while the table changes.
        held, alone = self._held, dict[TableLeaf, np.ndarray]()
        table = require_table(held)
        tall = {VALUE: held.cell}
        if table.uses is not None:
            tall[_USES] = table.uses
            for place in _CLOCK, _TIMES:
                alone[place] = table.leaves()[place.leaf].look().copy()
        if table.changed is not None:
            tall[_CHANGED] = table.changed
        for number, slots in held.slots.items():
            for cell, leaf in zip(slots.cells, slots.leaves, strict=True):
                place = TableLeaf(number, leaf.name, leaf.rows)
                if leaf.rows:
                    tall[place] = cell
                else:
                    alone[place] = cell.look().copy()
        height, key = held.cell.shape[0], held.entry.key
        size = max(1, _BLOCK // sum(cell.row_bytes for cell in tall.values()))
        # One message at least, as it replaces all that the backup has.
        for start in range(0, max(height, 1), size):
            some = slice(start, start + size)
            arrays = [cell.look()[some].copy() for cell in tall.values()]
            ids = table.ids.look()[some].copy()
            if start:
                yield StoreTable(0, key, False, list(tall), (ids, *arrays))
            else:
                leaves = [*tall, *alone]
                arrays += alone.values()
                yield StoreTable(0, key, True, leaves, (ids, *arrays))
        if table.waiting is not None:
            waiting = table.waiting.ids.look(), table.waiting.numbers.look()
            arrays = [array.copy() for array in waiting]
            yield StoreTable(0, key, False, [_COUNTS], tuple(arrays))
        if table.changed is not None:
            none, cut = np.empty(0, np.int64), table.leaves()[CUT].look().copy()
            yield StoreTable(0, key, False, [_CUT], (none, cut))

    def _make_place(self, leaf: TableLeaf, kind: Kind) -> None:
        target = self._target
        if not leaf.optimizer:
            self._require_fit(leaf, kind, self._cell(leaf))
            return
        known = self._engine.get(leaf.optimizer)
        slots = target.slots.get(known.optimizer)
        # New slots have all their leaves if the tree is known, else those that are
        # loaded.
        if slots is None:
            slots = known.make_slots(target) or Unbound.like(None)
            target.slots[known.optimizer] = slots
        if isinstance(slots, Unbound):
            if all(each.name != leaf.leaf for each in slots.leaves):
                shape = (0, *kind.shape) if leaf.rows else kind.shape
                about = SlotArray(leaf.leaf, leaf.rows)
                slots.make_room(about, shape, kind.dtype, target.cell)
            self._require_fit(leaf, kind, self._cell(leaf))
            return
        cell = self._cell(leaf)
        self._require_fit(leaf, kind, cell)
        # Slots have the dtype of gradients, which may be another one in the file.
        if cell.dtype != kind.dtype:
            place = [each.name for each in slots.leaves].index(leaf.leaf)
            known.programs.retype(slots, {place: kind.dtype})

    def _cell(self, leaf: TableLeaf) -> Cell:
        if leaf == VALUE:
            return self._target.cell
        if not leaf.optimizer:
            table = self._target.table
            cell = None if table is None else table.leaves().get(leaf.leaf)
            # Removed ids are kept nowhere under this name: they are compared with ids
            # of rows.
            if leaf == _GONE and table is not None:
                return table.ids
            if cell is None:
                raise NotFoundError(
                    f"{self._target.cell.who} keeps no {leaf.leaf!r}, which the "
                    f"checkpoint has: {_SAME_RULES}"
                )
            return cell
        slots = self._target.slots[leaf.optimizer]
        for cell, each in zip(slots.cells, slots.leaves, strict=True):
            if each == SlotArray(leaf.leaf, leaf.rows):
                return cell
        names = ", ".join(repr(each.name) for each in slots.leaves) or "nothing"
        raise NotFoundError(
            f"{self._target.cell.who}, slot {leaf.leaf!r}: its optimizer keeps no such "
            f"thing {'by rows' if leaf.rows else 'without rows'}, but {names}"
        )

    def _fill(self, leaf: TableLeaf, start: int, stop: int) -> None:
        slots: Slots | None = self._target.slots.get(leaf.optimizer)
        if isinstance(slots, Unbound):
            slots.fill(leaf.leaf, start, stop)

    def _require_fit(self, leaf: TableLeaf, kind: Kind, cell: Cell) -> None:
        shape = cell.shape[1:] if leaf.rows else cell.shape
        alike = is_floating(cell.dtype) and is_floating(kind.dtype)
        # Values keep their dtype, and slots take that of what is loaded.
        alike = alike and bool(leaf.optimizer)
        if kind.shape != shape or not (alike or kind.dtype == cell.dtype):
            place = f", slot {leaf.leaf!r}" if leaf.leaf else ""
            raise InvalidArgumentError(
                f"{self._target.cell.who}{place}: expected {cell.dtype.name}"
                f"{list(shape)}{' for each id' if leaf.rows else ''}, got {kind.what}, "
                f"{kind.dtype.name}{list(kind.shape)}"
                f"{f': {_SAME_RULES}' if leaf == _COUNTS else ''}"
            )


def sent_rows(store: Store, message: StoreTable) -> TableLoading:
    """Returns the loading of the rows and slots that a message contains.

    Raises:
        NotFoundError: No variable has the key.
        InvalidArgumentError: The variable is not a table, or the arrays are not one of
            ids and one for each leaf.
    """
    ids, *values = message.arrays or (np.empty(0),)
    leaves = message.leaves
    fits = ids.dtype == np.int64 and ids.ndim == 1
    fits = fits and len(values) == len(leaves) == len(set(leaves))
    fits = fits and all(
        not leaf.rows or x.shape[:1] == ids.shape
        for leaf, x in zip(leaves, values, strict=True)
    )
    # Counts and removed ids have ids of their own, so nothing may come beside them.
    fits = fits and (not {*_APART} & {*leaves} or len(leaves) == 1)
    if not fits or any(leaf not in _OWN for leaf in leaves if not leaf.optimizer):
        task = store.variables.task
        raise InvalidArgumentError(
            f"{task}: rows of a table are int64 ids [n], and an array [n, ...] for "
            f"each of {len(leaves)} leaves, got "
            f"{[f'{x.dtype.name}{list(x.shape)}' for x in message.arrays]!r:.200}"
        )
    pairs = list(zip(leaves, values, strict=True))
    rows = {leaf: x for leaf, x in pairs if leaf.rows}
    others = {leaf: x for leaf, x in pairs if not leaf.rows}
    kinds = {
        leaf: Kind(x.dtype, x.shape[1:] if leaf.rows else x.shape, "what was sent")
        for leaf, x in (rows | others).items()
    }

    def read(loading: TableLoading) -> None:
        loading.add(ids, rows)
        for leaf, value in others.items():
            loading.put(leaf, value)

    key, replaces = message.key, message.replaces
    return TableLoading(store, key, kinds, read, replaces, sent=message)


@final
class TableFile:
    """Tensors of one file whose rows belong to the same ids; or slots without rows, if
    ``ids`` is "". Used on the disk thread."""

    def __init__(
        self, path: str, reader: TensorReader, ids: str, disk: DiskThread
    ) -> None:
        self._path, self._reader, self._ids, self._disk = path, reader, ids, disk
        self._names: dict[TableLeaf, str] = {}
        self.kinds: dict[TableLeaf, Kind] = {}
        self._count = 0
        if ids:
            info = reader.info(ids)
            if info.numpy_dtype != np.int64 or len(info.shape) != 1:
                raise InvalidArgumentError(
                    f"{ids!r} of {path}: expected int64 ids [n], got {info}"
                )
            (self._count,) = info.shape

    def add(self, tensor: TableTensor) -> None:
        """Adds a tensor.

        Raises:
            NotFoundError: The file has no such tensor.
            InvalidArgumentError: The tensor does not have one row for each id.
        """
        info = self._reader.info(tensor.name)
        what, shape = f"{tensor.name!r} of {self._path}", info.shape
        if self._ids:
            if shape[:1] != (self._count,):
                raise InvalidArgumentError(
                    f"{what}, {info}: expected a row for each of {self._count} ids of "
                    f"{self._ids!r}"
                )
            shape = shape[1:]
        leaf = TableLeaf(tensor.optimizer, tensor.leaf, bool(self._ids))
        if not leaf.optimizer and leaf not in _OWN:
            raise InvalidArgumentError(f"{what} is not a value of a table, nor a slot")
        if self._names and {*_APART} & {leaf, *self._names}:
            raise InvalidArgumentError(f"{what}: its ids are not those of rows")
        self._names[leaf] = tensor.name
        self.kinds[leaf] = Kind(info.numpy_dtype, shape, what)

    def add_to(self, loading: TableLoading, first: int, last: int) -> None:
        """Adds the rows in the buckets from ``first`` to before ``last`` to a table."""
        # Without ids there are no buckets to choose by.
        if not self._ids:
            for leaf, kind in self.kinds.items():
                value = np.empty(kind.shape, kind.dtype)
                self._read(self._names[leaf], 0, value)
                loading.put(leaf, value)
            return
        width = sum(
            kind.dtype.itemsize * int(np.prod(kind.shape, dtype=np.int64))
            for kind in self.kinds.values()
        )
        size = max(1, _BLOCK // max(1, width))
        for start in range(0, self._count, size):
            self._add_block(loading, start, min(size, self._count - start), first, last)

    def _add_block(
        self, loading: TableLoading, start: int, count: int, first: int, last: int
    ) -> None:
        ids = np.empty(count, np.int64)
        self._read(self._ids, start, ids)
        # A file has the rows of all buckets, and this server wants some.
        buckets = buckets_of(hashes_of(ids))
        wanted = np.flatnonzero((buckets >= first) & (buckets < last))
        if not wanted.size:
            return
        rows = {}
        for leaf, kind in self.kinds.items():
            values = np.empty((count, *kind.shape), kind.dtype)
            self._read(self._names[leaf], start, values)
            rows[leaf] = values if wanted.size == count else values[wanted]
        loading.add(ids[wanted], rows)

    def _read(self, name: str, start: int, out: np.ndarray) -> None:
        with self._disk.blamed(self._path, "reading"):
            self._reader.read_into(name, start, out)
