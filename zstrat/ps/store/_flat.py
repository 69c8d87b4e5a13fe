"""Values of several small variables side by side, as one program has left them.

A `Flat` is one immutable array, and each cell has a `Part` of it in place of its own
array. The next program that updates the same cells takes the array as it is, and puts
another in its place for all of them: nothing is done for each cell, and nothing copied.
A read of a cell returns a view, which keeps the array of its time.

A cell that is changed by itself takes another value and leaves the flat. What remains
of the flat then only holds the memory of values that are gone; `Flat.shrink` frees it.
"""

from __future__ import annotations

import contextlib
import weakref
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class PartHolder(Protocol):
    """The properties of a `Cell` that a flat uses."""

    shape: tuple[int, ...]
    device: object
    """The value, if it is a part of a flat; or anything else."""

    @property
    def size(self) -> int:
        """Number of elements."""
        ...

    def take_back(self, value: object) -> None:
        """Takes another value."""
        ...


@final
class Part:
    """The elements from ``start`` to before ``stop`` of a flat: the value of a cell."""

    __slots__ = ("__weakref__", "_own", "_shape", "flat", "start", "stop")

    def __init__(
        self, flat: Flat, start: int, stop: int, shape: tuple[int, ...]
    ) -> None:
        self.flat: Flat | None = flat
        self.start, self.stop, self._shape = start, stop, shape
        self._own: np.ndarray | None = None

    def view(self) -> np.ndarray:
        """Returns the value, read-only. It never changes afterwards."""
        flat = self.flat
        if flat is None:
            # After `leave` has written both, in its order: first the copy, then no
            # flat.
            assert self._own is not None
            return self._own
        array = flat.array
        if not array.ndim:  # one scalar, the same for all
            return array
        return array[self.start : self.stop].reshape(self._shape)

    def leave(self) -> None:
        """Copies the value out of the flat."""
        own = self.view().copy()
        own.flags.writeable = False
        # In this order: another thread may be reading.
        self._own, self.flat = own, None


@final
class Flat:
    """The values of cells in one array ``[n]``, or a scalar that is the value of each.

    ``value`` is XLA's, ``array`` a view of it. One user at a time may change it, who
    owns all of the cells.
    """

    __slots__ = ("_parts", "array", "value")

    def __init__(self, value: Any, cells: Sequence[PartHolder]) -> None:
        """Makes ``value`` the values of the cells, in order."""
        self.become(value)
        self._parts: list[weakref.ref[Part]] = []
        stop = 0
        for cell in cells:
            start, stop = stop, stop + cell.size
            # Weak: a cell leaves by dropping its part, and is not asked again.
            part = Part(self, start, stop, cell.shape)
            cell.take_back(part)
            self._parts.append(weakref.ref(part))

    @staticmethod
    def of(cells: Sequence[PartHolder]) -> Flat | None:
        """Returns the flat that has the values of these cells, in order, and of no
        others."""
        part = cells[0].device
        flat = part.flat if isinstance(part, Part) else None
        if flat is None or len(flat._parts) != len(cells):
            return None
        # A thousand cells in every update: no line of Python for each.
        values = [cell.device for cell in cells]
        parts = [find() for find in flat._parts]
        # Of a cell that has left, both may be None.
        are_there = all(map(is_, values, parts)) and None not in parts
        return flat if are_there else None

    def become(self, value: Any) -> None:
        """Puts new values in place of all."""
        # The parts stay: they are ranges, and find the new array by their flat.
        self.value: Any = value
        self.array: np.ndarray = np.asarray(value)

    def shrink(self) -> None:
        """Gives the memory of values that went elsewhere back, if it is half of it and
        there is memory for the others: the update that calls this is made already."""
        left = [part for find in self._parts if (part := find()) is not None]
        if 2 * sum([part.stop - part.start for part in left]) < self.array.size:
            with contextlib.suppress(MemoryError):
                for part in left:
                    part.leave()
