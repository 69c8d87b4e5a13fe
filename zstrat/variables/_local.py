"""Storages in this process: what they have in common, and the plain ones.

`LocalStorage` has a variable of this process, as an array of numpy, with the slots of
the optimizers that moved it; `UnboundStorage` stands for one that lives elsewhere.
Variables on devices have storages of their own (`_device`).

Law of the file: a value that was handed out is never written to; every update makes a
new array.
"""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ._update_ops import apply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.wire import UpdateOp

    from ._storage import (
        KnowsSlots,
        Operands,
        StorageRows,
        StorageUpdate,
        VariableHandle,
    )
    from .gradients._slots import OptimizerHandle, SlotRule, SlotValues


class ProcessStorage:
    """A storage that answers at once, without waiting for another task: what is awaited
    is done in place, and several reads or updates one after the other."""

    # No ABC: steps ask `isinstance(storage, DeviceStorage)` for each variable, which
    # ABCMeta answers several times slower where the answer is no. Mypy does without.

    @abc.abstractmethod
    def read(self, variable: VariableHandle) -> np.ndarray:
        """See `Storage.read`."""

    @abc.abstractmethod
    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        """Applies one update; returns when it is visible to every reader."""

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
    """A storage of one variable, whose value and slots are in this process: it can be
    saved and restored as it is, and an optimizer may move it here. Whoever does has the
    ``turn`` from the first call to the last one."""

    @property
    @abc.abstractmethod
    def _slots(self) -> dict[int, SlotValues]:
        """By the number of the optimizer."""

    @property
    @abc.abstractmethod
    def turn(self) -> Any:
        """A lock for who makes the next value of the present one; it may be taken again
        by who has it."""

    @abc.abstractmethod
    def taken(self, name: str = "") -> tuple[np.ndarray, dict[int, SlotValues]]:
        """Value and slots of one moment, these by optimizer.

        Args:
            name: The variable's, for errors.

        Raises:
            DataLossError: They are gone.
        """

    @abc.abstractmethod
    def value_before(self, name: str) -> np.ndarray:
        """The value, or copies ``[count, ...]`` of several replicas.

        Raises:
            DataLossError: It is gone; ``name`` is the variable's.
        """

    @abc.abstractmethod
    def slots_before(self, rule: SlotRule, name: str) -> list[Any]:
        """What the optimizer keeps beside it, made if it is not there yet. The list is
        not to be changed.

        Raises:
            ValueError: What is there is not what it keeps.
        """

    @abc.abstractmethod
    def put_moved(
        self, variable: VariableHandle, value: Any, rule: SlotRule, leaves: list[Any]
    ) -> None:
        """Replaces value and slots by those that an optimizer has made."""

    @abc.abstractmethod
    def take_over_shown(self, value: np.ndarray) -> None:
        """The value from now on: it depends on nothing that was here before."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """Waits for a value and slots that are to come from elsewhere."""

    @abc.abstractmethod
    def _kept(self, slots: SlotValues) -> SlotValues:
        """The slots as they are kept here."""

    def read_slots(
        self, optimizer: OptimizerHandle, variables: Sequence[VariableHandle]
    ) -> list[Mapping[str, np.ndarray]]:
        """What an optimizer keeps beside it, by name."""
        _, slots = self.taken(variables[0].name)
        beside = slots.get(optimizer.id)
        if beside is None:
            return [{}]
        return [dict(zip(beside.names, beside.leaves, strict=True))]

    def write_slot(
        self,
        optimizer: KnowsSlots,
        variable: VariableHandle,
        name: str,
        value: np.ndarray,
    ) -> None:
        """Assigns one of the arrays that an optimizer keeps beside it."""
        with self.turn:
            self._settle()
            rule = optimizer.slot_rule(variable)
            leaves = self.slots_before(rule, variable.name)
            made = rule.beside(leaves).replaced(name, np.array(value))
            self._slots[optimizer.id] = self._kept(made)

    def put(
        self,
        value: np.ndarray | None,
        slots: Mapping[OptimizerHandle, SlotValues | None],
    ) -> None:
        """Replaces value and slots, at once. ``value`` None: it stays; slots None: the
        optimizer begins anew."""
        with self.turn:
            # Values of other processes that are still to come would replace these.
            self._settle()
            # All of them first: if one cannot be kept, nothing has changed.
            made = {
                optimizer.id: None if beside is None else self._kept(beside)
                for optimizer, beside in slots.items()
            }
            if value is not None:
                self.take_over_shown(np.asarray(value))
            for number, beside in made.items():
                self._slots.pop(number, None)
                if beside is not None:
                    self._slots[number] = beside


class LocalStorage(StorageWithSlots):
    """One variable in this process, with the slots of the optimizers that moved it."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = _frozen(np.array(value, order="C"))
        self._kept_slots: dict[int, SlotValues] = {}
        # Reads and updates come from any thread; an update is read, compute, replace.
        self._lock = threading.RLock()

    def read(self, variable: VariableHandle) -> np.ndarray:
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
        del name  # nothing is ever gone
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
        del name  # nothing is ever gone
        return self._value

    def slots_before(self, rule: SlotRule, name: str) -> list[Any]:
        beside = self._slots.get(rule.id)
        if beside is None:
            return rule.initial(self._value)
        return rule.fitted(name, beside).leaves

    def put_moved(
        self, variable: VariableHandle, value: Any, rule: SlotRule, leaves: list[Any]
    ) -> None:
        self._value = _frozen(np.array(value, variable.spec.numpy_dtype))
        self._slots[rule.id] = rule.beside(leaves)

    def take_over_shown(self, value: np.ndarray) -> None:
        self._value = _frozen(value)

    def _settle(self) -> None:
        """Nothing is to come."""

    def _kept(self, slots: SlotValues) -> SlotValues:
        return slots


def _frozen(value: np.ndarray) -> np.ndarray:
    if value.flags.writeable:
        value.flags.writeable = False
    return value


class UnboundStorage(ProcessStorage):
    """The storage of handles on another task: names without values. Everything that is
    asked of it raises RuntimeError, and says where the value is."""

    def read(self, variable: VariableHandle) -> np.ndarray:
        raise RuntimeError(_unbound_message(variable, "read"))

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        raise RuntimeError(_unbound_message(variable, f"{op.name.lower()} of"))

    def read_rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        raise RuntimeError(_unbound_message(parts[0][0], "read rows of"))


def _unbound_message(variable: VariableHandle, what: str) -> str:
    where = variable.spec.device
    return (
        f"{what} {variable.spec} outside a step function: this handle came from "
        f"another task and its value lives at {where}; read and update it inside the "
        "body of a zs.function, or on the coordinator"
    )
