"""Which rows an index wants, and the index that then picks from these rows alone.

Numpy's indexing, but for arrays of integers (`sparse_read` is the word for those): the
part of the index that speaks of the first axis is found and replaced by one that speaks
of the rows that were fetched, everything else stays. So the result is numpy's own.
Decides without I/O.
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
"""Rows of one component: ``start:stop:step`` with a positive step, or indices."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What an index wants of an array: ``rows`` of its first axis, growing (a range, or
    indices), and of these put together what ``index`` picks."""

    rows: range | np.ndarray
    index: tuple[Any, ...]

    def pieces(self, table: Table) -> list[tuple[int, Rows]]:
        """The rows of each component that has some."""
        if isinstance(self.rows, range):
            found = enumerate(_within(self.rows, table.offsets.tolist()))
            return [(n, rows) for n, rows in found if rows is not None]
        return [(piece.component, piece.local) for piece in table.pieces(self.rows)]


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """What ``array[index]`` wants of an array of this shape, which has a first axis.

    Raises:
        TypeError: The index, or a bound of a slice, is an array or no index at all.
        IndexError: It is out of bounds, or for more axes than there are.
        ValueError: The step of a slice is zero.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [_checked(part) for part in parts]
    place = _first(parts, shape)
    if not any(isinstance(part, np.ndarray) for part in parts):
        # Numpy's own complaints, on an array without memory.
        _ = np.broadcast_to(np.empty((), np.bool_), shape)[tuple(parts)]
    if place is None:
        return Selection(range(shape[0]), tuple(parts))
    part = parts[place]
    rows: range | np.ndarray
    match part:
        case slice():
            rows = range(*part.indices(shape[0]))
            parts[place] = slice(None, None, 1 if rows.step > 0 else -1)
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
    """The place of what is said of the first axis; None if nothing is."""
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
    rows = np.flatnonzero(mask.reshape(len(mask), math.prod(mask.shape[1:])).any(1))
    return rows, mask[rows]


def _checked(part: Any) -> Any:
    """A part of an index: an int, a slice of ints, None, Ellipsis, or a mask."""
    if part is None or isinstance(part, EllipsisType):
        return part
    if isinstance(part, slice):
        bounds = (part.start, part.stop, part.step)
        return slice(*(None if bound is None else _integer(bound) for bound in bounds))
    if isinstance(part, np.ndarray | list) and (mask := _mask(part)) is not None:
        return mask
    return _integer(part)


def _mask(part: Any) -> np.ndarray | None:
    array = np.asarray(part)
    return array if array.dtype == np.bool_ and array.ndim else None


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
    """Which of the rows are between each two offsets, counted from the first one."""
    found: list[slice | None] = []
    for start, stop in itertools.pairwise(offsets):
        skipped = max(0, -(-(start - rows.start) // rows.step))
        first, end = rows.start + skipped * rows.step, min(stop, rows.stop)
        inside = first < end
        found.append(slice(first - start, end - start, rows.step) if inside else None)
    return found
