"""Ids that wait for admission to a table: they were pushed, and have no row yet.

Each is counted once for a push that names it, and is admitted by the push that makes
the count full. Counts are exact, as only pushes that are applied are counted, and each
of these once.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np

from ._id_numbers import IdNumbers
from ._index import NO_ROW

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
class WaitingIds(IdNumbers):
    """The ids of one table that wait for their push number ``count``; the numbers are
    those of their pushes so far."""

    def __init__(self, count: int, who: str) -> None:
        super().__init__(np.int32, f"{who}, {WAITING}")
        self._count = count

    def count(self, ids: np.ndarray) -> Counted:
        """Counts a push of distinct ids ``[n]`` that have no rows. Ids that are
        admitted wait until they are dropped.

        Raises:
            ResourceExhaustedError: There is no memory for more; nothing has changed.
        """
        places = self.index.rows(ids)
        is_known = places != NO_ROW
        counts = np.ones(len(ids), np.int64)
        counts[is_known] += self.numbers.look().take(places[is_known])
        admitted = counts >= self._count
        began, more = ids[~is_known & ~admitted], places[is_known & ~admitted]
        self.append(began, 1)
        self.add(more, 1)
        return Counted(began, more, admitted)

    def undo(self, counted: Counted) -> None:
        """Takes a count back; the last one first."""
        self.add(counted.places, -1)
        self.index.remove(counted.began)
        self.shrink(len(self) - len(counted.began))
