"""Batches of row indices: sorted once, with duplicates grouped and their rows summed.

Gradients of embedding rows name some rows several times, and `np.add.at` and
`np.unique` on their indices cost as much as the rest of a step. Here, one sort of all
pairs of index and position answers all questions about a batch: which rows occur, at
which positions each occurs, and what the rows of each index sum to.

Needs only numpy, as it is used where jax is not loaded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

_ROUNDS: Final = 16
"""The first so many duplicates of each index are added in rounds, one of every index
per round; further ones, of a few frequent rows, are summed per index."""


class Runs(NamedTuple):
    """The positions of equal indices in an array of indices, grouped.

    The positions of ``unique[i]`` are ``order[starts[i] : starts[i] + counts[i]]``, in
    ascending order. ``unique`` has each index once: ascending, or in the order of the
    hashes for `hashed_runs`.
    """

    unique: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @property
    def are_distinct(self) -> bool:
        """Whether no index occurs twice."""
        return len(self.unique) == len(self.order)

    def inverse(self) -> np.ndarray:
        """Returns ``[n]`` with ``unique[inverse] == indices``, the array that was
        grouped."""
        inverse = np.empty(len(self.order), np.intp)
        inverse[self.order] = np.repeat(np.arange(len(self.unique)), self.counts)
        return inverse


def runs(indices: np.ndarray) -> Runs:
    """Groups equal indices of an array ``[n]`` of any integer dtype, none of them
    negative."""
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
    """Groups equal ids of an array ``[n]``, int64. ``unique`` is sorted by ``hashes``,
    uint64, which are different for different ids."""
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
    """Returns the sum of the ``rows`` of each index, ``[unique, ...]``. Floats below 32
    bits are summed in float32 and rounded once.

    Args:
        found: The indices of ``rows``, grouped.
    """
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
    """Divides integers ``values``, ``[unique, ...]``, by all ``rows`` of their index,
    one after the other; each quotient is truncated towards zero, as in XLA and
    TensorFlow."""
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
