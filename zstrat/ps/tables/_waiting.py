"""Ids that wait for admission to a table: they were pushed, and have no row yet.

Each is counted once for a push that names it, and is admitted by the push that makes
the count full. Counts are exact, as only pushes that are applied are counted, and each
of these once.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np

from ._growing_cell import GrowingCell, drop_rows
from ._index import NO_ROW, IdIndex

WAITING: Final = ".waiting"
COUNTS: Final = ".counts"
"""What ids that wait, and their counts, are called beside a value."""


class Counted(NamedTuple):
    """What one push has changed: ids that began to wait, and the places of others that
    have one more count. ``admitted``: which ids of the push are born."""

    began: np.ndarray
    places: np.ndarray
    admitted: np.ndarray


@final
class WaitingIds:
    """The ids of one table that wait for their push number ``count``.

    ``ids`` are int64 ``[n]``, and ``counts`` int32 ``[n]``, in any order.
    """

    def __init__(self, count: int, who: str) -> None:
        self._count = count
        self.ids = GrowingCell((), np.dtype(np.int64))
        self.counts = GrowingCell((), np.dtype(np.int32))
        self.ids.who, self.counts.who = f"{who}, {WAITING}", f"{who}, {COUNTS}"
        self._index: IdIndex | None = IdIndex()

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def nbytes(self) -> int:
        indexed = 0 if self._index is None else self._index.nbytes
        return self.ids.nbytes + self.counts.nbytes + indexed

    @property
    def index(self) -> IdIndex:
        """The places of ids. Cost: after `forget_index`, that of all ids."""
        if self._index is None:
            index, ids = IdIndex(), self.ids.look()
            index.insert(ids, np.arange(len(ids)))
            self._index = index
        return self._index

    def forget_index(self) -> None:
        """Notes that ``ids`` was written by others."""
        self._index = None

    def count(self, ids: np.ndarray) -> Counted:
        """Counts a push of distinct ids ``[n]`` that have no rows. Ids that are
        admitted wait until they are dropped.

        Raises:
            ResourceExhaustedError: There is no memory for more; nothing has changed.
        """
        places = self.index.rows(ids)
        known = np.flatnonzero(places != NO_ROW)
        counts = np.ones(len(ids), np.int64)
        counts[known] += self.counts.look().take(places.take(known))
        admitted = counts >= self._count
        is_new = (places == NO_ROW) & ~admitted
        more = places[(places != NO_ROW) & ~admitted]
        began = ids[is_new]
        self._append(began, np.ones(len(began), np.int32))
        self._add(more, 1)
        return Counted(began, more, admitted)

    def undo(self, counted: Counted) -> None:
        """Takes a count back; the last one first."""
        self._add(counted.places, -1)
        self.index.remove(counted.began)
        height = len(self) - len(counted.began)
        self.ids.shrink(height)
        self.counts.shrink(height)

    def drop(self, ids: np.ndarray) -> None:
        """Forgets ids, of which some may be absent."""
        places = self.index.remove(np.unique(ids))
        drop_rows(
            self.index, self.ids, [self.ids, self.counts], places[places != NO_ROW]
        )

    def put(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """Sets the counts of distinct ids."""
        self.drop(ids)
        self._append(ids, counts)

    def _append(self, ids: np.ndarray, counts: np.ndarray) -> None:
        if len(ids):
            height = len(self)
            self.ids.extend(len(ids))[...] = ids
            self.counts.extend(len(ids))[...] = counts
            self.index.insert(ids, np.arange(height, height + len(ids)))

    def _add(self, places: np.ndarray, number: int) -> None:
        if len(places):
            self.counts.begin_rows(places)[places] += number
            self.counts.settle()
