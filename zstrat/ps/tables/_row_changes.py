"""Changes of the rows of a table by one push: rows that are added (born), evicted and
removed.

Before any value is written, the ids in all updates of a push are converted to rows
(`RowChanges.rows_of`), in the order of the updates. An id without a row gets a new row
at the end of the table, with its initial value and the initial slots of each optimizer.
An id that is removed has no row for the updates that follow. Its old row stays
unchanged until the whole push was applied: then the last rows of the table are moved to
fill the holes (`finish`), so that rows are dense again. If the push fails before,
`undo` reverts all changes.

An eviction removes the rows that a rule chooses, among the rows of some buckets: a
program that evicts from a few buckets at a time never holds a table up for long.
Evictions are logged as ids, so that a backup need not choose again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from zstrat.ids import BUCKETS
from zstrat.ps.engine._arithmetic import gather
from zstrat.wire import EvictionRule

from ._growing_cell import drop_rows, growing
from ._index import NO_ROW
from ._waiting import least

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.ps.engine._engine import OptimizerEngine
    from zstrat.ps.engine._slots import HeldVariable

    from ._growing_cell import GrowingCell
    from ._id_table import IdTable
    from ._waiting import Counted, Sketched


_RULES: Final = {int(rule): rule for rule in EvictionRule}
_OF_USES: Final = frozenset(EvictionRule) - {EvictionRule.NORM, EvictionRule.WAITING}
_BLOCK: Final = 2**20
"""Number of elements of rows whose norms are computed at a time."""


class Eviction(NamedTuple):
    """An eviction: its rule, the limit of the rule, and the buckets from ``first`` to
    before ``last`` in which it is applied."""

    rule: EvictionRule
    limit: float
    first: int
    last: int

    @classmethod
    def of(cls, operand: np.ndarray, table: IdTable, who: str) -> Eviction:
        """Decodes an eviction from the operand of an update, float64 [4].

        Raises:
            InvalidArgumentError: The operand is not an eviction, or the table does not
                note the uses or times that its rule needs.
        """
        if operand.dtype != np.float64 or operand.shape != (4,):
            raise InvalidArgumentError(
                f"{who} expects a rule, its limit, the first bucket and the end of the "
                f"last, float64 of shape (4,), got {operand.dtype.name} of shape "
                f"{operand.shape}"
            )
        number, limit, first, last = operand.tolist()
        rule = _RULES.get(number)
        is_limit = limit >= 0 or (rule is EvictionRule.AGE and math.isfinite(limit))
        if rule is None or not (0 <= first <= last <= BUCKETS and is_limit):
            raise InvalidArgumentError(
                f"{who} expects one of {sorted(_RULES)}, a limit that is not negative, "
                f"and buckets from 0 to {BUCKETS}, got {operand.tolist()}"
            )
        if rule in _OF_USES and table.uses is None:
            raise InvalidArgumentError(
                f"{who}: the table does not note when its rows are used, so that "
                f"{rule.name} is not known: create it with eviction="
            )
        return cls(rule, limit, int(first), int(last))

    def ids(self, held: HeldVariable, table: IdTable) -> np.ndarray:
        """Returns the ids that the rule chooses for removal."""
        if self.rule is EvictionRule.WAITING:
            if table.waiting is None:
                return np.empty(0, np.int64)
            left = int(min(self.limit, 2.0**62))
            return table.waiting.least(self.first, self.last, left)
        ids, rows = table.index.items(self.first, self.last)
        if self.rule is EvictionRule.NORM:
            short = _norms(held.cell.look(), rows) < self.limit
            return ids.compress(short)
        assert table.uses is not None
        uses = table.uses.look()
        if self.rule is EvictionRule.UNUSED:
            ages: np.ndarray = table.now - uses[:, 0].take(rows).astype(np.int64)
            return ids.compress(ages >= self.limit)
        if self.rule is EvictionRule.AGE:
            last = uses[:, 0].take(rows).astype(np.int64)
            return ids.compress(last <= table.clock_at(self.limit))
        # Of the two columns of `uses`, the last gradient and the number of them.
        column = 0 if self.rule is EvictionRule.RECENT else 1
        # All may stay: a limit may be infinite.
        left = int(min(self.limit, len(ids)))
        gone = least(uses[:, column].take(rows), len(ids) - left)
        return ids.take(gone)


def _norms(value: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the Euclidean norm of each of the given rows."""
    width = int(np.prod(value.shape[1:], dtype=np.int64))
    # In blocks, as the copies have 64 bits.
    size, found = max(1, _BLOCK // width), [np.empty(0)]
    for start in range(0, len(rows), size):
        block = gather(value, rows[start : start + size]).reshape(-1, width)
        wide = np.complex128 if block.dtype.kind == "c" else np.float64
        found.append(np.linalg.norm(block.astype(wide), axis=1))
    return np.concatenate(found)


_NONE: Final = np.empty(0, np.int64)


class _IdChange(NamedTuple):
    """Ids with their rows that an update has added to the index, or removed from it."""

    is_birth: bool
    ids: np.ndarray
    rows: np.ndarray


@final
class RowChanges:
    """The changes of the rows of the table ``held`` by one push, whose request has
    exclusive use of the table and of the optimizers that its updates name."""

    def __init__(self, held: HeldVariable, table: IdTable) -> None:
        self._held, self._table = held, table
        self._height = held.cell.shape[0]
        self._changes: list[_IdChange] = []
        self._counted: list[Counted | Sketched] = []
        self._named: list[np.ndarray] = []
        """Ids that earlier updates of the same push have counted as waiting."""
        self._refused = 0
        self._trained: list[np.ndarray] = []
        self._written: list[np.ndarray] = []
        self._forgotten = -1
        self._times: list[tuple[float, float]] = []
        self._dropped: list[np.ndarray] = []

    def rows_of(
        self, ids: np.ndarray, engine: OptimizerEngine, *, begins: bool = True
    ) -> np.ndarray:
        """Returns the rows of ids ``[n]`` (may repeat), int64. Ids without a row get a
        new one.

        Args:
            begins: Whether new rows get their initial values; otherwise they have any
                content, and the caller writes them.

        Raises:
            ResourceExhaustedError: There is no memory for new rows.
            InvalidArgumentError: An optimizer cannot be applied to the table.
        """
        rows = self._table.index.rows(ids)
        # The array itself, whose gaps are filled below: `finish` notes all of its rows.
        if len(rows):
            self._written.append(rows)
        unknown = np.flatnonzero(rows == NO_ROW)
        if not unknown.size:
            return rows
        # In their order, unless some are there twice.
        new = ids.take(unknown)
        distinct, inverse = np.unique(new, return_inverse=True)
        if len(distinct) < len(new):
            first = self._born(distinct, engine, begins)
            rows[unknown] = inverse + first
        else:
            first = self._born(new, engine, begins)
            rows[unknown] = np.arange(first, first + len(new))
        return rows

    def trained_rows_of(
        self, ids: np.ndarray, engine: OptimizerEngine
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the rows of ids ``[n]`` that have gradients, distinct, int64. Ids
        without a row get a new one, or are counted until they are admitted.

        Returns:
            The rows, and which of the ids have rows: bool ``[n]``, None if all have.

        Raises: As `rows_of`.
        """
        table = self._table
        rows = table.index.rows(ids)
        unknown = np.flatnonzero(rows == NO_ROW)
        kept: np.ndarray | None = None
        if unknown.size:
            new = ids.take(unknown)
            admitted = self._admitted(new)
            if not admitted.all():
                new, unknown = new[admitted], unknown[admitted]
            if new.size:
                first = self._born(new, engine, True)
                rows[unknown] = np.arange(first, first + len(new))
            # Ids that were not admitted have no row for their gradient.
            if not admitted.all():
                kept = rows != NO_ROW
                rows = rows[kept]
        if table.uses is not None:
            self._trained.append(rows)
        if len(rows):
            self._written.append(rows)
        return rows, kept

    def _admitted(self, ids: np.ndarray) -> np.ndarray:
        """Returns which of the distinct ids, all without rows, get a row now: bool
        ``[n]``."""
        table = self._table
        admitted = table.are_lucky(ids)
        if table.waiting is not None:
            # An earlier update of the push has counted them: once for a push.
            for before in self._named:
                admitted &= ~np.isin(ids, before)
            counted = table.waiting.count(ids[admitted])
            self._counted.append(counted)
            self._named.append(ids[admitted])
            admitted[admitted] = counted.admitted
        self._refused += len(ids) - int(admitted.sum())
        return admitted

    def forget_removed(self, cut: int) -> None:
        """Forgets which ids were removed up to the change with the number ``cut``."""
        self._forgotten = max(self._forgotten, cut)

    def note_time(self, now: float, age: float) -> None:
        """Notes the present time, for eviction of rows by age."""
        self._times.append((now, age))

    def evict(self, eviction: Eviction) -> np.ndarray:
        """Removes the ids that the rule of an eviction chooses, and returns them.
        Raises as `remove`."""
        ids = eviction.ids(self._held, self._table)
        self.remove(ids)
        return ids

    def remove(self, ids: np.ndarray) -> None:
        """Removes ids ``[n]`` (may repeat) with their rows; ignores ids without a row.

        Raises:
            UnavailableError: Slots were loaded, and the tree of their optimizer is not
                known yet.
        """
        # Before anything is removed: slots that lack rows cannot be made dense with the
        # others.
        for slots in self._held.slots.values():
            for cell in slots.with_rows:
                if cell.shape[0] < self._height:
                    raise UnavailableError(
                        f"{self._held.cell.who}: rows cannot be removed before the "
                        "optimizer whose state was restored has got its tree: "
                        "zs.Optimizer(transformation, params=params)"
                    )
        ids = np.unique(ids)
        # Also those without rows, which may wait for admission.
        self._dropped.append(ids)
        rows = self._table.index.remove(ids)
        there = rows != NO_ROW
        self._changes.append(_IdChange(False, ids[there], rows[there]))

    def undo(self) -> None:
        """Reverts all changes of rows and index, because the push has failed."""
        index = self._table.index
        # Backwards, so that each change meets the index as it left it.
        for change in reversed(self._changes):
            if change.is_birth:
                index.remove(change.ids)
            else:
                index.insert(change.ids, change.rows)
        self._changes.clear()
        for counted in reversed(self._counted):
            assert self._table.waiting is not None
            self._table.waiting.undo(counted)
        # Rows that were born are the last ones; rows that were removed have not moved
        # yet.
        for cell in self._cells():
            if cell.shape[0] > self._height:
                cell.shrink(self._height)

    def finish(self) -> None:
        """Moves rows to fill the holes of removed ones, because all updates were
        applied."""
        table = self._table
        removed = [x for x in self._changes if not x.is_birth and len(x.ids)]
        table.births += sum(len(x.ids) for x in self._changes if x.is_birth)
        table.refused += self._refused
        if table.changed is not None and (removed or self._written):
            ids = [change.ids for change in removed]
            table.note_changes(self._written, np.concatenate([_NONE, *ids]))
        if self._forgotten >= 0:
            table.forget_removed(self._forgotten)
        for now, age in self._times:
            table.note_time(now, age)
        # After the times: what this push uses is younger than these.
        for rows in self._trained:
            table.note_use(rows)
        if self._dropped and table.waiting is not None:
            table.waiting.drop(np.concatenate(self._dropped))
        # Last, as all above goes by the numbers of rows as they were.
        holes = np.concatenate([_NONE, *(change.rows for change in removed)])
        table.removed += len(holes)
        drop_rows(table.index, table.ids, self._cells(), holes)

    def _born(self, ids: np.ndarray, engine: OptimizerEngine, begins: bool) -> int:
        """Adds rows for distinct ids that have none; returns the number of the first
        new row."""
        held, table = self._held, self._table
        # First: slots that were loaded take the rows for which they were.
        engine.adopt_slots(held)
        first, end = held.cell.shape[0], held.cell.shape[0] + len(ids)
        try:
            table.index.insert(ids, np.arange(first, end))
        except MemoryError as error:
            raise ResourceExhaustedError(f"{held.cell.who}: {error}") from None
        # Before what may fail from here on, so that `undo` knows of them.
        self._changes.append(_IdChange(True, ids, np.arange(first, end)))
        self._dropped.append(ids)  # they wait no longer
        table.ids.extend(len(ids))[...] = ids
        if table.uses is not None:
            # As young as a row of now, without a gradient yet.
            table.uses.extend(len(ids))[...] = table.now, 0
        if table.changed is not None:
            table.changed.extend(len(ids))[...] = 0
        values = growing(held.cell).extend(len(ids))
        if begins:
            table.first_rows(ids, values)
        # Last, as first slots may depend on the values of the rows.
        engine.extend_slots(held)
        return first

    def _cells(self) -> Iterator[GrowingCell]:
        """Yields all cells that have a row for each row of the table. Slots of an
        optimizer whose tree is not known yet may have fewer rows."""
        yield growing(self._held.cell)
        yield self._table.ids
        for cell in self._table.uses, self._table.changed:
            if cell is not None:
                yield cell
        for slots in self._held.slots.values():
            yield from map(growing, slots.with_rows)
