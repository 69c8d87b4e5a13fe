"""Indexing of a sharded variable: ``variable[index]`` fetches only the rows it needs.

Indices are those of numpy, except arrays of integers (use `sparse_read` for these).
`select` replaces the part of the index for the first axis by an index into the fetched
rows, and keeps the rest, so that numpy itself makes the result. The functions do no
I/O: they convert indices to `TablePiece` objects.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ._table import Table

Rows = slice | np.ndarray
"""Row numbers of one component: a slice ``start:stop:step`` with a positive step, or an
array of indices."""


@dataclass(frozen=True, slots=True)
class Selection:
    """An index in two steps: fetch the ``rows`` of the first axis (ascending; a range
    or an array of indices), then apply ``index`` to the fetched rows."""

    rows: range | np.ndarray
    index: tuple[Any, ...]

    def pieces(self, table: Table) -> list[tuple[int, Rows]]:
        """Splits the rows into pieces, one for each component that has some of them."""
        if isinstance(self.rows, range):
            slices = enumerate(_within(self.rows, table.offsets.tolist()))
            return [(n, rows) for n, rows in slices if rows is not None]
        return [(piece.component, piece.local) for piece in table.pieces(self.rows)]


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Splits ``array[index]``, for an array of this shape, into rows to fetch and an
    index into these rows.

    Raises:
        TypeError: The index, or a bound of a slice, is an array or not an index.
        IndexError: The index is out of bounds, or has more axes than the array.
        ValueError: The step of a slice is zero.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [_checked(part) for part in parts]
    place = _first(parts, shape)
    if not any(isinstance(part, np.ndarray) for part in parts):
        # Raises numpy's own errors, on an array without memory.
        _ = np.broadcast_to(np.empty((), np.bool_), shape)[tuple(parts)]
    if place is None:
        return Selection(range(shape[0]), tuple(parts))
    part = parts[place]
    rows: range | np.ndarray
    match part:
        case slice():
            rows = range(*part.indices(shape[0]))
            parts[place] = slice(None, None, 1 if rows.step > 0 else -1)
            # Rows are fetched in ascending order; a negative step reverses them after.
            rows = rows if rows.step > 0 else rows[::-1]
        case np.ndarray():
            rows, parts[place] = _masked(part, shape)
        case _ if -shape[0] <= part < shape[0]:
            rows = range(part % shape[0], part % shape[0] + 1)
            parts[place] = 0
        case _:
            raise IndexError(
                f"index {part} is out of bounds for axis 0 with size {shape[0]}"
            )
    return Selection(rows, tuple(parts))


def _first(parts: list[Any], shape: tuple[int, ...]) -> int | None:
    """Returns the position, among the parts of an index, of the part for the first
    axis; None if no part indexes it."""
    used = sum(
        part.ndim if isinstance(part, np.ndarray) else 1
        for part in parts
        if part is not None and part is not ...
    )
    if sum(part is ... for part in parts) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > len(shape):
        raise IndexError(
            f"too many indices for array: array is {len(shape)}-dimensional, but "
            f"{used} were indexed"
        )
    for place, part in enumerate(parts):
        # None takes no axis, nor does an ellipsis if all axes are indexed.
        if part is None or (part is ... and used == len(shape)):
            continue
        return None if part is ... else place
    return None


def _masked(mask: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    if mask.shape != shape[: mask.ndim]:
        raise IndexError(
            f"boolean index did not match indexed array: the mask has shape "
            f"{mask.shape}, the array {shape}"
        )
    # Only rows of which the mask takes something.
    rows = np.flatnonzero(mask.reshape(len(mask), math.prod(mask.shape[1:])).any(1))
    return rows, mask[rows]


def _checked(part: Any) -> Any:
    """Returns a part of an index if it is an int, a slice of ints, None, Ellipsis, or a
    mask.

    Raises:
        TypeError: The part is something else.
    """
    if part is None or isinstance(part, EllipsisType):
        return part
    if isinstance(part, slice):
        bounds = (part.start, part.stop, part.step)
        return slice(*(None if bound is None else _integer(bound) for bound in bounds))
    if isinstance(part, np.ndarray | list):
        array = np.asarray(part)
        if array.dtype == np.bool_ and array.ndim:
            return array
    return _integer(part)


def _integer(value: Any) -> int:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    raise TypeError(
        f"{type(value).__name__} is not allowed as an index of a sharded variable, nor "
        "as a bound of a slice: expected integers, slices of integers, ..., None or a "
        "mask of booleans; for rows by an array of ids use sparse_read or "
        "zs.embedding_lookup"
    )


def _within(rows: range, offsets: list[int]) -> list[slice | None]:
    """Splits a range of rows at the components' ``offsets``. Returns a slice for each
    component, relative to its offset; None if it has no such row."""
    slices: list[slice | None] = []
    for start, stop in itertools.pairwise(offsets):
        # Rows of the range that are before this component: a step may pass its start.
        skipped = max(0, -(-(start - rows.start) // rows.step))
        first, end = rows.start + skipped * rows.step, min(stop, rows.stop)
        inside = first < end
        slices.append(slice(first - start, end - start, rows.step) if inside else None)
    return slices
