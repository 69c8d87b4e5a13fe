"""Pins: the value of a cell as it was at one moment, while updates of the cell
continue.

A pin costs nothing when it is made. It refers to the memory of its cell, and the cell
calls the pin before it changes that memory:

*rows are written in place*: the old rows are first copied to an undo log (`Pin.save`),
    unless they are in the log already, or are not needed any longer;
*the cell moves on to other memory*, because a dense update of a pinned cell writes to
    other memory: the old memory belongs to the pin from then on, and is *frozen*
    (`Pin.freeze`).

Law: **memory of the pin, patched with its log, is the pinned value, at any time that
the cell is not being written.** So a reader copies a piece between two updates of the
cell (for which it gets exclusive use of the variable), or at any time once the pin is
frozen.

No threads and no I/O. The code that updates the cell calls `save` and `freeze`; the
owner of the snapshot calls the rest.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from zstrat.errors import NotFoundError, ResourceExhaustedError, ZstratError

WIDEST: Final = 2**20
"""Bytes of a row above which old rows are not logged: an update of such rows writes to
other memory instead, so that no row is longer than a piece of a file."""

_BLOCK: Final = 16 * 2**20
"""Bytes of the log that are allocated at a time; the system provides them page by page.
There should be few blocks, because a piece is patched from every block that has rows of
it."""


class UndoLog:
    """Copies of old rows of a table with ``[rows]`` opaque elements, in the order in
    which they were saved."""

    __slots__ = ("_blocks", "_count", "_most", "_places")

    def __init__(self, table: np.ndarray) -> None:
        # Zeros cost no memory until they are written.
        self._places = np.zeros(len(table), np.int32 if len(table) < 2**31 else np.intp)
        """For each row of the table, its index in the log, from 1 on; 0 if the row is
        not in the log."""
        self._blocks: list[np.ndarray] = []
        self._most = min(len(table), max(1, _BLOCK // table.dtype.itemsize))
        self._count = 0

    @property
    def nbytes(self) -> int:
        used = self._count * self._blocks[0].dtype.itemsize if self._blocks else 0
        return used + self._places.nbytes

    def add(self, table: np.ndarray, rows: np.ndarray) -> None:
        """Copies those of ``rows`` ([n], in range, may repeat) that are not in the log
        yet."""
        rows = rows[self._places[rows] == 0]
        if not len(rows):
            return
        # The rows of most pushes are sorted and distinct already.
        if not (rows[1:] > rows[:-1]).all():
            rows = np.unique(rows)
        done = 0
        while done < len(rows):
            block, at = divmod(self._count, self._most)
            if block == len(self._blocks):
                self._blocks.append(np.empty(self._most, table.dtype))
            some = rows[done : done + self._most - at]
            # Clipping, because numpy buffers ``out`` when it has to be able to refuse.
            out = self._blocks[block][at : at + len(some)]
            table.take(some, out=out, mode="clip")
            # Only now: a row that is said to be here is here, whatever failed.
            self._places[some] = np.arange(self._count + 1, self._count + 1 + len(some))
            self._count += len(some)
            done += len(some)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows in ``[start, stop)`` that are in the log."""
        return np.flatnonzero(self._places[start:stop]) + start

    def patch(self, out: np.ndarray, at: np.ndarray, rows: np.ndarray) -> None:
        """Copies the logged ``rows`` to the positions ``at`` of ``out``, a vector of
        opaque rows."""
        places = self._places[rows] - 1
        # By place, so that the rows in one block are neighbours, whatever order they
        # were asked in.
        order = np.argsort(places)
        places, at = places[order], at[order]
        for block in range(places[0] // self._most, places[-1] // self._most + 1):
            first, last = np.searchsorted(
                places, (block * self._most, (block + 1) * self._most)
            )
            found = places[first:last] - block * self._most
            out[at[first:last]] = self._blocks[block][found]

    def are_in(self, rows: np.ndarray) -> np.ndarray:
        """Returns the positions in ``rows`` of those that are in the log."""
        return np.flatnonzero(self._places.take(rows))

    def row(self, row: int) -> np.ndarray:
        """Returns the bytes of one logged row."""
        block, at = divmod(int(self._places[row]) - 1, self._most)
        return self._blocks[block][at : at + 1].view(np.uint8)


class Pin:
    """The value of a cell as it was when it was pinned.

    Args:
        base: The memory of the value, in C order.
        frozen: Nobody will ever write to this memory.
    """

    __slots__ = (
        "_bytes",
        "_first",
        "_gone",
        "_log",
        "dtype",
        "is_frozen",
        "is_over",
        "nbytes",
        "shape",
        "width",
    )

    def __init__(self, base: np.ndarray, *, frozen: bool) -> None:
        self.shape, self.dtype, self.nbytes = base.shape, base.dtype, base.nbytes
        self.width = base.dtype.itemsize * math.prod(base.shape[1:])
        """Bytes of one row; of a scalar, all its bytes."""
        self._bytes: np.ndarray | None = _bytes(base)
        self._log: UndoLog | None = None
        self._first = 0
        """Rows before this one are not needed any longer, and are not logged."""
        self._gone: ZstratError = NotFoundError(
            "the snapshot of this value is gone: it was written or released already"
        )
        self.is_frozen = frozen
        self.is_over = False
        """Set by `release`; the cell then drops the pin."""

    @property
    def logs_rows(self) -> bool:
        """Whether rows may be written in place after a call of `save`."""
        return 0 < self.width <= WIDEST

    @property
    def log_bytes(self) -> int:
        log = self._log  # once: it may be released on another thread meanwhile
        return 0 if log is None else log.nbytes

    def save(self, rows: np.ndarray) -> None:
        """Copies old rows ([n], in range, may repeat) that are about to be overwritten
        to the undo log."""
        # Once: it may be released on another thread meanwhile.
        base, log = self._bytes, self._log
        if base is None:
            return
        table = base.view(np.dtype((np.void, self.width)))
        if self._first:
            rows = rows[rows >= self._first]
        try:
            if log is None:
                log = self._log = UndoLog(table)
            log.add(table, rows)
        except MemoryError:
            # The update is not to blame, and continues.
            self._gone = ResourceExhaustedError(
                "the snapshot of this value is gone: there was no memory for the rows "
                "that changed since it was taken"
            )
            self.release()

    def freeze(self, base: np.ndarray) -> None:
        """Takes over the memory ``base``, which nobody writes to any longer, because
        the value has moved to other memory."""
        if self._bytes is not None:
            self._bytes = _bytes(base)
        self.is_frozen = True

    def copy(self, start: int, out: np.ndarray) -> None:
        """Fills ``out`` (uint8 [n]) with the bytes of the pinned value from ``start``.

        Raises:
            NotFoundError: The bytes are no longer kept (`forget`, `release`).
            ResourceExhaustedError: There was no memory to save overwritten rows.
        """
        stop = start + len(out)
        # Patched after it was copied, since the memory may have newer rows.
        np.copyto(out, self._kept(start, stop))
        if self._log is not None and len(out):
            self._patch(self._log, start, stop, out)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Returns some rows ([n], in range) of the pinned value, uint8 ``[n * width]``.

        Raises: As `copy`.
        """
        table = self._kept(0, self.nbytes).view(np.dtype((np.void, self.width)))
        found = table.take(rows, mode="clip")
        log = self._log
        if log is not None and len(logged := log.are_in(rows)):
            log.patch(found, logged, rows[logged])
        return found.view(np.uint8)

    def require(self) -> None:
        """Raises as `copy` does, if any part of the value is no longer kept."""
        self._kept(0, 0)

    def view(self, start: int, stop: int) -> np.ndarray | None:
        """Returns the bytes ``[start, stop)`` of the pinned value without a copy; None
        if an update has changed them in memory, or still may.

        Raises: As `copy`.
        """
        base = self._kept(start, stop)
        if not self.is_frozen or self._is_patched(start, stop):
            return None
        # A view of the pin's own memory, which the caller must not write to.
        base.flags.writeable = False
        return base

    def forget(self, stop: int) -> None:
        """Stops keeping the bytes before ``stop``: their rows are no longer logged."""
        if stop >= self.nbytes:
            self.release()
        elif self.width:
            # Whole rows only: the rest of a row that is cut is still wanted.
            self._first = stop // self.width

    def release(self) -> None:
        """Releases the pinned value, and frees its memory."""
        self.is_over = True
        # The cell finds `is_over` at its next update; the memory goes now.
        self._bytes = self._log = None

    def _kept(self, start: int, stop: int) -> np.ndarray:
        if self._bytes is None or start < self._first * self.width:
            raise self._gone
        return self._bytes[start:stop]

    def _is_patched(self, start: int, stop: int) -> bool:
        if self._log is None or start == stop:
            return False
        return len(self._log.rows(start // self.width, -(-stop // self.width))) > 0

    def _patch(self, log: UndoLog, start: int, stop: int, out: np.ndarray) -> None:
        width = self.width
        rows = log.rows(start // width, -(-stop // width))
        first, last = -(-start // width), stop // width
        # All at once; only rows that an end of the piece cuts need bytes of their own.
        whole = rows[(rows >= first) & (rows < last)]
        if len(whole):
            inside = out[first * width - start : last * width - start]
            opaque = inside.view(np.dtype((np.void, width)))
            log.patch(opaque, whole - first, whole)
        for row in rows[(rows < first) | (rows >= last)]:  # cut by an end: two at most
            low, high = max(start, row * width), min(stop, (row + 1) * width)
            part = log.row(row)[low - row * width : high - row * width]
            out[low - start : high - start] = part


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, order="C").reshape(-1).view(np.uint8)
