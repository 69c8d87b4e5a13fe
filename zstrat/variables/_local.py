"""Storages of variables of this process.

`LocalStorage` keeps one variable as a numpy array, with the slots of the optimizers
that have updated it. `CopyStorage` is one replica's copy of a variable on devices
(`_device`). `UnboundStorage` belongs to handles whose value is on another task.

Law: a value that was handed out is never written to; every update makes a new array.
"""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arithmetic import apply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.wire import UpdateOp

    from ._storage import Operands, StorageRows, StorageUpdate, VariableHandle
    from .gradients._slots import OptimizerHandle, SlotRule, SlotValues


class ProcessStorage:
    """Base of storages that return at once, without waiting for another task.

    Several reads or updates are executed one after the other, also by the async
    methods.
    """

    # No ABC: steps ask `isinstance(storage, DeviceStorage)` for each variable, which
    # ABCMeta answers several times slower where the answer is no. Mypy does without.

    @abc.abstractmethod
    def read(self, variable: VariableHandle) -> np.ndarray:
        """Returns the value of the variable as a read-only array."""

    @abc.abstractmethod
    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        """Applies one update; when it returns, every reader sees the result."""

    def read_many(self, variables: Sequence[VariableHandle]) -> list[np.ndarray]:
        return [self.read(variable) for variable in variables]

    def read_rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        return [self.read(variable)[indices] for variable, indices in parts]

    def update_many(self, updates: Sequence[StorageUpdate]) -> None:
        for update in updates:
            self.update(*update)

    async def read_many_async(
        self, variables: Sequence[VariableHandle]
    ) -> list[np.ndarray]:
        return self.read_many(variables)

    async def read_rows_async(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        return self.read_rows(parts)

    async def update_many_async(self, updates: Sequence[StorageUpdate]) -> None:
        self.update_many(updates)


class StorageWithSlots(ProcessStorage):
    """Base of storages of one variable whose value and slots are in this process.

    Checkpoints save and restore value and slots as they are, and optimizers update them
    in this process. Code that does so holds the ``turn`` from its first call to the
    last.
    """

    @property
    @abc.abstractmethod
    def _slots(self) -> dict[int, SlotValues]:
        """The slots, by id of the optimizer."""

    @property
    @abc.abstractmethod
    def turn(self) -> Any:
        """The re-entrant lock to hold while computing the next value from the present
        one."""

    @abc.abstractmethod
    def taken(self, name: str = "") -> tuple[np.ndarray, dict[int, SlotValues]]:
        """Returns value and slots as of one moment; the slots by id of the optimizer.

        Args:
            name: The name of the variable, for errors.

        Raises:
            DataLossError: Value or slots are lost.
        """

    @abc.abstractmethod
    def value_before(self, name: str) -> np.ndarray:
        """Returns the value before an update; copies ``[count, ...]`` if replicas have
        them.

        Args:
            name: The name of the variable, for errors.

        Raises:
            DataLossError: The value is lost.
        """

    @abc.abstractmethod
    def slots_before(self, rule: SlotRule, name: str) -> list[Any]:
        """Returns the optimizer's slots before an update; creates the slots the first
        time.

        The caller must not change the list.

        Raises:
            ValueError: The stored slots were restored from another optimizer.
        """

    @abc.abstractmethod
    def put_moved(
        self, variable: VariableHandle, value: Any, rule: SlotRule, leaves: list[Any]
    ) -> None:
        """Stores the value and the slots that an optimizer has computed."""

    @abc.abstractmethod
    def take_over_shown(self, value: np.ndarray) -> None:
        """Replaces the stored value, or every copy of it on the devices, with
        ``value``. The old value may be lost."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """Waits until a value and slots that other processes send have arrived."""

    @abc.abstractmethod
    def _kept(self, slots: SlotValues) -> SlotValues:
        """Converts slots to the form in which this storage keeps them."""

    def read_slots(
        self, optimizer: OptimizerHandle, variables: Sequence[VariableHandle]
    ) -> list[Mapping[str, np.ndarray]]:
        """Reads the slots of an optimizer for the one variable of this storage, by
        name; empty if the optimizer has none."""
        _, slots = self.taken(variables[0].name)
        beside = slots.get(optimizer.id)
        if beside is None:
            return [{}]
        return [dict(zip(beside.names, beside.leaves, strict=True))]

    def write_slot(
        self,
        optimizer: OptimizerHandle,
        variable: VariableHandle,
        name: str,
        value: np.ndarray,
    ) -> None:
        """Assigns one slot that the optimizer keeps for the variable."""
        with self.turn:
            self._settle()
            rule = optimizer.slot_rule(variable)
            leaves = self.slots_before(rule, variable.name)
            # A copy: the caller may write to its array later.
            changed = rule.beside(leaves).replaced(name, np.array(value))
            self._slots[optimizer.id] = self._kept(changed)

    def put(
        self,
        value: np.ndarray | None,
        slots: Mapping[OptimizerHandle, SlotValues | None],
    ) -> None:
        """Replaces value and optimizers' slots together.

        The value stays if ``value`` is None. An optimizer whose slots are None starts
        again with initial slots.
        """
        with self.turn:
            # Values of other processes that are still to come would replace these.
            self._settle()
            # Convert all of them first: if one does not fit, nothing has changed.
            kept = {
                optimizer.id: None if beside is None else self._kept(beside)
                for optimizer, beside in slots.items()
            }
            if value is not None:
                self.take_over_shown(np.asarray(value))
            for number, beside in kept.items():
                self._slots.pop(number, None)
                if beside is not None:
                    self._slots[number] = beside


class LocalStorage(StorageWithSlots):
    """Keeps one variable in this process as a numpy array, with the slots of its
    optimizers."""

    def __init__(self, value: np.ndarray) -> None:
        # A copy: the caller may write to its array later.
        self._value = _frozen(np.array(value, order="C"))
        self._kept_slots: dict[int, SlotValues] = {}
        # Reads and updates come from any thread; an update is read, compute, replace.
        self._lock = threading.RLock()

    def read(self, variable: VariableHandle) -> np.ndarray:
        # Without the lock: the array is replaced, never changed.
        del variable  # one storage, one variable
        return self._value

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        assert optimizer is None, "gradients are applied by `put_moved`"
        with self._lock:
            value = apply(op, self._value, operands)
            self._value = _frozen(np.asarray(value, variable.spec.numpy_dtype))

    def taken(self, name: str = "") -> tuple[np.ndarray, dict[int, SlotValues]]:
        del name  # nothing is ever lost here
        with self._lock:
            value, slots = self._value, dict(self._slots)
        return value, {number: each.on_host() for number, each in slots.items()}

    @property
    def _slots(self) -> dict[int, SlotValues]:
        return self._kept_slots

    @property
    def turn(self) -> Any:
        return self._lock

    def value_before(self, name: str) -> np.ndarray:
        del name  # nothing is ever lost here
        return self._value

    def slots_before(self, rule: SlotRule, name: str) -> list[Any]:
        beside = self._slots.get(rule.id)
        if beside is None:
            return rule.initial(self._value)
        # They may have been restored before the rule was known.
        return rule.fitted(name, beside).leaves

    def put_moved(
        self, variable: VariableHandle, value: Any, rule: SlotRule, leaves: list[Any]
    ) -> None:
        # The optimizer's code holds the turn since `value_before`.
        self._value = _frozen(np.array(value, variable.spec.numpy_dtype))
        self._slots[rule.id] = rule.beside(leaves)

    def take_over_shown(self, value: np.ndarray) -> None:
        self._value = _frozen(value)

    def _settle(self) -> None:
        """Does nothing: no other process sends values to this storage."""

    def _kept(self, slots: SlotValues) -> SlotValues:
        return slots


def _frozen(value: np.ndarray) -> np.ndarray:
    if value.flags.writeable:
        value.flags.writeable = False
    return value


class CopyStorage(ProcessStorage):
    """The storage of one replica's copy of a variable: a row of that variable's
    `DeviceStorage`."""

    def __init__(self, container: VariableHandle, number: int) -> None:
        self.container = container
        self.number = number

    def device_name(self) -> str:
        """Returns TF's name of the device that keeps this copy."""
        name: str = self._whole.device_name(self.number)
        return name

    def read(self, variable: VariableHandle) -> np.ndarray:
        del variable  # one storage, one copy
        value: np.ndarray = self._whole.copy(self.container, self.number)
        return value

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        if optimizer is not None:
            raise self.not_optimized(variable)
        self._whole.update_copy(self.container, self.number, op, [operands])

    def not_optimized(self, variable: VariableHandle) -> NotImplementedError:
        """Makes the error for an optimizer that was asked to update this single
        copy."""
        return NotImplementedError(
            f"{variable.spec} is one copy of {self.container.spec}, and optimizers "
            "update all copies together: give apply_gradients the variable itself"
        )

    @property
    def _whole(self) -> Any:
        """The `DeviceStorage` of all copies. Its file imports this one, so it is
        imported late."""
        return self.container.storage


def copy_storage(variable: VariableHandle) -> CopyStorage | None:
    """Returns the storage of a variable that is one replica's copy; None for others."""
    storage = variable.storage
    return storage if isinstance(storage, CopyStorage) else None


class UnboundStorage(ProcessStorage):
    """The storage of handles whose value is on another task; refuses every read and
    update.

    The RuntimeError says which task has the value.
    """

    def read(self, variable: VariableHandle) -> np.ndarray:
        raise self.refusal(variable, "read")

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        raise self.refusal(variable, f"{op.name.lower()} of")

    def read_rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        raise self.refusal(parts[0][0], "read rows of")

    def refusal(self, variable: VariableHandle, what: str) -> RuntimeError:
        """Makes the error for a refused read or update."""
        return RuntimeError(
            f"{what} {variable.spec} outside a step function: this handle came from "
            f"another task, and its value is stored at {variable.spec.device}; read "
            "and update it inside the body of a zs.function, or on the coordinator"
        )
