"""A variable whose value stays on this process's devices between steps.

A step takes value and slots as they are, gives them to XLA to be overwritten, and puts
back what came out. Outside of steps the variable is read and updated as any other of
this process.

Law of the file: whoever takes the value holds the lock until he has put back another
one, or nothing of it was given away.
"""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.errors import DataLossError

from ._local import moved
from ._slots import named_slots, slots_from

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from jax.sharding import Mesh

    from zstrat.wire import UpdateOp

    from ._home import HomeRows, HomeUpdate, Operands
    from ._optimizer import Optimizer
    from ._variable import Variable


class Residence(abc.ABC):
    """Where the variables of one strategy live.

    ``mesh`` are the devices of all processes, if values are arrays over them. Steps
    hold the ``lock``; ``steps`` is how many of them have put back new values.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh
        self.steps = 0
        self.lock = threading.RLock()

    @abc.abstractmethod
    def place(self, array: Any) -> jax.Array:
        """Puts a copy of an array where the values live."""

    @abc.abstractmethod
    def mark(self) -> Hashable:
        """What a program of a step depends on; it is not used under another one."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Called with the lock held before values are used: they may have to come from
        other processes first."""


class DeviceHome:
    """One variable on the devices of this process, with the slots of the optimizers
    that moved it."""

    def __init__(self, value: np.ndarray, residence: Residence) -> None:
        self.residence = residence
        self._value = residence.place(value)
        self._slots: dict[int, Any] = {}

    # ---- for steps, which hold the lock --------------------------------------------

    def value(self) -> jax.Array:
        """The value, where it lives."""
        return self._value

    def slots(self, optimizer: Optimizer) -> Any:
        """What the optimizer keeps beside it, made if it is not there yet."""
        if optimizer.id not in self._slots:
            self._slots[optimizer.id] = self._placed(
                optimizer.transformation.init(np.asarray(self._value))
            )
        return self._slots[optimizer.id]

    def take_over(self, value: jax.Array) -> None:
        """The value from now on. It is nobody else's."""
        self._value = value

    def take_over_slots(self, optimizer: Optimizer, slots: Any) -> None:
        """What the optimizer keeps from now on."""
        self._slots[optimizer.id] = slots

    def optimizers(self) -> frozenset[int]:
        """The numbers of those that keep something beside it."""
        return frozenset(self._slots)

    # ---- the home of a variable ----------------------------------------------------

    def read(self, variable: Variable) -> np.ndarray:
        with self.residence.lock:
            self.residence.settle()
            if self._value.is_deleted():
                raise DataLossError(
                    "this process",
                    variable.name,
                    "its value is gone, because a step failed while it was computing "
                    "the next one: restore a checkpoint, or take the values of another "
                    "process",
                )
            # Of memory that numpy looks at XLA makes no new value in place.
            return np.asarray(self._value)

    async def read_async(self, variable: Variable) -> np.ndarray:
        return self.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        with self.residence.lock:
            before = self.read(variable)  # first: slots may come with the value
            slots = None if optimizer is None else self.slots(optimizer)
            value, slots = moved(before, slots, op, operands, optimizer)
            made = np.asarray(value, variable.spec.numpy_dtype)
            self._value = self.residence.place(made)
            if optimizer is not None:
                self._slots[optimizer.id] = self._placed(slots)

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        self.update(variable, op, operands, optimizer)

    def read_rows(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return [self.read(variable)[indices] for variable, indices in parts]

    async def read_rows_async(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return self.read_rows(parts)

    def update_many(self, updates: Sequence[HomeUpdate]) -> None:
        for variable, op, operands, optimizer in updates:
            variable.home.update(variable, op, operands, optimizer)

    async def update_many_async(self, updates: Sequence[HomeUpdate]) -> None:
        self.update_many(updates)

    def taken(self) -> tuple[np.ndarray, dict[int, dict[str, np.ndarray]]]:
        """Value and slots of one moment: by optimizer, by path in its state."""
        with self.residence.lock:
            self.residence.settle()
            slots = {number: named_slots(tree) for number, tree in self._slots.items()}
            return np.asarray(self._value), slots

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
        with self.residence.lock:
            # Values of other processes that are still to come would replace these.
            self.residence.settle()
            made = {
                each.id: None
                if named is None
                else self._placed(slots_from(each, self._value, named))
                for each, named in slots.items()
            }
            if value is not None:
                self._value = self.residence.place(np.asarray(value))
            for number, tree in made.items():
                self._slots.pop(number, None)
                if tree is not None:
                    self._slots[number] = tree

    def _placed(self, slots: Any) -> Any:
        return jax.tree.map(lambda leaf: self.residence.place(np.asarray(leaf)), slots)
