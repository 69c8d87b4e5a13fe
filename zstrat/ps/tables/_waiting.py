"""Ids that wait for admission to a table, each with the number of pushes that named it.

A waiting id was pushed, and has no row yet. Each push that names the id adds one to its
count, and the id gets a row with the push that makes the count reach the table's limit.
Only pushes that are applied are counted, and each of these once. `WaitingIds` counts
exactly, `Sketch` approximately in a fixed number of bytes.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple, final

import numpy as np

from zstrat.ids import buckets_of, hashes_of, mixed

from ._growing_cell import GrowingCell, drop_rows
from ._index import NO_ROW, IdIndex


class IndexedIds:
    """Distinct ids in an array, with an index that finds the position of an id.

    ``ids``, int64 ``[n]``, are copied and pinned as a slot is; ``index`` is made again
    when other code has written the ids.
    """

    def __init__(self) -> None:
        self.ids = GrowingCell((), np.dtype(np.int64))
        self._index: IdIndex | None = IdIndex()

    @property
    def index(self) -> IdIndex:
        """The index from ids to positions. After `forget_index` it is made again, which
        takes time for all ids."""
        # Made when it is asked for: ids may be written in many parts.
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
        """Drops the index, because other code has written ``ids``."""
        self._index = None


class IdNumbers(IndexedIds):
    """Distinct ids, each with numbers: ``ids`` are int64 ``[n]``, in any order, and
    ``numbers`` ``[n, *row]``. Both are copied and pinned as slots are.

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
        """Bytes of ids, index and numbers."""
        return super().nbytes + self.numbers.nbytes

    def append(self, ids: np.ndarray, numbers: np.ndarray | int) -> None:
        """Adds distinct ids that are not there yet, with their numbers.

        Raises:
            ResourceExhaustedError: There is no memory for the ids; nothing has changed.
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
        # Last: until then nothing refers to the new places.
        new[...] = ids

    def add(self, places: np.ndarray, number: int) -> None:
        """Adds ``number`` to the numbers at distinct positions."""
        if len(places):
            self.numbers.begin_rows(places)[places] += number
            self.numbers.settle()

    def drop(self, ids: np.ndarray) -> None:
        """Removes ids with their numbers; ignores ids that are not there."""
        places = self.index.remove(np.unique(ids))
        holes = places[places != NO_ROW]
        drop_rows(self.index, self.ids, [self.ids, self.numbers], holes)

    def put(self, ids: np.ndarray, numbers: np.ndarray | int) -> None:
        """Sets the numbers of distinct ids; adds ids that are not there yet."""
        IdNumbers.drop(self, ids)  # not what a `Sketch` makes of it
        self.append(ids, numbers)

    def clear(self) -> None:
        """Removes all ids, in constant time."""
        self.shrink(0)
        self._index = IdIndex()

    def shrink(self, height: int) -> None:
        """Removes the ids from position ``height`` on, which are not in the index any
        longer."""
        for cell in self.ids, self.numbers:
            if cell.shape[0] > height:
                cell.shrink(height)


WAITING: Final = ".waiting"
COUNTS: Final = ".counts"
"""The name of the counts of waiting ids, among the arrays that a copy or a snapshot has
besides the value."""


class Counted(NamedTuple):
    """What the count of one push has changed, for `WaitingIds.undo`: ids that began to
    wait, and positions of other ids whose count has grown by one. ``admitted``: which
    ids of the push get a row."""

    began: np.ndarray
    places: np.ndarray
    admitted: np.ndarray


@final
class WaitingIds(IdNumbers):
    """The waiting ids of one table. Each gets a row with the push number ``count`` that
    names it; its number is how many pushes have named it so far."""

    def __init__(self, count: int, who: str) -> None:
        super().__init__(np.int32, f"{who}, {WAITING}")
        self._count = count

    def count(self, ids: np.ndarray) -> Counted:
        """Counts one push of distinct ids ``[n]`` that have no rows. Ids that are
        admitted keep waiting until `drop`.

        Raises:
            ResourceExhaustedError: There is no memory for more ids; nothing has
                changed.
        """
        places = self.index.rows(ids)
        is_known = places != NO_ROW
        counts = np.ones(len(ids), np.int64)
        counts[is_known] += self.numbers.look().take(places[is_known])
        admitted = counts >= self._count
        began, more = ids[~is_known & ~admitted], places[is_known & ~admitted]
        # Those that are admitted now get rows: they are dropped from here, not counted.
        self.append(began, 1)
        self.add(more, 1)
        return Counted(began, more, admitted)

    def undo(self, counted: Counted) -> None:
        """Reverts a count. Revert several counts in reverse order."""
        self.add(counted.places, -1)
        # They are the last ones, as counts are undone in the opposite order.
        self.index.remove(counted.began)
        self.shrink(len(self) - len(counted.began))

    @property
    def waiting(self) -> int:
        """Number of ids that wait."""
        return len(self)

    def least(self, first: int, last: int, left: int) -> np.ndarray:
        """Returns the ids with the least counts in the buckets from ``first`` to before
        ``last``: all ids there but ``left``."""
        ids, places = self.index.items(first, last)
        return ids.take(least(self.numbers.look().take(places), len(ids) - left))


def least(keys: np.ndarray, count: int) -> np.ndarray:
    """Returns the positions of the ``count`` least keys; of equal keys, the first
    ones."""
    if count <= 0:
        return np.empty(0, np.intp)
    if count >= len(keys):
        return np.arange(len(keys))
    # `partition` finds the bound without sorting all keys.
    bound = np.partition(keys, count - 1)[count - 1]
    less = np.flatnonzero(keys < bound)
    equal = np.flatnonzero(keys == bound)[: count - len(less)]
    return np.concatenate([less, equal])


_HASHES: Final = 4
"""Number of counters of an id, one in each quarter of the counters of its bucket."""

_SAMPLE: Final = 64
"""Number of counters of a bucket from which it is estimated how many are not zero; the
estimated share is off by about 0.06."""


class Sketched(NamedTuple):
    """What the count of one push has changed, for `Sketch.undo`: buckets that got
    counters; counters ``[n, 4]`` that were raised, with their values before; and then
    buckets whose counters were halved, with their values before. ``admitted``: which
    ids of the push get a row."""

    began: np.ndarray
    at: np.ndarray
    before: np.ndarray
    halved: np.ndarray
    whole: np.ndarray
    admitted: np.ndarray


@final
class Sketch(IdNumbers):
    """Approximate counts of ids in a fixed number of bytes: a count-min sketch [Cormode
    and Muthukrishnan 2005] for each bucket of ids, so that a bucket is saved and moved
    with its counts. ``numbers`` are uint8 ``[n, width]``, one row of counters for each
    bucket in which any id was counted; an id of the bucket stands for it in ``ids``.

    The count of an id is the least of its four counters, and a push raises only those
    that are less than the new count [Estan and Varghese 2002]. So a count is never too
    small; it is too large if other ids share all four counters. When more than half of
    the counters of a bucket are not zero, all of them are halved [Einziger et al.
    2017]: so at most one id of 16 has a count that is too large, and old pushes are
    forgotten.

    Args:
        width: The number of counters of a bucket, a multiple of four.
    """

    def __init__(self, count: int, width: int, who: str) -> None:
        super().__init__(np.uint8, f"{who}, {WAITING}", (width,))
        self._count, self._width = count, width

    @property
    def waiting(self) -> int:
        return 0  # it does not know

    def count(self, ids: np.ndarray) -> Sketched:
        """Counts one push of distinct ids ``[n]`` that have no rows.

        Raises:
            ResourceExhaustedError: There is no memory for the counters of new buckets;
                nothing has changed.
        """
        hashes = hashes_of(ids)
        buckets, bucket = np.unique(buckets_of(hashes), return_inverse=True)
        names = _names().take(buckets)
        # A bucket that begins has counters of 0, under an id that stands for the
        # bucket.
        began = names[self.index.rows(names) == NO_ROW]
        self.append(began, 0)
        places = self.index.rows(names)
        counters = self.numbers.begin_rows(places)
        flat = counters.reshape(-1)
        at = (places * self._width).take(bucket)[:, None] + self._columns(hashes)
        counts = flat[at].min(axis=1, initial=255).astype(np.intp) + 1
        admitted = counts >= self._count
        at = at[~admitted]
        before = flat[at]
        wanted = counts[~admitted].astype(np.uint8)[:, None]
        # `maximum.at`, as two ids may share a counter.
        np.maximum.at(flat, at, np.broadcast_to(wanted, at.shape))
        # Afterwards: what the next push finds is never too full.
        used = np.count_nonzero(counters[places, :_SAMPLE], axis=1)
        halved = places[used * 2 > _SAMPLE]
        whole = counters[halved]
        counters[halved] = whole >> 1
        self.numbers.settle()
        return Sketched(began, at, before, halved, whole, admitted)

    def undo(self, counted: Sketched) -> None:
        """Reverts a count. Revert several counts in reverse order."""
        rows = np.unique(np.append(counted.at // self._width, counted.halved))
        counters = self.numbers.begin_rows(rows)
        # In this order: counters were raised first, and their buckets halved after
        # that.
        counters[counted.halved] = counted.whole
        counters.reshape(-1)[counted.at] = counted.before
        self.numbers.settle()
        self.index.remove(counted.began)
        self.shrink(len(self) - len(counted.began))

    def drop(self, ids: np.ndarray) -> None:
        """Does nothing, because counters are shared by several ids."""

    def least(self, first: int, last: int, left: int) -> np.ndarray:
        """Returns no ids, because a sketch does not have the ids that it counts."""
        return np.empty(0, np.int64)

    def _columns(self, hashes: np.ndarray) -> np.ndarray:
        """Returns the positions of the counters of each id in the row of its bucket,
        ``[n, 4]``."""
        quarter = np.uint64(self._width // _HASHES)
        # The same in each table: one restores the counts of another.
        words = mixed(mixed(hashes)[:, None] ^ np.arange(2, dtype=np.uint64))
        halves = words[:, :, None] >> np.array([0, 32], np.uint64) & np.uint64(
            2**32 - 1
        )
        columns = halves.reshape(-1, _HASHES) * quarter >> np.uint64(32)
        return (columns + np.arange(_HASHES, dtype=np.uint64) * quarter).view(np.int64)


@functools.cache
def _names() -> np.ndarray:
    """Returns for each bucket one of its ids, which stands for the bucket."""
    ids = np.arange(2**16)
    _, first = np.unique(buckets_of(hashes_of(ids)), return_index=True)
    return ids[first]
