"""The index of a table of any id: from ids to rows.

Each bucket of ids is an open-addressing table with linear probing, in a *segment* of 2ᵏ
records of 16 bytes, the id and its row side by side, so that a lookup misses the cache
once. All ids of a request are looked up together, round by round: in the first each id
looks at its first record, then those that were not found at several more. If the ids
are sorted by their hash, the lookups walk through the memory in order, which costs half
as much as in random order.

Growth: a bucket whose segment is full moves to a segment twice as large. Buckets differ
in how full they may be, by a factor of two, so that they grow one after the other, and
no request pays for the whole table. All segments of one size are neighbours, in the
order of buckets, so that a bucket's segment follows from its size alone: bucket b has
the records from (BUCKETS + b) · 2ᵏ. Segments that are not used are address space
without memory, and the memory of all segments of a size is given back when the last
bucket has left them.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from zstrat.ids import BUCKETS, buckets_of, hashes_of
from zstrat.memory import HUGE_PAGE, Reserve

NO_ROW: Final = -1
"""Stands for the row of an id that is not in the table."""

_SMALLEST: Final = 3
"""The k of the segment of an empty bucket, which has 2ᵏ records."""

_REMOVED: Final = -1
"""Marks a removed record, in place of its row: records after it may still be reached
through it."""

_RECORD: Final = np.dtype(np.complex128)
"""The dtype as which numpy copies a record: no other type of 16 bytes is copied as
fast."""


_AT_ONCE: Final = 1024
"""Number of records that a round reads if few ids are left: reading them takes as long
as starting the round."""

_NEAR: Final = 15 / 16
"""How full a bucket is, as a share of its limit, when memory for its next segment is
allocated."""

_PERIOD: Final = 512
"""Number of buckets after which their limits repeat. Neighbours grow one after the
other, so that their segments use the same page of memory, which costs more than they
do; and a server that has few buckets has some of each limit."""


def _limits() -> np.ndarray:
    """Returns how full the segment of each bucket may be, between 0.35 and 0.7. The
    limits are equally spaced in the logarithm, because sizes double: at any time as
    many buckets are about to grow as at any other.

    The number 73 makes the eight periods reach a new page of memory one after the
    other, whatever the size of a segment. A page of 2 MiB takes 0.1 ms to 5 ms; if all
    periods reached one at the same insertion, that insertion would wait for all of
    them.
    """
    buckets = np.arange(BUCKETS)
    steps = (buckets + 73 * (buckets // _PERIOD)) % _PERIOD / _PERIOD
    limits: np.ndarray = 0.35 * 2.0**steps
    return limits


_LIMITS: Final = _limits()


@final
class IdIndex:
    """The index of one table: the row of each id. One user at a time: no locks.

    All methods take distinct ids ``[n]`` of int64, in any order.
    """

    def __init__(self) -> None:
        # Address space alone: memory comes when records are written.
        self._memory = Reserve(_end(_SMALLEST), _RECORD)
        self._shifts = np.full(BUCKETS, _SMALLEST)
        self._most = (2**self._shifts * _LIMITS).astype(np.int64)
        self._used = np.zeros(BUCKETS, np.int64)
        """By bucket, the number of records that are not empty; this includes removed
        records."""

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return int((1 << self._shifts).sum()) * _RECORD.itemsize

    def most(self, first: int, last: int) -> int:
        """Returns the most ids that the buckets from ``first`` to before ``last`` may
        have."""
        return int(self._used[first:last].sum())

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the row of each id, int64; `NO_ROW` for ids that are not in the
        index."""
        return self._find(ids)[1]

    def insert(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Adds ids that are not in the index, with their rows (int64, not negative).

        Raises:
            MemoryError: There is no address space left; nothing was added.
        """
        hashes = hashes_of(ids)
        buckets = buckets_of(hashes)
        added = np.bincount(buckets, minlength=BUCKETS)
        full = np.flatnonzero(self._used + added > self._most)
        if full.size:
            self._grow(full, added[full])
        # Marks are rows + 1: 0 is a record that was never used.
        self._put(ids, rows + 1, hashes, buckets)

    def remove(self, ids: np.ndarray) -> np.ndarray:
        """Removes ids; returns the row that each of them had, `NO_ROW` for ids that
        were not in the index."""
        at, rows = self._find(ids)
        # The id stays in its record: inserted again, it lands there or before.
        self._words[at[rows >= 0], 1] = _REMOVED
        return rows

    def move(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Changes the rows (int64) of ids that are in the index."""
        at, _ = self._find(ids)
        self._words[at, 1] = rows + 1

    def items(
        self, first: int = 0, last: int = BUCKETS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and rows of the buckets from ``first`` to before ``last``, sorted
        by bucket and then by id."""
        ids, marks, buckets = self._records(np.arange(first, last))
        order = np.lexsort((ids, buckets))
        return ids[order], marks[order] - 1

    @property
    def _words(self) -> np.ndarray:
        return self._memory.array.view(np.int64).reshape(-1, 2)

    def _pairs(self, at: np.ndarray) -> np.ndarray:
        """Returns copies of the records ``at``, ``[n, 2]``: ids, and rows + 1."""
        pairs: np.ndarray = self._memory.array.take(at).view(np.int64).reshape(-1, 2)
        return pairs

    def _find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each id, the number of the record at which its search ended, and
        its row."""
        hashes = hashes_of(ids).view(np.int64)
        starts, masks = self._segments(buckets_of(hashes.view(np.uint64)))
        at = hashes & masks
        at += starts
        pairs = self._pairs(at)
        rows = pairs[:, 1] - 1
        # Nearly all are found, or known to be absent, at their first record.
        left = np.flatnonzero((pairs[:, 0] != ids) & (rows != NO_ROW))
        first = 1
        while left.size:
            # Fewer ids look at more records at once, so that each round costs about as
            # much.
            width = 1 + _AT_ONCE // len(left)
            steps = np.arange(first, first + width)
            here = hashes.take(left)[:, None] + steps
            here &= masks.take(left)[:, None]
            here += starts.take(left)[:, None]
            pairs = self._pairs(here.ravel())
            found = pairs[:, 0].reshape(here.shape) == ids.take(left)[:, None]
            found |= pairs[:, 1].reshape(here.shape) == 0
            # `argmax` finds the first that ends the search, if any does.
            ends = np.arange(0, here.size, width) + found.argmax(1)
            at[left] = here.ravel().take(ends)
            rows[left] = pairs[:, 1].take(ends) - 1
            left = left[~found.ravel().take(ends)]
            first += width
        # The removed record of the id itself, which is not in the table.
        np.maximum(rows, NO_ROW, out=rows)
        return at, rows

    def _segments(self, buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each bucket, the number of the first record of its segment, and
        the size of the segment - 1."""
        shifts = self._shifts.take(buckets)
        starts = buckets + BUCKETS
        starts <<= shifts
        return starts, (1 << shifts) - 1

    def _put(
        self,
        ids: np.ndarray,
        marks: np.ndarray,
        hashes: np.ndarray,
        buckets: np.ndarray,
    ) -> None:
        """Writes records of ids that are not in the index into segments that have
        room."""
        words = self._words
        starts, masks = self._segments(buckets)
        places = hashes.view(np.int64)
        # Round by round, as in `_find`: ids whose record is taken try the next one.
        while ids.size:
            at = (places & masks) + starts
            before = words[at, 1]
            free = np.flatnonzero(before <= 0)
            # Two ids may want one record: the one that is written last has it.
            here, own = at.take(free), ids.take(free)
            words[here, 0] = own
            has = words[here, 0] == own
            here, free = here[has], free[has]
            words[here, 1] = marks.take(free)
            # A removed record was counted when it was first used.
            fresh = free[before.take(free) == 0]
            self._used += np.bincount(buckets.take(fresh), minlength=BUCKETS)
            if len(free) == len(ids):
                return
            is_left = np.ones(len(ids), bool)
            is_left[free] = False
            left = np.flatnonzero(is_left)
            ids, marks, buckets = ids.take(left), marks.take(left), buckets.take(left)
            starts, masks = starts.take(left), masks.take(left)
            places = places.take(left) + 1

    def _records(
        self, buckets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ids, marks (rows + 1) and buckets of all records that these buckets
        have."""
        starts, masks = self._segments(buckets)
        sizes = masks + 1
        ends = np.cumsum(sizes)
        at = np.arange(int(ends[-1]) if len(ends) else 0)
        at += np.repeat(starts - (ends - sizes), sizes)
        pairs = self._pairs(at)
        live = np.flatnonzero(pairs[:, 1] > 0)
        owners = np.repeat(buckets, sizes).take(live)
        return pairs[:, 0].take(live), pairs[:, 1].take(live), owners

    def _grow(self, buckets: np.ndarray, added: np.ndarray) -> None:
        """Moves buckets to larger segments, with room for ``added`` more ids each."""
        ids, marks, owners = self._records(buckets)
        live = np.bincount(owners, minlength=BUCKETS)[buckets]
        # An eighth more: else a bucket of which as much is removed as is added would
        # move at each request.
        needed = np.maximum((live + added) * 1.125 / _LIMITS[buckets], 1.0)
        shifts = np.maximum(np.ceil(np.log2(needed)).astype(np.int64), _SMALLEST)
        # Memory before anything moves: if there is none, nothing has changed.
        self._memory.grow(_end(int(shifts.max())))
        before = self._shifts[buckets]
        words = self._words
        starts, masks = self._segments(buckets)
        # A segment that was in use before has old records in it.
        for start, stop in zip(
            starts.tolist(), (starts + masks + 1).tolist(), strict=True
        ):
            words[start:stop] = 0
        self._shifts[buckets] = shifts
        self._most[buckets] = (2**shifts * _LIMITS[buckets]).astype(np.int64)
        # Removed records are left behind, so only live ones count.
        self._used[buckets] = 0
        self._put(ids, marks, hashes_of(ids), owners)
        for shift in set(before.tolist()) - set(self._shifts.tolist()):
            self._memory.release(BUCKETS << shift, BUCKETS << shift)
        # The next segments of buckets that are nearly full, before a push has to wait
        # for them.
        near = np.flatnonzero(self._used > self._most * _NEAR)
        starts = (near + BUCKETS << self._shifts.take(near) + 1) * _RECORD.itemsize
        self._memory.populate(np.unique(starts // HUGE_PAGE).tolist())


def _end(shift: int) -> int:
    """Returns the number of records up to the end of the last segment of ``2**shift``
    records."""
    return 2 * BUCKETS << shift
