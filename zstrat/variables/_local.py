"""Variables of this process: the value, and the slots of the optimizers that moved it.

Law of the file: a value that was handed out is never written to; every update makes a
new array.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ._apply import apply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.wire import UpdateOp

    from ._home import HomeRows, HomeUpdate, KnowsSlots, Operands, VariableHandle
    from .gradients._slots import Beside, OptimizerHandle, SlotRule


class LocalHome:
    """One variable in this process, with the slots of the optimizers that moved it."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = _frozen(np.array(value, order="C"))
        self._slots: dict[int, Beside] = {}
        # Reads and updates come from any thread; an update is read, compute, replace.
        self._lock = threading.RLock()

    def read(self, variable: VariableHandle) -> np.ndarray:
        del variable  # one home, one variable
        return self._value

    async def read_async(self, variable: VariableHandle) -> np.ndarray:
        return self.read(variable)

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

    async def update_async(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        self.update(variable, op, operands, optimizer)

    def read_rows(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        value = self._value
        return [_frozen(value[indices]) for _, indices in parts]

    async def read_rows_async(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return self.read_rows(parts)

    def update_many(self, updates: Sequence[HomeUpdate]) -> None:
        for update in updates:
            self.update(*update)

    async def update_many_async(self, updates: Sequence[HomeUpdate]) -> None:
        self.update_many(updates)

    def taken(self, name: str = "") -> tuple[np.ndarray, dict[int, Beside]]:
        """Value and slots of one moment, these by optimizer."""
        del name  # nothing is ever gone
        with self._lock:
            value, slots = self._value, dict(self._slots)
        return value, {number: each.on_host() for number, each in slots.items()}

    @property
    def turn(self) -> Any:
        """A lock for who makes the next value of the present one."""
        return self._lock

    def value_before(self, name: str) -> np.ndarray:
        """The value."""
        del name  # nothing is ever gone
        return self._value

    def slots_before(self, rule: SlotRule, name: str) -> list[Any]:
        """What an optimizer keeps beside it."""
        beside = self._slots.get(rule.id)
        if beside is None:
            return rule.initial(self._value)
        return rule.fitted(name, beside).leaves

    def put_moved(
        self, variable: VariableHandle, value: Any, rule: SlotRule, leaves: list[Any]
    ) -> None:
        """Value and slots from now on."""
        self._value = _frozen(np.array(value, variable.spec.numpy_dtype))
        self._slots[rule.id] = rule.beside(leaves)

    def optimizers(self) -> frozenset[int]:
        """The numbers of those that keep something beside it."""
        return frozenset(self._slots)

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
        with self._lock:
            rule = optimizer.slot_rule(variable)
            leaves = self.slots_before(rule, variable.name)
            made = rule.beside(leaves).replaced(name, np.array(value))
            self._slots[optimizer.id] = made

    def put(
        self,
        value: np.ndarray | None,
        slots: Mapping[OptimizerHandle, Beside | None],
    ) -> None:
        """Replaces value and slots, at once. ``value`` None: it stays; slots None: the
        optimizer begins anew."""
        with self._lock:
            if value is not None:
                self._value = _frozen(np.asarray(value))
            for optimizer, beside in slots.items():
                self._slots.pop(optimizer.id, None)
                if beside is not None:
                    self._slots[optimizer.id] = beside


def _frozen(value: np.ndarray) -> np.ndarray:
    if value.flags.writeable:
        value.flags.writeable = False
    return value
