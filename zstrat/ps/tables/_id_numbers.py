"""Ids of a table with their index, and a number for each of some, which come and go."""

from __future__ import annotations

import numpy as np

from ._growing_cell import GrowingCell, drop_rows
from ._index import NO_ROW, IdIndex


class IndexedIds:
    """``ids`` are distinct, int64 ``[n]``, and are copied and pinned as a slot;
    ``index`` has the same the other way round, and is made again from them."""

    def __init__(self) -> None:
        self.ids = GrowingCell((), np.dtype(np.int64))
        self._index: IdIndex | None = IdIndex()

    @property
    def index(self) -> IdIndex:
        """The places of ids. Cost: after `forget_index`, that of all ids."""
        if self._index is None:
            index, ids = IdIndex(), self.ids.look()
            index.insert(ids, np.arange(len(ids)))
            self._index = index
        return self._index

    @property
    def nbytes(self) -> int:
        """Bytes of the ids and the index."""
        return self.ids.nbytes + (0 if self._index is None else self._index.nbytes)

    def forget_index(self) -> None:
        """Notes that ``ids`` was written by others."""
        self._index = None


class IdNumbers(IndexedIds):
    """``ids`` are int64 ``[n]``, in any order, and ``numbers`` ``[n, *row]``. Both are
    copied and pinned as slots; an index of them is made again when they were written
    so.

    Args:
        who: Names the table in errors.
    """

    def __init__(self, dtype: type, who: str, row: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.numbers = GrowingCell(row, np.dtype(dtype))
        self.ids.who = self.numbers.who = who

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of ids, index, and numbers."""
        return super().nbytes + self.numbers.nbytes

    def append(self, ids: np.ndarray, numbers: np.ndarray | int) -> None:
        """Adds distinct ids that are absent.

        Raises:
            ResourceExhaustedError: There is no memory for them; nothing has changed.
        """
        if not len(ids):
            return
        height = len(self)
        new = self.ids.extend(len(ids))
        try:
            self.numbers.extend(len(ids))[...] = numbers
            self.index.insert(ids, np.arange(height, height + len(ids)))
        except BaseException:  # to the caller
            self.shrink(height)
            raise
        new[...] = ids

    def add(self, places: np.ndarray, number: int) -> None:
        """Adds to the numbers at distinct places."""
        if len(places):
            self.numbers.begin_rows(places)[places] += number
            self.numbers.settle()

    def drop(self, ids: np.ndarray) -> None:
        """Forgets ids, of which some may be absent."""
        places = self.index.remove(np.unique(ids))
        holes = places[places != NO_ROW]
        drop_rows(self.index, self.ids, [self.ids, self.numbers], holes)

    def put(self, ids: np.ndarray, numbers: np.ndarray | int) -> None:
        """Sets the numbers of distinct ids."""
        IdNumbers.drop(self, ids)  # not what a `Sketch` makes of it
        self.append(ids, numbers)

    def clear(self) -> None:
        """Forgets all ids. Cost: none."""
        self.shrink(0)
        self._index = IdIndex()

    def shrink(self, height: int) -> None:
        """Drops the last ones, which are not in the index."""
        for cell in self.ids, self.numbers:
            if cell.shape[0] > height:
                cell.shrink(height)
