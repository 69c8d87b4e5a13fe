"""Cells whose rows are added and removed, while the memory of the others stays where it
is.

Rows are dense: a new row is added after the last, and when rows are removed, the last
rows are moved to fill the holes. So the value is always an array of all rows, and code
that reads, copies and pins values needs no change.

The memory is a `Reserve`, which grows in place: only the new rows are written, and
nothing is copied. So a pin keeps its memory, and its length: rows that are added later
do not belong to the pinned value. A pinned row whose place another row takes is saved
for the pin first, as any row that is overwritten.
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
"""Bytes of growth after which the machine is asked whether it has as much memory again.
The memory of a reserve is allocated when it is written, at which time a lack of memory
cannot be refused."""

_AHEAD: Final = 8 * 2**20
"""The most bytes of memory after the last row that are allocated before there are rows
for them."""

_RELEASED: Final = 2**20
"""Bytes of memory after the last row from which on that memory is given back to the
machine."""


@final
class GrowingCell(Cell):
    """A cell of ``[height, *row]`` to which `extend` adds rows and from which `shrink`
    removes them. It is never on the device, and its lease is a copy."""

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
            ResourceExhaustedError: There is no memory for the rows, or no room on the
                disk.
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
        """Returns a read-only copy of the value."""
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
        """Adds ``count`` rows and returns them, with any content; write them at once.

        Raises:
            UnavailableError: The value was lost.
            ResourceExhaustedError: The machine has no memory for the rows; nothing has
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
        """Removes the rows from ``height`` on, even if the value was lost."""
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
    """Returns the cell of a table, or of its slots, typed as a `GrowingCell`."""
    assert isinstance(cell, GrowingCell)
    return cell


def drop_rows(
    index: IdIndex, ids: GrowingCell, cells: Iterable[GrowingCell], holes: np.ndarray
) -> None:
    """Removes rows from cells, moving the last rows to fill the holes.

    Args:
        index: The index of the ids, from which those of the removed rows were removed
            already.
        ids: That of the cells which has the ids of the rows.
        holes: The rows to remove, distinct, in any order.
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
    """Saves those of ``rows`` that belong to the pinned value."""
    inside = rows < pin.shape[0]
    pin.save(rows if inside.all() else rows[inside])


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
