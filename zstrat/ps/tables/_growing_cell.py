"""A value whose rows come and go, and which stays where it is meanwhile.

Rows are dense: a new one comes after the last, and when rows are removed, others are
moved to where they were. So a value is an array at any time, of as many rows as there
are, and all that reads, copies and pins values takes it as it is.

Its memory is a `Reserve`, which grows in place: nothing is copied, and nothing filled,
but the new rows. So a pin keeps its memory, and its length: rows that come after it
are not its rows, until some of it were removed and others take their place, which are
saved for it first as any that is written.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final, final

import numpy as np

from zstrat.errors import ResourceExhaustedError
from zstrat.memory import HUGE_PAGE, Reserve, available_bytes
from zstrat.ps.engine._arithmetic import as_rows
from zstrat.ps.store._cell import Buffer, Cell

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from zstrat.ps.store._pins import Pin

    from ._index import IdIndex

_ASKED_EACH: Final = 64 * 2**20
"""Bytes of growth after which it is asked whether the machine has as many again. The
memory of a reserve comes when it is written, where nothing can be refused."""

_AHEAD: Final = 8 * 2**20
"""Bytes after the last row whose memory is added before there are rows, at most."""

_RELEASED: Final = 2**20
"""Bytes beyond the last row from which they are given back to the machine."""


@final
class GrowingCell(Cell):
    """A cell of ``[height, *row]`` that `extend` and `shrink` change. It is never on
    the device, and a lease of it is a copy."""

    __slots__ = ("_asked", "_folder", "_reserve", "_row", "_width")

    grows: ClassVar[bool] = True

    def __init__(
        self,
        row: tuple[int, ...],
        dtype: np.dtype,
        height: int = 0,
        folder: Path | None = None,
    ) -> None:
        """Makes a cell whose rows are zero; in a file in ``folder``, if one is given.

        Raises:
            ResourceExhaustedError: There is no memory for them, or no room on the disk.
        """
        self._folder = folder
        self._row, self._width = row, math.prod(row)
        self._asked = 0
        try:
            self._reserve = Reserve(height * self._width, dtype, folder)
        except OSError as error:
            raise ResourceExhaustedError(
                f"rows cannot be kept in a file in {folder}: "
                f"{error.strerror or error}; check the folder (--spill, ZSTRAT_SPILL) "
                "and the room on its disk"
            ) from None
        array = self._reserve.array.reshape((height, *row))
        self._start(array.shape, dtype, Buffer(array), None)

    @property
    def is_shared(self) -> bool:
        # Nobody has a lease of this memory, so rows can always be written in place.
        return self._buffer is None

    def lease(self) -> np.ndarray:
        """Returns a copy, read-only."""
        # A view would change, as rows are moved into the places of others.
        copy = self.look().copy()
        copy.flags.writeable = False
        return copy

    def begin_rows(self, indices: np.ndarray) -> np.ndarray:
        self.require()
        buffer = self._buffer
        assert buffer is not None
        if self.is_pinned:
            for pin in self._pins:
                _save(pin, indices)
        self._writing = buffer
        return buffer.array

    def extend(self, count: int) -> np.ndarray:
        """Adds rows; returns them, to be written at once. They have any values.

        Raises:
            UnavailableError: The value was lost.
            ResourceExhaustedError: The machine has no memory for them; nothing has
                changed.
        """
        self.require()
        height = self.shape[0]
        end = height + count
        self._require_memory(end)
        # Rows come back where others were removed, which a pin may still need.
        if self.is_pinned:
            for pin in self._pins:
                _save(pin, np.arange(height, min(end, pin.shape[0])))
        before = self._reserve.array
        try:
            self._reserve.grow(end * self._width)
        except MemoryError:
            raise self._exhausted(end) from None
        # The address space was used up, and the value is elsewhere now.
        if self._pins and _address(before) != _address(self._reserve.array):
            for pin in self._pins:  # which have the old memory to themselves now
                pin.freeze(before)
            self._pins = ()
        self._resize(end)
        last = (self.nbytes + min(self.nbytes // 4, _AHEAD)) // HUGE_PAGE
        self._reserve.populate(range(self.nbytes // HUGE_PAGE + 1, last + 1))
        return self.look()[height:]

    def shrink(self, height: int) -> None:
        """Drops the rows from ``height`` on, also of a value that was lost."""
        nbytes, before = self.nbytes, self.shape[0]
        self._resize(height)
        # Not of pinned memory, which the pins still read.
        if nbytes - self.nbytes >= _RELEASED and not self.is_pinned and not self.lost:
            gone = (before - height) * self._width
            self._reserve.release(height * self._width, gone)

    def sibling(
        self, row: tuple[int, ...], dtype: np.dtype, height: int | None = None
    ) -> Cell:
        height = self.shape[0] if height is None else height
        return GrowingCell(row, dtype, height, self._folder)

    def _resize(self, height: int) -> None:
        self.shape = (height, *self._row)
        self.nbytes = height * self._width * self.dtype.itemsize
        if not self._lost:
            array = self._reserve.array[: height * self._width]
            self._buffer = Buffer(array.reshape(self.shape))

    def _require_memory(self, height: int) -> None:
        nbytes = height * self._width * self.dtype.itemsize
        if nbytes - self._asked < _ASKED_EACH or self._folder is not None:
            return
        left = available_bytes()
        if left is not None and left < nbytes - self._asked:
            raise self._exhausted(height)
        self._asked = nbytes

    def _exhausted(self, height: int) -> ResourceExhaustedError:
        what = "memory" if self._folder is None else f"room in {self._folder}"
        return ResourceExhaustedError(
            f"{self.who}: not enough {what} for {height} rows of "
            f"{self._width * self.dtype.itemsize} bytes: remove some, or use more "
            "parameter servers"
        )


def growing(cell: Cell) -> GrowingCell:
    """Returns the cell of a table, or of slots beside it, as what it is."""
    assert isinstance(cell, GrowingCell)
    return cell


def drop_rows(
    index: IdIndex, ids: GrowingCell, cells: Iterable[GrowingCell], holes: np.ndarray
) -> None:
    """Drops rows from cells, moving the last ones to where they were.

    Args:
        index: Has the rows of all ids but those that are dropped.
        ids: Which of the cells has the ids of the rows.
        holes: The rows, distinct, in any order.
    """
    if not holes.size:
        return
    height = ids.shape[0] - len(holes)
    is_hole = np.zeros(len(holes), bool)  # of the rows after the last that stays
    is_hole[holes[holes >= height] - height] = True
    sources = np.flatnonzero(~is_hole) + height
    targets = np.sort(holes[holes < height])
    # The index first: it finds rows by their ids, which move next.
    if targets.size:
        index.move(ids.look().take(sources), targets)
    for cell in cells:
        if targets.size:
            # `begin_rows`, so that pins save what these rows had.
            values = as_rows(cell.begin_rows(targets))
            values[targets] = values.take(sources)
            cell.settle()
        cell.shrink(height)


def _save(pin: Pin, rows: np.ndarray) -> None:
    """Keeps those of some rows that a pin has."""
    inside = rows < pin.shape[0]
    pin.save(rows if inside.all() else rows[inside])


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
