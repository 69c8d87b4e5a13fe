"""Snapshots of the variables of a parameter server, including rows of tables.

A snapshot pins the values and the optimizer slots of variables at one moment between
two updates: they can be read later as they were then, and nothing is copied
(`zstrat.ps.store._pins`). The tensors of a snapshot are numbered in the order of the
variables, a value before its slots. Decides without I/O.

Pinned rows of a table are read in sorted order: by bucket (a range of hashes of ids),
then by id. The order of the rows in the table itself depends on its history. Saved in
sorted order, equal tables are equal bytes, and a server that loads some buckets finds
their rows next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidArgumentError,
    NotFoundError,
)
from zstrat.ids import buckets_of, hashes_of
from zstrat.ps.engine._slots import Unbound
from zstrat.ps.store._pins import Pin
from zstrat.ps.tables._id_table import CHANGED, GONE, GONE_AT, TALL
from zstrat.ps.tables._waiting import WAITING
from zstrat.wire import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.ps.engine._slots import HeldVariable
    from zstrat.ps.store._cell import Cell


@final
class RowOrder:
    """The sorted order of the rows of one table. `sort` computes it when the pinned
    ``ids`` (a pin of int64 ``[n]``) were copied. ``chosen``: the rows that are in the
    snapshot; None: all."""

    def __init__(self, ids: Pin, chosen: np.ndarray | None = None) -> None:
        self.ids, self._chosen = ids, chosen
        self.count = ids.shape[0] if chosen is None else len(chosen)
        self._rows: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        return self._rows is not None

    def sort(self, ids: np.ndarray) -> None:
        """Computes the order from the ids that were pinned. May run on any thread."""
        chosen = self._chosen
        if chosen is not None:
            ids = ids[chosen]
        # By bucket first: a server that loads some buckets reads one stretch of the
        # file.
        order = np.lexsort((ids, buckets_of(hashes_of(ids))))
        self._rows = order if chosen is None else chosen[order]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Returns the table's row numbers of the rows ``start`` to ``stop`` in this
        order."""
        assert self._rows is not None, "rows() before sort()"
        return self._rows[start:stop]


@final
class SortedPin:
    """A `Pin` that returns its rows in a `RowOrder`, which must be computed before the
    first copy."""

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
        """Fills ``out`` with bytes of the sorted value from ``start`` on; see
        `Pin.copy`."""
        if not len(out):
            self.require()
            return
        # Rows that an end of the piece cuts are gathered whole.
        first = start // self.width
        last = -(-(start + len(out)) // self.width)
        found = self._pin.gather(self._order.rows(first, last))
        at = start - first * self.width
        np.copyto(out, found[at : at + len(out)])

    def require(self) -> None:
        """Raises if rows are no longer kept; see `Pin.require`."""
        self._pin.require()

    def view(self, start: int, stop: int) -> None:
        """Returns None: rows must be copied to be in order."""
        del start, stop

    def forget(self, stop: int) -> None:
        """Releases the pin if ``stop`` is the end; until then any row may be needed."""
        if stop >= self.nbytes:
            self.release()

    def release(self) -> None:
        """Releases the pinned value; see `Pin.release`."""
        self._pin.release()


MAX_SNAPSHOTS: Final = 16
"""The most snapshots at a time: each one may hold as much memory as all that it
pins."""

PIECE: Final = 4 * 2**20
"""Bytes that are copied and written at a time: copying them takes 1 ms of the event
loop, and writing them takes so long that the hand-over to the writing thread does not
matter."""


class SnapshotTensor(NamedTuple):
    """One tensor of a snapshot: a pinned value, or a pinned slot of an optimizer."""

    entry: TensorEntry
    pin: Pin | SortedPin
    order: RowOrder | None = None
    """The order of the rows, for a table of any id; else None."""

    @classmethod
    def of(
        cls, key: int, optimizer: int, leaf: str, cell: Cell, rows: bool
    ) -> SnapshotTensor:
        """Pins a value, or the array ``leaf`` of the slots of an optimizer, and returns
        it as a tensor."""
        name, shape = cell.dtype.name, list(cell.shape)
        return cls(TensorEntry(key, optimizer, leaf, name, shape, rows), cell.pin())

    def sorted_by(self, order: RowOrder) -> SnapshotTensor:
        """Returns this tensor with its rows in the given order."""
        assert isinstance(self.pin, Pin)
        shape = [order.count, *self.entry.shape[1:]]
        entry = self.entry._replace(shape=shape)
        return SnapshotTensor(entry, SortedPin(self.pin, order), order)


class TensorPart(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor."""

    tensor: SnapshotTensor
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class ServerSnapshot:
    """The tensors of one snapshot. ``is_released``: the snapshot was released, so its
    readers have to stop."""

    tensors: Sequence[SnapshotTensor]
    is_released: bool = False

    def release(self) -> None:
        """Releases all pins, which frees old values that only the pins kept."""
        # First: a writer that looks at it after its next piece stops.
        self.is_released = True
        for tensor in self.tensors:
            tensor.pin.release()
            if tensor.order is not None:
                tensor.order.ids.release()
        self.tensors = ()


class Snapshots:
    """The snapshots of one session, by number; errors name the server ``task``."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._held: dict[int, ServerSnapshot] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def log_bytes(self) -> int:
        """Bytes of memory that hold pinned rows which were overwritten since."""
        return sum(
            tensor.pin.log_bytes
            for snapshot in self._held.values()
            for tensor in snapshot.tensors
        )

    def pin(
        self,
        number: int,
        variables: Sequence[HeldVariable],
        optimizers: Sequence[int],
        since: Sequence[int] = (),
    ) -> ServerSnapshot:
        """Pins the values of all variables, and those of their slots that exist; or
        nothing, if an error is raised.

        Args:
            since: For each variable a number of a change, as in `PinSnapshot`; or
                empty.

        Raises:
            AlreadyExistsError: A snapshot has this number.
            BusyError: There are `MAX_SNAPSHOTS` snapshots.
            UnavailableError: A value was lost.
            InvalidArgumentError: It is not known which rows of a table have changed
                since a number of ``since``.
        """
        if number in self._held:
            raise AlreadyExistsError(f"{self._task}: snapshot {number} exists already")
        if len(self._held) >= MAX_SNAPSHOTS:
            raise BusyError(
                f"{self._task} holds {MAX_SNAPSHOTS} snapshots already: release those "
                "that are no longer needed"
            )
        tensors: list[SnapshotTensor] = []
        snapshot = ServerSnapshot(tensors)
        try:
            cuts = since or [-1] * len(variables)
            for held, cut in zip(variables, cuts, strict=True):
                # One after the other: what is pinned when one fails is in the list.
                tensors += _pinned(held, optimizers, cut)
        except BaseException:  # to the caller; nothing stays pinned
            snapshot.release()
            raise
        self._held[number] = snapshot
        return snapshot

    def get(self, number: int) -> ServerSnapshot:
        """Returns the snapshot of this number.

        Raises:
            NotFoundError: The snapshot was released, or its coordinator was lost
                meanwhile.
        """
        snapshot = self._held.get(number)
        if snapshot is None:
            raise NotFoundError(
                f"{self._task} holds no snapshot {number}: it was released, or the "
                "connection of its coordinator was lost; take another one"
            )
        return snapshot

    def tensor(self, number: int, place: int) -> SnapshotTensor:
        """Returns the tensor with the number ``place`` of a snapshot.

        Raises:
            NotFoundError: The snapshot or the tensor does not exist.
        """
        tensors = self.get(number).tensors
        if not 0 <= place < len(tensors):
            raise NotFoundError(
                f"{self._task}: snapshot {number} has {len(tensors)} tensors, and "
                f"none at {place}"
            )
        return tensors[place]

    def release(self, number: int) -> None:
        """Releases the snapshot with this number, unless it is gone already."""
        snapshot = self._held.pop(number, None)
        if snapshot is not None:
            snapshot.release()

    def clear(self) -> None:
        for number in list(self._held):
            self.release(number)


def cut(tensors: Sequence[SnapshotTensor]) -> Iterator[list[TensorPart]]:
    """Divides tensors into pieces of at most `PIECE` bytes, in order: a large tensor
    into several pieces of whole rows, small tensors together in one piece."""
    piece: list[TensorPart] = []
    room = PIECE
    for tensor in tensors:
        pin, start = tensor.pin, 0
        if pin.nbytes > room and piece:
            yield piece
            piece, room = [], PIECE
        # Whole rows: one that an end cuts is patched by itself (`Pin.copy`).
        size = max(1, PIECE // max(1, pin.width)) * pin.width
        size = min(size, PIECE)
        while pin.nbytes - start > room:
            yield [TensorPart(tensor, start, start + size)]
            start += size
        if pin.nbytes > start:
            piece.append(TensorPart(tensor, start, pin.nbytes))
            room -= pin.nbytes - start
    if piece:
        yield piece


def _pinned(
    held: HeldVariable, optimizers: Sequence[int], since: int
) -> Iterator[SnapshotTensor]:
    if held.table is None:
        yield SnapshotTensor.of(held.entry.key, 0, "", held.cell, bool(held.cell.shape))
        yield from _pinned_slots(held, optimizers)
        return
    table, key, height = held.table, held.entry.key, held.cell.shape[0]
    chosen = removed = None
    # Before anything is pinned, as a cut may be refused.
    if since >= 0:
        table.require_cut(since)
    if since >= 0 and table.changed is not None and table.gone is not None:
        chosen = np.flatnonzero(table.changed.look() > since)
        removed = np.flatnonzero(table.gone.numbers.look() > since)
    # The value first, which may be lost: ids are pinned only if it is not.
    value = SnapshotTensor.of(key, 0, "", held.cell, True)
    order = RowOrder(table.ids.pin(), chosen)
    yield value.sorted_by(order)
    apart = order
    for name, cell in table.leaves().items():
        if name in (CHANGED, GONE_AT) or (name == GONE and removed is None):
            continue  # a table that is loaded begins to follow changes
        tensor = SnapshotTensor.of(key, 0, name, cell, name in TALL)
        # Ids that wait, and ids that are gone, are in an order of their own.
        if name in (WAITING, GONE):
            apart = RowOrder(cell.pin(), removed if name == GONE else None)
        if cell.grows:
            tensor = tensor.sorted_by(order if name in TALL else apart)
        yield tensor
    for tensor in _pinned_slots(held, optimizers):
        if not tensor.entry.rows:
            yield tensor
            continue
        if tensor.entry.shape[0] != height:
            tensor.pin.release()
            raise InvalidArgumentError(
                f"{held.cell.who}: the state of optimizer {tensor.entry.optimizer} was "
                "restored, and rows were born since, before the optimizer got its "
                "tree: zs.Optimizer(transformation, params=params)"
            )
        yield tensor.sorted_by(order)


def _pinned_slots(
    held: HeldVariable, optimizers: Sequence[int]
) -> Iterator[SnapshotTensor]:
    key = held.entry.key
    for optimizer in optimizers:
        slots = held.slots.get(optimizer)
        if slots is None:
            continue
        # A checkpoint must not have slots of which some rows were never loaded.
        if isinstance(slots, Unbound):
            slots.require_filled(f"optimizer {optimizer}")
        for cell, leaf in zip(slots.cells, slots.leaves, strict=True):
            yield SnapshotTensor.of(key, optimizer, leaf.name, cell, leaf.rows)
