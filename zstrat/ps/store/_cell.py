"""Cells: the memory of the values of variables, and the leases of readers on it.

The law: **memory that a reader can see is never written.** A reader gets the live
buffer, without a copy, as a read-only array (a *lease*); an update writes in place if
no lease is alive and into other memory (*beside* the value) if one is. How much other
memory the updates of a push need is computed before any cell is changed: `Cell.reserve`
allocates it before the first update begins.

A cell is in one of two states:

*host*: a 64-byte-aligned numpy buffer of our own, which knows whether it has readers.

*device*: an immutable value of XLA's (a `jax.Array` on the CPU), left by an optimizer.
    A lease is the view that ``np.asarray`` makes, which holds a reference on XLA's
    buffer. XLA donates (writes in place) a buffer only while nothing else refers to it
    and otherwise computes into fresh memory: its own accounting keeps the law, and the
    tests of this file hold it to that. Or the value is a part of a `Flat`, the
    concatenated values of several cells, which XLA reads.

A lease of a host buffer is a view of a *window*, an array over a read-only memoryview
of the buffer. numpy makes a view of a view point at the array that owns the memory,
which would hide views from a weak reference; but it stops at an array whose own base is
not an ndarray (``PyArray_SetBaseObject``). So every view derived from a lease, by
anybody, keeps the window alive, and one weak reference shows whether a reader has it.

XLA only reads a host buffer that it is given, and never writes to it: XLA declines
donation of memory that numpy owns. After its update the cell is in the device state,
where nobody writes the old buffer. In the other direction, a plain update computes from
the device value into a new host buffer.

A *pin* (`_pins`) keeps a value for longer than a lease, and needs less memory: updates
of rows continue in place while the pin saves the rows that they overwrite; all other
updates write to other memory.
"""

from __future__ import annotations

import math
import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from zstrat.errors import ResourceExhaustedError, UnavailableError
from zstrat.memory import lasting
from zstrat.ps.engine._arithmetic import as_rows

from ._flat import Part
from ._pins import Pin

if TYPE_CHECKING:
    from collections.abc import Iterable


class Buffer:
    """A host buffer, and the lease on it, if any reader holds one."""

    __slots__ = ("_bytes", "_rows", "_window", "array")

    def __init__(self, array: np.ndarray) -> None:
        """``array``: memory of this process alone, writable and in C order."""
        self.array = array
        # As bytes, because bfloat16 and the fp8 types have no buffer protocol.
        self._bytes = array.reshape(-1).view(np.uint8).data.toreadonly()
        self._window: weakref.ref[np.ndarray] | None = None
        self._rows: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The buffer as a vector of opaque rows (`as_rows`): a view that is made
        once."""
        if self._rows is None:
            self._rows = as_rows(self.array)
        return self._rows

    @property
    def is_leased(self) -> bool:
        return self._window is not None and self._window() is not None

    def lease(self) -> np.ndarray:
        """Returns the value, read-only and without a copy. Leases that are alive at the
        same time share one window (see the module), which is freed with the last of
        them."""
        array = self.array
        if not array.size:
            return np.empty(array.shape, array.dtype)  # frombuffer wants a byte
        window = self._window() if self._window is not None else None
        if window is None:
            # Not np.ndarray(buffer=...), which looks through the memoryview for a base.
            window = np.frombuffer(self._bytes, array.dtype)
            self._window = weakref.ref(window)
        return window.reshape(array.shape)


class Write(Enum):
    """The ways in which an update writes to a value."""

    REPLACE = "numpy writes all of it, whatever it was"
    WHOLE = "numpy computes all of it from what it was"
    ROWS = "numpy writes some rows"
    GIVE = "XLA takes it and gives another one back"


def wanted_beside(
    cell: Cell, writes: Iterable[Write], is_lost: bool, on_device: bool
) -> int:
    """Returns how many of these updates, in this order, need other memory than the
    present value's, given that before them the value ``is_lost``, or is XLA's
    (``on_device``).

    Raises:
        UnavailableError: The value was lost, and the first update does not assign a new
            one.
    """
    wanted = 0
    for write in writes:
        if write is Write.REPLACE:
            is_lost = False
        elif is_lost:
            cell.require()
        if write is Write.GIVE:
            on_device = True
            continue
        # What is beside once is our own until XLA takes it.
        beside = on_device
        if not (beside or wanted):
            rows = write is Write.ROWS
            beside = cell.is_shared or (cell.is_pinned and not rows)
        wanted += beside
        on_device = False
    return wanted


SPARE_KEPT_FOR: Final = 16
"""Number of updates in place after which the second buffer is freed: readers that
overlap updates return within a few steps, a reader that came once does not."""


class Cell:
    """The value of one variable, with copy-on-write. One user at a time: no locks.

    An update by numpy is ``source, out = begin()``, compute, ``settle()``; an update of
    some rows is ``out = begin_rows(indices)``, write those rows, ``settle()``; and an
    update by XLA is ``give()``, compute, ``take_back()``.
    """

    __slots__ = (
        "_buffer",
        "_idle",
        "_lost",
        "_pins",
        "_reserved",
        "_spare",
        "_writing",
        "device",
        "dtype",
        "nbytes",
        "shape",
        "who",
    )

    grows: ClassVar[bool] = False
    """Whether rows of the cell can be added and removed (`zstrat.ps.tables`)."""

    def __init__(self, initial: np.ndarray) -> None:
        """Makes a cell whose value is a copy of ``initial``, an array of any layout."""
        # Not `initial` itself: an array of a message is read-only memory of the
        # connection.
        array = lasting(initial.shape, initial.dtype)
        np.copyto(array, initial)
        self._start(array.shape, array.dtype, Buffer(array), None)

    @classmethod
    def around(cls, array: np.ndarray) -> Cell:
        """Makes ``array`` itself the value, without a copy.

        The array must be writable, in C order, own its memory, and nobody else may
        refer to it. If it is not aligned, XLA copies it at the first read.
        """
        cell = cls.__new__(cls)
        cell._start(array.shape, array.dtype, Buffer(array), None)
        return cell

    @classmethod
    def on_device(cls, value: Any) -> Cell:
        """Makes a cell whose value is ``value``, an immutable array of XLA, without a
        copy."""
        cell = cls.__new__(cls)
        cell._start(tuple(value.shape), np.dtype(value.dtype), None, value)
        return cell

    def _start(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        buffer: Buffer | None,
        device: object,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._buffer, self.device = buffer, device
        """``device``: the array of XLA, or the `Part` of a `Flat`, that is the value;
        None if the value is in the host buffer."""
        self.who = "a value"
        """The name of the value in errors."""
        self._spare: Buffer | None = None
        self._reserved: list[Buffer] = []
        self._writing: Buffer | None = None
        self._pins: tuple[Pin, ...] = ()
        """The pins that share the buffer with the value; empty while the value is on
        the device."""
        self._idle = 0
        self._lost = ""

    @property
    def host(self) -> np.ndarray | None:
        """The buffer that is the value now, for code that reads it and afterwards
        checks that it is still the value; None if the value is on the device, or was
        lost."""
        return None if self._buffer is None else self._buffer.array

    @property
    def lost(self) -> str:
        """Why the value was lost (`lose`); "" if it was not."""
        return self._lost

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def part(self) -> Part | None:
        """The part of a `Flat` that is the value; None if the value is not part of
        one."""
        device = self.device
        return device if isinstance(device, Part) else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of a scalar, all its bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the cell owns: the value and, if readers overlap
        updates, a second buffer."""
        return self.nbytes * (1 + (self._spare is not None) + len(self._reserved))

    @property
    def is_shared(self) -> bool:
        """Whether the next update of rows cannot work in place, because of a lease, or
        because a pin cannot save single rows."""
        buffer = self._buffer
        return buffer is None or buffer.is_leased or not self._logs_rows()

    @property
    def is_pinned(self) -> bool:
        """Whether a pin makes the next update of the whole value use other memory,
        too."""
        # Dropped here and not when they end: pins may be released on another thread.
        if self._pins:
            self._pins = tuple(pin for pin in self._pins if not pin.is_over)
        return bool(self._pins)

    def pin(self) -> Pin:
        """Returns a pin, which keeps the value as it is now until the pin is released.
        Costs nothing at first.

        Raises:
            UnavailableError: The value was lost (`lose`).
        """
        self.require()
        # A value of XLA's never changes, so there is nothing to log or to freeze later.
        if self._buffer is None:
            return Pin(self._view(), frozen=True)
        pin = Pin(self._buffer.array, frozen=False)
        self._pins = (*self._pins, pin)
        return pin

    def lease(self) -> np.ndarray:
        """Returns the value, read-only and without a copy. The returned array never
        changes."""
        if self._buffer is not None:
            return self._buffer.lease()
        return self._view()

    def reserve(self, writes: Iterable[Write]) -> None:
        """Allocates the memory that the next updates will need, in this order, so that
        none can fail for lack of it.

        Raises:
            UnavailableError: The value was lost (`lose`), and the first update does not
                assign a new one.
            ResourceExhaustedError: There is no memory in addition to that which readers
                hold.
        """
        # Counted first, so that nothing changes if a value was lost.
        on_device = self._buffer is None
        wanted = wanted_beside(self, writes, bool(self._lost), on_device)
        if wanted == len(self._reserved):
            return
        # `reserve` is called again with each further update: more is needed, or less.
        del self._reserved[wanted:]
        spare = self._spare
        if wanted and spare is not None and not spare.is_leased:
            self._reserved.append(spare)
            self._spare = None
        while len(self._reserved) < wanted:
            self._reserved.append(self._beside())

    def unreserve(self) -> None:
        """Frees the memory that `reserve` allocated and no update has begun to use."""
        self._reserved.clear()

    def require(self) -> None:
        """Raises UnavailableError if the value was lost (`lose`)."""
        if self._lost:
            raise UnavailableError(
                f"{self.who}: the value was lost when an update of it failed "
                f"({self._lost}): assign it again"
            )

    def begin(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts an update by numpy.

        Returns:
            ``(source, out)``: the value, and the array to write the new value to. They
            are the same array if no reader holds the value; otherwise ``out`` becomes
            the value by `settle`.
        """
        return self.look(), self.overwrite()

    def begin_rows(self, indices: np.ndarray) -> np.ndarray:
        """Starts an update of the rows ``indices`` ([n], in range, may repeat).

        Returns:
            The array of all rows, of which only these may be read and written; call
            `settle` afterwards.
        """
        buffer = self._buffer
        # In place, unless a reader sees this memory or a pinned row is too wide to log.
        if buffer is not None and not buffer.is_leased and self._logs_rows():
            for pin in self._pins:
                pin.save(indices)
            self._rest()
            self._writing = buffer
            return buffer.array
        source, out = self.begin()
        # The other rows, too, have to be in the memory that becomes the value.
        if out is not source:
            np.copyto(out, source)
        return out

    def rows_in_place(self) -> np.ndarray | None:
        """Returns the rows as opaque elements, which may be written in place until
        anything else is done to this cell. Replaces `begin_rows` and `settle` where
        these would have nothing to do; None where they would."""
        buffer = self._buffer
        if buffer is None or self._spare is not None or self._reserved:
            return None
        return None if buffer.is_leased or self.is_pinned else buffer.rows

    def look(self) -> np.ndarray:
        """Returns the value without a lease: valid until anything else is done to this
        cell."""
        return self._view() if self._buffer is None else self._buffer.array

    def overwrite(self) -> np.ndarray:
        """Starts an update that does not need the old value; returns the array to write
        to. End it with `settle`."""
        buffer = self._buffer
        if buffer is not None and not buffer.is_leased and not self.is_pinned:
            self._rest()
            self._writing = buffer
        else:
            spare, self._spare, self._idle = self._spare, None, 0
            # A reader of the value before the last may still look at it.
            if spare is None or spare.is_leased:
                spare = self._reserved.pop() if self._reserved else self._beside()
            self._writing = spare
        return self._writing.array

    def settle(self) -> None:
        """Ends an update: the array that `begin` returned for writing becomes the
        value."""
        assert self._writing is not None, "settle() without begin()"
        # Before it becomes the spare: pins take a lease on it, so that it is not
        # written.
        if self._buffer is not None and self._buffer is not self._writing:
            self._leave(self._buffer)
            self._spare = self._buffer
        self._buffer, self.device, self._writing = self._writing, None, None
        self._lost = ""

    def sibling(
        self, row: tuple[int, ...], dtype: np.dtype, height: int | None = None
    ) -> Cell:
        """Returns a new cell whose rows have the shape ``row`` and any content: as many
        rows as this cell, or ``height``.

        Raises:
            MemoryError: There is no memory.
        """
        rows = self.shape[:1] if height is None else (height,)
        return Cell.around(lasting((*rows, *row), dtype))

    def replace(self, array: np.ndarray) -> None:
        """Makes ``array`` the value. Nobody else may refer to the array; it is
        writable, aligned, in C order and of the value's shape and dtype. The old value
        is left to its readers."""
        if self._buffer is not None:
            self._leave(self._buffer)
        self._rest()
        self._buffer, self.device = Buffer(array), None

    def give(self) -> object:
        """Returns the value for an update by XLA: an array that XLA may donate, or
        memory that it only reads.

        Raises:
            UnavailableError: The value was lost (`lose`).
        """
        self.require()
        if self._buffer is not None:
            return self._buffer.array
        device = self.device
        return device.view() if isinstance(device, Part) else device

    def take_back(self, value: object) -> None:
        """Makes the result of XLA the value: a fresh, immutable array, or a `Part` of
        one."""
        if self._buffer is not None:
            self._leave(self._buffer)
        # From now on XLA makes the memory, and a spare would only cost as much again.
        self.device, self._buffer, self._spare = value, None, None

    def lose(self, why: str) -> None:
        """Drops the value until a new one is assigned, because an optimizer failed
        while it wrote."""
        # What was pinned stays: a snapshot of it may still be written.
        if self._buffer is not None:
            self._leave(self._buffer)
        self.device, self._buffer, self._spare, self._lost = None, None, None, why
        self._reserved.clear()

    def _beside(self) -> Buffer:
        try:
            return Buffer(lasting(self.shape, self.dtype))
        except MemoryError:
            raise ResourceExhaustedError(
                f"{self.who}: not enough memory for {self.nbytes} bytes beside what "
                "readers look at"
            ) from None

    def _logs_rows(self) -> bool:
        return not self.is_pinned or all(pin.logs_rows for pin in self._pins)

    def _leave(self, buffer: Buffer) -> None:
        """Leaves the buffer to its pins, because the value moves to other memory."""
        for pin in self._pins:
            pin.freeze(buffer.lease())
        # A lease, by which the buffer counts as in use if it becomes a spare.
        self._pins = ()

    def _view(self) -> np.ndarray:
        self.require()
        device = self.device
        return device.view() if isinstance(device, Part) else np.asarray(device)

    def _rest(self) -> None:
        if self._spare is not None:
            self._idle += 1
            if self._idle >= SPARE_KEPT_FOR:
                self._spare, self._idle = None, 0
