"""The storage of a variable on this process's devices.

A step donates the value and the optimizers' slots to XLA, and stores the arrays that it
returns. Outside of steps the variable is read and updated like other variables of this
process.

With one replica on each of several devices, the value is one array that all devices
share. If each replica updates its own copy of a variable, the variable is called
*apart*, and its value is an array ``[copies, ...]`` with one row on each device. Code
outside of the replicas sees the first copy; if the synchronization is ON_READ, it sees
the aggregate of all copies. A single copy can be used through its own storage
(`CopyStorage`); captured steps compute with the row instead.

Law of the file: code that changes a value holds the ``turn`` of the `DevicePool`; it
also holds the pool's ``lock`` while XLA owns the present value, and while it changes
several fields.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from zstrat.errors import DataLossError
from zstrat.wire import UpdateOp

from ._arithmetic import aggregated, apply, shares_of
from ._local import StorageWithSlots
from ._storage import VariableAggregation
from .gradients._slots import SlotValues

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Sharding

    from ._device_pool import DevicePool, JointPlace
    from ._storage import Operands, VariableHandle
    from .gradients._slots import OptimizerHandle, SlotRule

# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready


class DeviceStorage(StorageWithSlots):
    """Stores one variable on devices of this process, with the slots that optimizers
    keep for it.

    Args:
        on_read: How a read combines the copies of the replicas, if the variable's
            synchronization is ON_READ; each replica then has its own copy from the
            start.
    """

    def __init__(
        self,
        value: np.ndarray,
        pool: DevicePool,
        on_read: VariableAggregation | None = None,
    ) -> None:
        self.pool = pool
        # Not counted as parted: no program was traced before it was there.
        self.is_apart = on_read is not None and pool.copies > 1
        self._on_read = on_read
        self._copy_keys: tuple[int, ...] = ()
        # Copies that are not assigned yet, since all were lost.
        self._missing: frozenset[int] = frozenset()
        self._joint: JointPlace | None = None
        self._own_value: Any = None
        self._own_slots: dict[int, SlotValues] = {}
        if self.is_apart:
            self._value = pool.place_apart(self._equal(value))
        else:
            self._value = pool.place(value)

    def device_name(self, copy: int = 0) -> str:
        """Returns TF's name of the device that keeps copy number ``copy``."""
        names = self.pool.names
        return names[copy if len(names) > 1 else 0]

    @property
    def sharding(self) -> Sharding | None:
        """The sharding that the value has while steps run; None if it is on one
        device."""
        here = self.pool
        return here.sharding_apart if self.is_apart else here.sharding

    @property
    def kept(self) -> Sharding:
        """The sharding that the value has now, between steps."""
        where: Sharding = self._value.sharding
        return where

    @property
    def is_lost(self) -> bool:
        """Whether a failed step lost the value or slots, and since then not all copies
        have been assigned again."""
        return self._is_gone or bool(self._missing)

    def require_kept(self, name: str, copy: int | None = None) -> None:
        """Refuses to use the value, or one copy of it, if it is lost.

        Raises:
            DataLossError: The value or copy is lost; the error names the variable and
                the remedies.
        """
        if self._lacks(copy):
            raise DataLossError(
                "this process",
                name,
                "its value is lost, because a step failed while it computed the next "
                "one: restore a checkpoint, take the values of another process "
                "(MultiWorkerMirroredStrategy.reform), or assign a value",
            )

    def like(self) -> np.ndarray:
        """Returns zeros of the shape and dtype of the value that code outside of
        replicas sees (`shown`), even if the value is lost."""
        # An array that XLA has taken still knows its shape and dtype.
        shape = self._value.shape[1:] if self.is_apart else self._value.shape
        return np.zeros(shape, self._value.dtype)

    def read(self, variable: VariableHandle) -> np.ndarray:
        return self._looked_at(variable.name, self.shown)

    def copies(self, variable: VariableHandle) -> np.ndarray:
        """Reads the copies of the replicas, ``[copies, ...]``.

        Raises:
            DataLossError: The copies are lost.
        """
        return self._looked_at(variable.name, self._all_copies)

    def copy(self, variable: VariableHandle, number: int) -> np.ndarray:
        """Reads the copy of one replica.

        Raises:
            DataLossError: The copy is lost.
        """
        copies = self._looked_at(variable.name, self._all_copies, number)
        row: np.ndarray = copies[number]
        return row

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        assert optimizer is None, "gradients are applied by `put_moved`"
        dtype = variable.spec.numpy_dtype
        with self.pool.turn:
            self._settle()  # first: slots may come with the value
            is_assignment = op is UpdateOp.ASSIGN
            if not is_assignment:
                self.require_kept(variable.name)
            # An assignment starts from zeros: the old value may be lost.
            if self.is_apart:
                apart = operands[0].ndim > len(variable.shape)  # a share for each copy
                given = zip(operands[0]) if apart else itertools.repeat(operands)
                old = (
                    self._equal(self.like())
                    if is_assignment
                    else np.asarray(self._value)
                )
                moves = [
                    np.asarray(apply(op, row, own), dtype)
                    # Not strict: `repeat` has no end.
                    for row, own in zip(old, given, strict=False)
                ]
                updated = np.stack(moves)
            else:
                value = self.like() if is_assignment else np.asarray(self._value)
                updated = np.asarray(apply(op, value, operands), dtype)
            if is_assignment:
                self._restart_from(self._placed(updated))
            else:
                self._value = self._placed(updated)

    def update_copy(
        self,
        variable: VariableHandle,
        number: int,
        op: UpdateOp,
        updates: Sequence[Operands],
    ) -> None:
        """Updates one replica's copy. If all copies are lost, an assignment restores
        only this copy, and the others stay missing until they are assigned.

        Raises:
            DataLossError: The copy is lost, and the update depends on its value.
        """
        with self.pool.turn:
            self._settle()
            if op is UpdateOp.ASSIGN and self._is_void:
                # A copy: what `broadcast_to` returns cannot be written.
                copies = np.array(self._equal(self.like()))
                missing = frozenset(range(len(copies)))
                self.pool.has_failed = True  # steps ask for what is missing
                self._forget_void_slots()
            else:
                if op is not UpdateOp.ASSIGN:
                    self.require_kept(variable.name, number)
                copies, missing = np.array(self._all_copies()), self._missing
            for moves in updates:
                copies[number] = apply(op, copies[number], moves)
            self._put_apart(copies, missing - {number})

    def put_copies(self, copies: np.ndarray) -> None:
        """Replaces the copies of all replicas."""
        with self.pool.turn:
            self._put_apart(copies)

    def take_copies_of(self, variable: VariableHandle, other: DeviceStorage) -> None:
        """Copies the values that this process's replicas have of the variable in
        ``other``, which has the same shape and dtype.

        Raises:
            DataLossError: The values in ``other`` are lost.
        """
        copies = other.copies(variable)
        with self.pool.turn:
            if other.is_apart:
                self._put_apart(copies)
            else:
                self._restart_from(self._placed(copies[0]))

    def copy_keys(self, next_key: Callable[[], int]) -> tuple[int, ...]:
        """Returns the variable key of each replica's copy; the first call makes the
        keys.

        The keys never change, so that steps that were traced for a copy are found
        again.
        """
        with self.pool.lock:
            if not self._copy_keys:
                self._copy_keys = tuple(next_key() for _ in range(self.pool.copies))
            return self._copy_keys

    def part(self) -> None:
        """Switches to one copy for each replica (*apart*); the copies start equal."""
        with self.pool.turn:
            self._settle()
            if self.is_apart:
                return  # another thread has done it
            copies = self._equal(np.asarray(self._value))
            self._put_apart(copies)

    def value(self) -> Any:
        """Returns the value on the devices where steps run, moved there if it is kept
        elsewhere."""
        value, here = self._value, self.pool
        return here.sent(value, self.sharding) if here.travels else value

    def slots_before(self, rule: SlotRule, name: str = "") -> list[Any]:
        beside = self._slots.get(rule.id)
        if beside is None:
            initial = rule.beside(rule.initial(self._first()))
            beside = self._slots[rule.id] = self._kept(initial)
        # Restored, or of another tree. Else both are the same tuple, so one comparison
        # does.
        elif beside.names is not rule.names:
            beside = self._slots[rule.id] = rule.fitted(name, beside)
        here = self.pool
        if not here.travels:
            return beside.leaves
        sent: list[Any] = here.sent(beside.leaves, here.sharding)
        return sent

    def take_over(self, value: jax.Array) -> None:
        """Stores an array as the value; nothing else may refer to the array."""
        here = self.pool
        self._value = here.returned(value) if here.travels else value

    def take_over_slots(self, rule: SlotRule, leaves: list[Any]) -> None:
        """Stores arrays as an optimizer's slots; nothing else may refer to the
        arrays."""
        here = self.pool
        kept = here.returned(leaves) if here.travels else leaves
        self._slots[rule.id] = rule.beside(kept)

    def join(self, place: JointPlace) -> None:
        """Leaves value and slots in the shared list of arrays of a step (`JointState`)
        until other code needs them.

        The caller holds the pool's locks, ``turn`` and ``lock``.
        """
        if self._joint is not None:
            self._part_from_joint()  # it may have slots that the new place has not
        there = {rule.id for rule, _, _ in place.slots}
        left = {n: slots for n, slots in self._own_slots.items() if n not in there}
        # No call in between: a handler of a signal may read this storage.
        self._joint = place
        self._own_value = None  # readers that find None look in the joint state
        self._own_slots = left

    def shown(self) -> np.ndarray:
        """Returns the value that code outside of the replicas sees: the first copy or
        the aggregate."""
        if not self.is_apart or self._on_read is None:
            return self._first()
        return np.asarray(aggregated(np.asarray(self._value), self._on_read))

    def take_over_shown(self, value: np.ndarray) -> None:
        """Replaces all copies by ``value``, which has the form that `shown` returns.

        Optimizers whose slots are lost start again with initial slots.
        """
        self._restart_from(self._placed(self._shared_out(value)))

    def shown_slots(self) -> dict[int, SlotValues]:
        """Returns the slots as numpy arrays, by id of the optimizer."""
        return {number: slots.on_host() for number, slots in self._slots.items()}

    def take_over_shown_slots(self, optimizer: int, slots: SlotValues) -> None:
        """Replaces the slots of one optimizer, given in the form that `shown_slots`
        returns."""
        self._slots[optimizer] = self._kept(slots)

    def taken(self, name: str = "") -> tuple[np.ndarray, dict[int, SlotValues]]:
        with self.pool.turn:
            self._settle()
            self.require_kept(name)
            return self.shown(), self.shown_slots()

    @property
    def turn(self) -> Any:
        return self.pool.turn

    def value_before(self, name: str) -> np.ndarray:
        self._settle()  # first: slots may come with the value
        self.require_kept(name)
        return np.asarray(self._value)

    def put_moved(
        self, variable: VariableHandle, value: Any, rule: SlotRule, leaves: list[Any]
    ) -> None:
        # First what may fail, so that value and slots always belong together.
        placed = self._placed(np.asarray(value, variable.spec.numpy_dtype))
        self._slots[rule.id] = self._kept(rule.beside(leaves))
        self._value = placed

    @property
    def _value(self) -> Any:
        while (value := self._own_value) is None:  # a step may join it again
            self._part_from_joint()
        return value

    @_value.setter
    def _value(self, value: Any) -> None:
        if self._joint is not None:
            self._part_from_joint()
        self._own_value = value

    @property
    def _slots(self) -> dict[int, SlotValues]:
        if self._joint is not None:
            self._part_from_joint()
        return self._own_slots

    def _part_from_joint(self) -> None:
        """Takes value and slots out of the `JointState` of a step, and stores them
        here."""
        with self.pool.lock:
            place = self._joint
            if place is None:
                return  # another thread has done it
            arrays = place.state.arrays
            # Before anything is taken: see `JointState.taken`.
            place.state.is_whole = False
            value, slots = arrays[place.value], {**self._own_slots}
            for rule, first, end in place.slots:
                slots[rule.id] = rule.beside(arrays[first:end])
            if self._joint is not place:
                return  # a signal handler has done it meanwhile
            self._own_slots = slots
            self._own_value = value
            self._joint = None
            place.leave()

    def __del__(self) -> None:
        # Other storages may keep the list alive: drop the arrays of this one.
        place = getattr(self, "_joint", None)
        if place is not None:
            place.leave()

    def _settle(self) -> None:
        self.pool.settle()

    def _placed(self, array: Any) -> jax.Array:
        """Copies an array to the devices that keep the value; with one row for each
        copy if the variable is apart."""
        here = self.pool
        return here.place_apart(array) if self.is_apart else here.place(array)

    @property
    def _is_gone(self) -> bool:
        # Over a copy of the slots: the caller may hold the lock without the turn, while
        # another thread adds slots.
        return self._value.is_deleted() or any(
            beside.is_lost for beside in [*self._slots.values()]
        )

    def _lacks(self, copy: int | None) -> bool:
        return self.is_lost if copy is None else self._is_gone or copy in self._missing

    def _looked_at(
        self, name: str, seen: Callable[[], np.ndarray], copy: int | None = None
    ) -> np.ndarray:
        """Waits until the value has been computed, then returns the result of
        ``seen()``, which reads it.

        Raises:
            DataLossError: The value, or the copy that is read, is lost.
        """
        here = self.pool
        here.settle()
        with here.lock:
            self.require_kept(name, copy)
            value = self._value
        # Without a lock: the step that computes the value may read variables.
        with suppress(Exception):
            # XLA owns the value now, or its computation failed: ``seen`` meets the same
            # below, and raises it.
            _wait(value)
        with here.lock:
            if self._value is value and not self._lacks(copy):
                return seen()
        # A step has the value now: the turn comes after that step.
        with here.turn:
            self.require_kept(name, copy)
            return seen()

    def _all_copies(self) -> np.ndarray:
        value = np.asarray(self._value)
        return value if self.is_apart else self._equal(value)

    def _put_apart(
        self, copies: np.ndarray, missing: frozenset[int] = frozenset()
    ) -> None:
        """Stores copies ``[copies, ...]``, one for each replica; those numbered in
        ``missing`` count as lost."""
        placed = self.pool.place_apart(copies)
        with self.pool.lock:
            was_apart = self.is_apart
            self._value, self._missing, self.is_apart = placed, missing, True
        if not was_apart:
            # Last: a trace, which takes no lock, must find the copies if it finds this.
            self.pool.parted += 1

    def _restart_from(self, placed: jax.Array) -> None:
        """Replaces the value, which may be lost, and drops the slots that are lost."""
        self._forget_void_slots()
        with self.pool.lock:
            self._value, self._missing = placed, frozenset()

    def _forget_void_slots(self) -> None:
        for number in [n for n, slots in self._slots.items() if slots.is_void]:
            del self._slots[number]

    @property
    def _is_void(self) -> bool:
        """Whether value or slots are lost, or their computation failed. Waits until
        they are computed."""
        state = [SlotValues((), [self._value], ()), *self._slots.values()]
        return any(arrays.is_void for arrays in state)

    def _kept(self, slots: SlotValues) -> SlotValues:
        # Never apart: optimizers update all copies together.
        place = self.pool.place
        leaves = [place(np.asarray(x)) for x in slots.leaves]
        return SlotValues(slots.names, leaves, slots.rows)

    def _first(self) -> np.ndarray:
        """Returns the value; if the variable is apart, its first copy."""
        # A view is safe: XLA does not overwrite memory that numpy refers to.
        value = np.asarray(self._value)
        return np.asarray(value[0]) if self.is_apart else value

    def _shared_out(self, value: np.ndarray) -> np.ndarray:
        """Returns copies for this process that, together with those of other processes,
        aggregate to ``value``."""
        copies = self._equal(value)
        if self._on_read is VariableAggregation.SUM:
            first, total = self.pool.replicas()
            copies = shares_of(value, total)[first : first + len(copies)]
        return np.asarray(copies if self.is_apart else copies[0])

    def _equal(self, value: np.ndarray) -> np.ndarray:
        """Repeats a value once for each copy: ``[copies, ...]``."""
        return np.broadcast_to(value, (self.pool.copies, *value.shape))
