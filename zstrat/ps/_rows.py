"""Rows of a table, in bulk: read, written, made distinct, and packed for a program.

A row moves as one element: numpy copies elements of 256 bytes by `memmove`, and rows of
64 floats by a loop over the floats, which takes twice as long. So tables are seen as
vectors of opaque rows (`as_rows`), whatever their dtype.

A program of XLA's is compiled for a number of rows, so updates are cut and padded to
few numbers (`bucket`), and rows of several tables that have the same shape share one
call (`pack`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.rows import runs, sums

if TYPE_CHECKING:
    from collections.abc import Sequence

CALL_BYTES: Final = 512 * 1024
"""Rows that one call of a program takes. What it reads and writes (of Adam, seven times
as much) then stays in the cache between gathering, computing and scattering; a call
costs 30 us, a tenth of what it does with so many."""

FEWEST: Final = 16
"""Rows below which a smaller program is not faster."""


def as_rows(array: np.ndarray) -> np.ndarray:
    """The rows ``[n]`` of a C-order ``array`` of ``[n, ...]``, each one an opaque
    element: a view (unless they are empty and there is nothing to see)."""
    count = len(array)
    if not array.nbytes:
        return np.zeros(count, "V1")
    if array.ndim != 2:
        array = array.reshape(count, -1)
    return array.view(_opaque(array.nbytes // count))[:, 0]


@lru_cache(maxsize=1024)
def _opaque(width: int) -> np.dtype:
    return np.dtype((np.void, width))


def gather(table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """A copy of the rows ``indices`` ([n] of intp, all inside), in their order."""
    out = np.empty((len(indices), *table.shape[1:]), table.dtype)
    if out.size:
        # Clipping, because numpy buffers ``out`` when it has to be able to refuse.
        as_rows(table).take(indices, out=as_rows(out), mode="clip")
    return out


def are_increasing(indices: np.ndarray) -> bool:
    """Whether each one is larger than the one before: sorted and distinct."""
    return bool((indices[1:] > indices[:-1]).all())


def distinct(indices: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices sorted, each one once, with the sum of its rows."""
    found = runs(indices)
    return found.unique, sums(found, rows)


def bucket(rows: int, most: int) -> int:
    """The least of 16, 24, 32, 48, 64, ... (at most ``most``) that is not below
    ``rows``: a third of the padding at worst, two programs per doubling."""
    size = max(rows, min(FEWEST, most))
    power = 1 << (size - 1).bit_length()
    if size <= power * 3 // 4:
        power = power * 3 // 4
    return min(power, most)


def sizes(rows: int, most: int) -> list[int]:
    """Buckets of the calls that so many rows need (`pack`), which are full but for the
    last one. Behind a full call it is an eighth of one at least: a smaller program
    saves next to nothing there, and to compile it takes as long as a hundred calls.
    """
    calls, rest = divmod(rows, most)
    if not calls:
        return [bucket(rows, most)]
    last = [bucket(max(rest, most // 8), most)] if rest else []
    return [most] * calls + last


class RowRun(NamedTuple):
    """Rows ``start`` to ``stop`` of the update number ``update``."""

    update: int
    start: int
    stop: int


def pack(counts: Sequence[int], most: int) -> list[list[RowRun]]:
    """Fills calls of at most ``most`` rows with updates of so many rows each, in order.

    At least one call, though it may be empty: an update of no rows counts as well.
    """
    calls: list[list[RowRun]] = [[]]
    room = most
    for update, count in enumerate(counts):
        start = 0
        while start < count:
            if not room:
                calls.append([])
                room = most
            stop = min(count, start + room)
            calls[-1].append(RowRun(update, start, stop))
            room -= stop - start
            start = stop
    return calls
