"""A variable whose value stays on this process's devices between steps.

A step takes value and slots as they are, gives them to XLA to be overwritten, and puts
back what came out (`DeviceValue`). Outside of steps the variable is read and updated as
any other of this process.

Law of the file: who changes it has the turn (`Residence`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from zstrat.wire import UpdateOp

from ._apply import apply
from ._device_value import DeviceValue
from ._local import moved
from ._slots import named_slots, slots_from

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._home import HomeRows, HomeUpdate, Operands
    from ._optimizer import Optimizer
    from ._variable import Variable


class DeviceHome(DeviceValue):
    """One variable on the devices of this process, with the slots of the optimizers
    that moved it."""

    def device_name(self, copy: int = 0) -> str:
        """TF's name of the device that keeps a copy; without a number, the first."""
        names = self.residence.names
        return names[copy if len(names) > 1 else 0]

    def read(self, variable: Variable) -> np.ndarray:
        return self._looked_at(variable.name, self._seen)

    def copies(self, variable: Variable) -> np.ndarray:
        """The copies of the replicas, ``[copies, ...]``, as an array that nobody writes
        to.

        Raises:
            DataLossError: They are lost.
        """
        return self._looked_at(variable.name, self._all_copies)

    def copy(self, variable: Variable, number: int) -> np.ndarray:
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

    def take_copies_of(self, variable: Variable, other: DeviceHome) -> None:
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
        variable: Variable,
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

    async def read_async(self, variable: Variable) -> np.ndarray:
        return self.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        dtype = variable.spec.numpy_dtype
        with self.residence.turn:
            self.residence.settle()  # first: slots may come with the value
            is_anew = op is UpdateOp.ASSIGN
            if not is_anew:
                self.require_kept(variable.name)
            kept = None if optimizer is None else self.slots(optimizer)
            if self.is_apart:
                apart = operands[0].ndim > len(variable.shape)  # a share for each copy
                given = zip(operands[0]) if apart else itertools.repeat(operands)
                # An assignment does not look at what may be lost, or came to nothing.
                old = self._equal(self.like()) if is_anew else np.asarray(self._value)
                moves = [
                    moved(row, kept, op, own, optimizer)
                    for row, own in zip(old, given, strict=False)
                ]
                made = np.stack([np.asarray(value, dtype) for value, _ in moves])
                slots = moves[0][1]
            else:
                value = self.like() if is_anew else np.asarray(self._value)
                value, slots = moved(value, kept, op, operands, optimizer)
                made = np.asarray(value, dtype)
            if is_anew:
                self._begin_anew(self.placed(made))
                return
            placed = self.placed(made)
            if optimizer is not None:
                self._slots[optimizer.id] = self._placed(slots)
            self._value = placed

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

    def taken(
        self, name: str = ""
    ) -> tuple[np.ndarray, dict[int, dict[str, np.ndarray]]]:
        """Value and slots of one moment: by optimizer, by path in its state.

        Raises:
            DataLossError: A step failed while it was computing the next ones.
        """
        with self.residence.turn:
            self.residence.settle()
            self.require_kept(name)
            slots = {n: named_slots(each.tree()) for n, each in self._slots.items()}
            return self._seen(), slots

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
        with self.residence.turn:
            # Values of other processes that are still to come would replace these.
            self.residence.settle()
            # Of the value the form alone: it may be gone, and is made anew here.
            made = {
                each.id: None
                if named is None
                else self._placed(slots_from(each, self.like(), named))
                for each, named in slots.items()
            }
            if value is not None:
                self.take_over_shown(np.asarray(value))
            for number, beside in made.items():
                self._slots.pop(number, None)
                if beside is not None:
                    self._slots[number] = beside
