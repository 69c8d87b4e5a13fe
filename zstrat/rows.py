"""Rows named by their indices: sorted once, duplicates found and summed in bulk.

Gradients of embedding rows name some rows several times, and `np.add.at` and
`np.unique` on them cost as much as all the rest of a step. One sort of index and
position together answers every question that is asked of a batch of indices: which
rows, where each of them stands, and which sums.

numpy alone: this is used where jax is not loaded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

_ROUNDS: Final = 16
"""Duplicates of one index that are added round by round over all indices; what is
beyond (a few hot rows) is summed per index."""


class Runs(NamedTuple):
    """The positions of equal indices, grouped.

    Those of ``unique[i]`` stand at ``order[starts[i] : starts[i] + counts[i]]``, in
    their first order. ``unique`` grows strictly.
    """

    unique: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @property
    def are_distinct(self) -> bool:
        """Whether no index was there twice."""
        return len(self.unique) == len(self.order)

    def inverse(self) -> np.ndarray:
        """Returns ``[n]`` with ``unique[inverse] == indices``."""
        inverse = np.empty(len(self.order), np.intp)
        inverse[self.order] = np.repeat(np.arange(len(self.unique)), self.counts)
        return inverse


def runs(indices: np.ndarray) -> Runs:
    """Sorts indices ``[n]`` of any integer dtype, none of them negative."""
    bits = len(indices).bit_length()
    if not len(indices):
        none = np.empty(0, np.intp)
        return Runs(indices.astype(np.intp), none, none, none)
    indices = indices.astype(np.intp, copy=False)
    if int(indices.max()) < 2 ** (63 - bits):
        # Index and position in one number: sorting that is four times as fast as
        # a stable argsort.
        keyed = indices << bits
        keyed |= np.arange(len(indices))
        keyed.sort()
        order = keyed & (2**bits - 1)
        keyed >>= bits
        ordered = keyed
    else:
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
    first = np.empty(len(ordered), bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    counts = np.empty(len(starts), np.intp)
    np.subtract(starts[1:], starts[:-1], out=counts[:-1])
    counts[-1] = len(ordered) - starts[-1]
    return Runs(ordered.take(starts), order, starts, counts)


def hashed_runs(ids: np.ndarray, hashes: np.ndarray) -> Runs:
    """Groups equal ids ``[n]`` of int64; ``unique`` ascends by the hash, uint64, of
    which different ids have different ones."""
    bits = len(ids).bit_length()
    if not len(ids):
        none = np.empty(0, np.intp)
        return Runs(ids, none, none, none)
    # Upper bits of the hash and position in one number, as in `runs`.
    position = np.uint64(2**bits - 1)
    keyed = hashes & ~position
    keyed |= np.arange(len(ids), dtype=np.uint64)
    keyed.sort()
    order = (keyed & position).view(np.int64)
    keyed &= ~position
    ordered = ids.take(order)
    first = np.empty(len(ids), bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    if np.any(first[1:] & (keyed[1:] == keyed[:-1])):  # by chance, of different ids
        order = np.argsort(hashes, kind="stable")
        ordered = ids.take(order)
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=len(ids))
    return Runs(ordered.take(starts), order, starts, counts)


def sums(found: Runs, rows: np.ndarray) -> np.ndarray:
    """Returns the sum of the rows of each index, ``[unique, ...]``; below 32 bits in
    float32, rounded once."""
    small = rows.dtype.kind in "fV" and rows.dtype.itemsize < 4
    dtype = np.dtype(np.float32) if small else rows.dtype
    total = _rows(rows, found.order.take(found.starts)).astype(dtype, copy=False)
    if found.are_distinct:
        return total.astype(rows.dtype, copy=False)
    with np.errstate(all="ignore"):  # what is too large is inf, which the caller sees
        for turn in range(1, min(int(found.counts.max()), _ROUNDS)):
            some = np.flatnonzero(found.counts > turn)
            total[some] += _rows(rows, found.order[found.starts[some] + turn])
        for hot in np.flatnonzero(found.counts > _ROUNDS):
            start = found.starts[hot] + _ROUNDS
            end = found.starts[hot] + found.counts[hot]
            total[hot] += rows[found.order[start:end]].sum(axis=0, dtype=total.dtype)
        return total.astype(rows.dtype, copy=False)


def divided(values: np.ndarray, found: Runs, rows: np.ndarray) -> np.ndarray:
    """Divides integers ``[unique, ...]`` by the rows of their index, one after the
    other, and cuts them off towards zero each time, as XLA and TensorFlow do."""
    new = values.copy()
    for turn in range(int(found.counts.max(initial=0))):
        some = np.flatnonzero(found.counts > turn)
        divisor = rows[found.order[found.starts[some] + turn]]
        dividend = new[some]
        # `//` rounds down, and this is to round towards zero.
        quotient = dividend // divisor
        inexact = quotient * divisor != dividend
        quotient += (inexact & ((dividend < 0) != (divisor < 0))).astype(new.dtype)
        new[some] = quotient
    return new


def _rows(rows: np.ndarray, at: np.ndarray) -> np.ndarray:
    # Ten times as fast as an index, and clipped because numpy need not look then.
    taken: np.ndarray = rows.take(at, 0, mode="clip")
    return taken
