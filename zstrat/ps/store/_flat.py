"""Flats: the values of several small variables in one array, as one program has left
them.

A `Flat` is one immutable array, and each cell has a `Part` of it in place of its own
array. The next program that updates the same cells takes the array as it is, and
replaces it by another one for all cells at once: no code runs for each cell, and
nothing is copied. A read of a cell returns a view, which keeps alive the array of that
moment.

A cell that is changed alone gets another value and leaves the flat. The flat then still
holds the memory of the value that left; `Flat.shrink` frees that.
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
    """The part that is the value, if it is in a flat; otherwise anything else."""

    @property
    def size(self) -> int:
        """Number of elements."""
        ...

    def take_back(self, value: object) -> None:
        """Makes ``value`` the value of the cell."""
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
        """Returns the value, read-only. The returned array never changes."""
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
        """Copies the value out of the flat, and makes the copy the value of the
        cell."""
        own = self.view().copy()
        own.flags.writeable = False
        # In this order: another thread may be reading.
        self._own, self.flat = own, None


@final
class Flat:
    """The values of several cells concatenated in one array ``[n]``, or one scalar that
    is the value of each.

    ``value`` is an array of XLA, ``array`` a view of it. One user at a time may change
    the flat, who owns all its cells.
    """

    __slots__ = ("_parts", "array", "value")

    def __init__(self, value: Any, cells: Sequence[PartHolder]) -> None:
        """Makes ``value``, the concatenated values of ``cells`` in order, the value of
        all of them."""
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
        """Returns the flat that has the values of exactly these cells, in order; None
        if there is none."""
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
        """Replaces the values of all cells by those in ``value``."""
        # The parts stay: they are ranges, and find the new array by their flat.
        self.value: Any = value
        self.array: np.ndarray = np.asarray(value)

    def shrink(self) -> None:
        """Frees the memory of values that have left, if it is more than half of the
        flat: copies the remaining values out. Does nothing if there is no memory for
        the copies, as the update that calls this is already done."""
        left = [part for find in self._parts if (part := find()) is not None]
        if 2 * sum([part.stop - part.start for part in left]) < self.array.size:
            with contextlib.suppress(MemoryError):
                for part in left:
                    part.leave()
