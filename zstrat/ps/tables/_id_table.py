"""What a table of any id is beside its value: which id each row has, and how the row of
an id begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import numpy as np

from zstrat.ids import IdGenerator
from zstrat.ps.engine._arithmetic import gather

from ._growing_cell import GrowingCell
from ._index import NO_ROW, IdIndex

if TYPE_CHECKING:
    from zstrat.initializers import Initializer
    from zstrat.wire import TableEntry

IDS: Final = ".ids"
"""What the ids of the rows are called, beside a value, where a slot has its name."""

_IDS_OF: Final = ", ids"
_ID: Final = np.dtype(np.int64)


@final
class IdTable:
    """The ids of the rows of one variable.

    ``ids`` is int64 ``[height]``, the id of each row, and is copied and pinned as a
    slot; ``index`` has the same the other way round, and is made again from it.

    Args:
        code: The pickled ``initializer``.
        who: Names the table in errors.
    """

    def __init__(
        self, entry: TableEntry, code: bytes, initializer: Initializer, who: str
    ) -> None:
        self.entry, self.code, self._initializer = entry, code, initializer
        self.ids = GrowingCell((), _ID)
        self.ids.who = f"{who}{_IDS_OF}"
        self.births = self.removed = 0
        """Rows that were born, and removed, since the session was opened."""
        self._index: IdIndex | None = IdIndex()

    @property
    def index(self) -> IdIndex:
        """Cost: after `forget_index`, that of all ids."""
        if self._index is None:
            index, ids = IdIndex(), self.ids.look()
            index.insert(ids, np.arange(len(ids)))
            self._index = index
        return self._index

    @property
    def index_bytes(self) -> int:
        return 0 if self._index is None else self._index.nbytes

    def empty(self) -> IdTable:
        """Returns the same table without rows, which may take its place."""
        who = self.ids.who.removesuffix(_IDS_OF)
        other = IdTable(self.entry, self.code, self._initializer, who)
        other.births, other.removed = self.births, self.removed
        return other

    def forget_index(self) -> None:
        """Notes that ``ids`` was written by others."""
        self._index = None

    def first_rows(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Writes the rows with which these ids begin to ``out``, ``[n, *row]``."""
        if len(ids):
            self._initializer.rows(IdGenerator(self.entry.seed, ids), out)

    def read(self, value: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Returns a copy of the rows of ids, in their order; where there is none, what
        it would begin with. Changes nothing.

        Args:
            value: The variable's, ``[height, *row]``.
        """
        rows = self.index.rows(ids)
        unknown = np.flatnonzero(rows == NO_ROW)
        if not unknown.size:
            return gather(value, rows)
        out = np.empty((len(ids), *value.shape[1:]), value.dtype)
        known = np.flatnonzero(rows != NO_ROW)
        if known.size:
            out[known] = gather(value, rows.take(known))
        first = np.empty((len(unknown), *value.shape[1:]), value.dtype)
        self.first_rows(ids.take(unknown), first)
        out[unknown] = first
        return out
