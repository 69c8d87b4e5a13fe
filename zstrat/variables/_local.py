"""Variables of this process: the value, and the slots of the optimizers that moved it.

Law of the file: a value that was handed out is never written to; every update makes a
new array.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.wire import UpdateOp

from ._apply import apply
from ._local_rows import optimized, optimized_rows
from ._slots import named_slots, slots_from

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._home import HomeRows, HomeUpdate, Operands
    from ._optimizer import Optimizer
    from ._variable import Variable


class LocalHome:
    """One variable in this process, with the slots of the optimizers that moved it."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = _frozen(np.array(value, order="C"))
        self._slots: dict[int, Any] = {}
        # Reads and updates come from any thread; an update is read, compute, replace.
        self._lock = threading.Lock()

    def read(self, variable: Variable) -> np.ndarray:
        del variable  # one home, one variable
        return self._value

    async def read_async(self, variable: Variable) -> np.ndarray:
        return self.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        with self._lock:
            slots = None
            if optimizer is not None:
                slots = self._slots.get(optimizer.id)
                if slots is None:
                    slots = optimizer.transformation.init(self._value)
            value, slots = moved(self._value, slots, op, operands, optimizer)
            if optimizer is not None:
                self._slots[optimizer.id] = slots
            self._value = _frozen(np.asarray(value, variable.spec.numpy_dtype))

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
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

    def taken(
        self, name: str = ""
    ) -> tuple[np.ndarray, dict[int, dict[str, np.ndarray]]]:
        """Value and slots of one moment: by optimizer, by path in its state."""
        del name  # nothing is ever gone
        with self._lock:
            value, slots = self._value, dict(self._slots)
        return value, {number: named_slots(tree) for number, tree in slots.items()}

    def put(
        self,
        value: np.ndarray | None,
        slots: Mapping[Optimizer, Mapping[str, np.ndarray] | None],
    ) -> None:
        """Replaces value and slots, at once. ``value`` None: it stays; slots None: the
        optimizer begins anew.

        Raises:
            ValueError: The slots are not those of the optimizer.
        """
        made = {
            each.id: None if named is None else slots_from(each, self._value, named)
            for each, named in slots.items()
        }
        with self._lock:
            if value is not None:
                self._value = _frozen(np.asarray(value))
            for number, tree in made.items():
                self._slots.pop(number, None)
                if tree is not None:
                    self._slots[number] = tree


def moved(
    value: np.ndarray,
    slots: Any,
    op: UpdateOp,
    operands: Operands,
    optimizer: Optimizer | None,
) -> tuple[np.ndarray, Any]:
    """Value and slots after one update."""
    if optimizer is None:
        return apply(op, value, operands), slots
    step = _jitted(optimizer)
    if op is UpdateOp.OPTIMIZE_ROWS:
        return optimized_rows(optimizer, step, (value, slots), *operands)
    value, slots = step(operands[0], slots, value)
    return np.asarray(value), slots


def _jitted(optimizer: Optimizer) -> Any:
    """``(gradient, slots, value) -> (new value, new slots)``, compiled once."""
    if optimizer.compiled is None:
        step = functools.partial(optimized, optimizer.transformation)
        optimizer.compiled = jax.jit(step)
    return optimizer.compiled


def _frozen(value: np.ndarray) -> np.ndarray:
    if value.flags.writeable:
        value.flags.writeable = False
    return value
