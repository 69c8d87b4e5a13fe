"""Pinned rows of a table in an order of their own: by bucket, and then by id.

In which order a table has its rows depends on all that happened to it. Saved in this
order, equal tables are equal bytes, and a server that wants some buckets finds them
side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from zstrat.ids import buckets_of, hashes_of

if TYPE_CHECKING:
    from zstrat.ps.store._pins import Pin


@final
class RowOrder:
    """The order of the rows of one table, which `sort` finds once ``ids`` were copied:
    their pin, int64 ``[n]``. ``chosen``: these rows alone; None: all."""

    def __init__(self, ids: Pin, chosen: np.ndarray | None = None) -> None:
        self.ids, self._chosen = ids, chosen
        self.count = ids.shape[0] if chosen is None else len(chosen)
        self._rows: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        return self._rows is not None

    def sort(self, ids: np.ndarray) -> None:
        """Finds the order, from the ids that were pinned; on any thread."""
        chosen = self._chosen
        if chosen is not None:
            ids = ids[chosen]
        order = np.lexsort((ids, buckets_of(hashes_of(ids))))
        self._rows = order if chosen is None else chosen[order]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows that are ``start`` to ``stop`` in this order."""
        assert self._rows is not None, "rows() before sort()"
        return self._rows[start:stop]


@final
class SortedPin:
    """A `Pin` whose rows are in an order that is known before the first is copied."""

    def __init__(self, pin: Pin, order: RowOrder) -> None:
        self._pin, self._order = pin, order
        self.width = pin.width
        self.nbytes = order.count * pin.width

    @property
    def is_frozen(self) -> bool:
        return self._pin.is_frozen

    @property
    def log_bytes(self) -> int:
        return self._pin.log_bytes

    def copy(self, start: int, out: np.ndarray) -> None:
        """See `Pin.copy`."""
        if not len(out):
            self.require()
            return
        first = start // self.width
        last = -(-(start + len(out)) // self.width)
        found = self._pin.gather(self._order.rows(first, last))
        at = start - first * self.width
        np.copyto(out, found[at : at + len(out)])

    def require(self) -> None:
        """See `Pin.require`."""
        self._pin.require()

    def view(self, start: int, stop: int) -> None:
        """Returns None: rows are copied to be in order."""
        del start, stop

    def forget(self, stop: int) -> None:
        """Keeps nothing once all was copied; until then any row may be needed."""
        if stop >= self.nbytes:
            self.release()

    def release(self) -> None:
        """See `Pin.release`."""
        self._pin.release()
