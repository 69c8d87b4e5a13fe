"""A variable, or a copy of one, that stays on this process's devices between steps.

A step takes value and slots as they are, gives them to XLA to be overwritten, and puts
back what came out (`DeviceValue`). Outside of steps the variable is read and updated as
any other of this process. Law of the file: who changes it has the turn (`Residence`).

Where several replicas have one copy each, a copy has a home of its own. Law of that:
what is done to one copy is done to it alone. A step that is captured does not come
there: it computes with the row, as a part of all copies.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from zstrat.wire import UpdateOp

from ._apply import apply
from ._device_value import DeviceValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._home import HomeRows, HomeUpdate, KnowsSlots, Operands, VariableHandle
    from .gradients._slots import Beside, OptimizerHandle, SlotRule


class DeviceHome(DeviceValue):
    """One variable on the devices of this process, with the slots of the optimizers
    that moved it."""

    def device_name(self, copy: int = 0) -> str:
        """TF's name of the device that keeps a copy; without a number, the first."""
        names = self.residence.names
        return names[copy if len(names) > 1 else 0]

    def read(self, variable: VariableHandle) -> np.ndarray:
        return self._looked_at(variable.name, self._seen)

    def copies(self, variable: VariableHandle) -> np.ndarray:
        """The copies of the replicas, ``[copies, ...]``, as an array that nobody writes
        to.

        Raises:
            DataLossError: They are lost.
        """
        return self._looked_at(variable.name, self._all_copies)

    def copy(self, variable: VariableHandle, number: int) -> np.ndarray:
        """One of them.

        Raises:
            DataLossError: It is lost.
        """
        found = self._looked_at(variable.name, self._all_copies, number)
        row: np.ndarray = found[number]
        return row

    def copy_keys(self, made: Callable[[], int]) -> tuple[int, ...]:
        """The key of each copy as a variable, the same whenever somebody asks: steps
        that were traced for it are found again."""
        with self.residence.lock:
            if not self._copy_keys:
                self._copy_keys = tuple(made() for _ in range(self.residence.copies))
            return self._copy_keys

    def put_copies(self, copies: np.ndarray) -> None:
        """The copies of the replicas from now on."""
        with self.residence.turn:
            self._put_apart(copies)

    def take_copies_of(self, variable: VariableHandle, other: DeviceHome) -> None:
        """The values that the replicas of this process have of another variable of the
        same form.

        Raises:
            DataLossError: They are lost.
        """
        copies = other.copies(variable)
        with self.residence.turn:
            if other.is_apart:
                self._put_apart(copies)
            else:
                self._begin_anew(self.placed(copies[0]))

    def update_copy(
        self,
        variable: VariableHandle,
        number: int,
        op: UpdateOp,
        updates: Sequence[Operands],
    ) -> None:
        """Updates one copy alone. If all are lost, an assignment brings this one back,
        and the others wait for theirs.

        Raises:
            DataLossError: The copy is lost, and the update depends on it.
        """
        with self.residence.turn:
            self.residence.settle()
            if op is UpdateOp.ASSIGN and self._is_void:
                copies = np.array(self._equal(self.like()))
                missing = frozenset(range(len(copies)))
                self.residence.has_failed = True  # steps ask for what is missing
                self._forget_void_slots()
            else:
                if op is not UpdateOp.ASSIGN:
                    self.require_kept(variable.name, number)
                copies, missing = np.array(self._all_copies()), self._missing
            for moves in updates:
                copies[number] = apply(op, copies[number], moves)
            self._put_apart(copies, missing - {number})

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
        dtype = variable.spec.numpy_dtype
        with self.residence.turn:
            self.residence.settle()  # first: slots may come with the value
            is_anew = op is UpdateOp.ASSIGN
            if not is_anew:
                self.require_kept(variable.name)
            # An assignment does not look at what may be lost, or came to nothing.
            if self.is_apart:
                apart = operands[0].ndim > len(variable.shape)  # a share for each copy
                given = zip(operands[0]) if apart else itertools.repeat(operands)
                old = self._equal(self.like()) if is_anew else np.asarray(self._value)
                moves = [
                    np.asarray(apply(op, row, own), dtype)
                    for row, own in zip(old, given, strict=False)
                ]
                made = np.stack(moves)
            else:
                value = self.like() if is_anew else np.asarray(self._value)
                made = np.asarray(apply(op, value, operands), dtype)
            if is_anew:
                self._begin_anew(self.placed(made))
            else:
                self._value = self.placed(made)

    @property
    def turn(self) -> Any:
        """A lock for who makes the next value of the present one."""
        return self.residence.turn

    def value_before(self, name: str) -> np.ndarray:
        """The value, or copies ``[count, ...]``.

        Raises:
            DataLossError: They are gone.
        """
        self.residence.settle()  # first: slots may come with the value
        self.require_kept(name)
        return np.asarray(self._value)

    def slots_before(self, rule: SlotRule, name: str) -> list[Any]:
        """What an optimizer keeps beside it, made if it is not there yet."""
        return self.slot_leaves(rule, name)

    def put_moved(
        self, variable: VariableHandle, value: Any, rule: SlotRule, leaves: list[Any]
    ) -> None:
        """Value and slots from now on."""
        placed = self.placed(np.asarray(value, variable.spec.numpy_dtype))
        self._slots[rule.id] = self._placed(rule.beside(leaves))
        self._value = placed

    async def update_async(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
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

    def taken(self, name: str = "") -> tuple[np.ndarray, dict[int, Beside]]:
        """Value and slots of one moment, these by optimizer.

        Raises:
            DataLossError: A step failed while it was computing the next ones.
        """
        with self.residence.turn:
            self.residence.settle()
            self.require_kept(name)
            return self._seen(), self.shown_slots()

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
        with self.residence.turn:
            self.residence.settle()
            rule = optimizer.slot_rule(variable)
            leaves = self.slots_before(rule, variable.name)
            made = rule.beside(leaves).replaced(name, np.array(value))
            self._slots[optimizer.id] = self._placed(made)

    def put(
        self,
        value: np.ndarray | None,
        slots: Mapping[OptimizerHandle, Beside | None],
    ) -> None:
        """Replaces value and slots, at once. ``value`` None: it stays; slots None: the
        optimizer begins anew."""
        with self.residence.turn:
            # Values of other processes that are still to come would replace these.
            self.residence.settle()
            made = {
                each.id: None if beside is None else self._placed(beside)
                for each, beside in slots.items()
            }
            if value is not None:
                self.take_over_shown(np.asarray(value))
            for number, beside in made.items():
                self._slots.pop(number, None)
                if beside is not None:
                    self._slots[number] = beside


class CopyHome:
    """The home of one copy: a row of the home of the whole variable."""

    def __init__(self, container: VariableHandle, number: int) -> None:
        self.container = container
        self.number = number

    def device_name(self) -> str:
        """TF's name of the device that keeps this copy."""
        return self._home.device_name(self.number)

    def read(self, variable: VariableHandle) -> np.ndarray:
        del variable  # one home, one copy
        return self._home.copy(self.container, self.number)

    async def read_async(self, variable: VariableHandle) -> np.ndarray:
        return self.read(variable)

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: OptimizerHandle | None,
    ) -> None:
        if optimizer is not None:
            raise self.not_optimized(variable)
        self._home.update_copy(self.container, self.number, op, [operands])

    async def update_async(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: OptimizerHandle | None,
    ) -> None:
        self.update(variable, op, operands, optimizer)

    def read_rows(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return [self.read(variable)[indices] for variable, indices in parts]

    async def read_rows_async(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return self.read_rows(parts)

    def update_many(self, updates: Sequence[HomeUpdate]) -> None:
        for update in updates:
            self.update(*update)

    async def update_many_async(self, updates: Sequence[HomeUpdate]) -> None:
        self.update_many(updates)

    def not_optimized(self, variable: VariableHandle) -> NotImplementedError:
        """An optimizer is given this copy."""
        return NotImplementedError(
            f"{variable.spec} is one copy of {self.container.spec}, and optimizers "
            "move all copies together: give apply_gradients the variable itself"
        )

    @property
    def _home(self) -> DeviceHome:
        home = self.container.home
        assert isinstance(home, DeviceHome)
        return home
