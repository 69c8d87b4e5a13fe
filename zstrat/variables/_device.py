"""A variable whose value stays on this process's devices between steps.

A step takes value and slots as they are, gives them to XLA to be overwritten, and puts
back what came out. Outside of steps the variable is read and updated as any other of
this process.

Where several devices have a replica each, the value is one array that all of them have;
or, of a variable that replicas update each for itself, an array ``[copies, ...]`` of
which each device has its row. From outside of the replicas the value of such a variable
is the first copy; of one whose synchronization is ON_READ, what its aggregation makes
of all of them.

Law of the file: whoever makes a next value has the turn (`Residence`), and holds the
lock, too, while the present one is given away, or while several fields change.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from zstrat.errors import DataLossError
from zstrat.wire import UpdateOp

from ._copies import aggregated, shares_of
from ._local import moved
from ._slots import Beside, named_slots, slots_from
from ._spec import VariableAggregation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax.sharding import Sharding

    from ._home import HomeRows, HomeUpdate, Operands
    from ._optimizer import Optimizer
    from ._residence import Residence
    from ._variable import Variable

# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready


class DeviceHome:
    """One variable on the devices of this process, with the slots of the optimizers
    that moved it."""

    def __init__(
        self,
        value: np.ndarray,
        residence: Residence,
        on_read: VariableAggregation | None = None,
    ) -> None:
        self.residence = residence
        # Not counted as parted: no program was traced before it was there.
        self.is_apart = on_read is not None and residence.copies > 1
        self._on_read = on_read
        self._copy_keys: tuple[int, ...] = ()
        self._slots: dict[int, Beside] = {}
        if self.is_apart:
            self._value = residence.place_apart(self._equal(value))
        else:
            self._value = residence.place(value)

    # ---- for steps, in their turn -------------------------------------------------

    def value(self) -> jax.Array:
        """The value, where steps run."""
        here = self.residence
        return here.sent(self._value, self.sharding) if here.travels else self._value

    def slots(self, optimizer: Optimizer) -> Any:
        """What the optimizer keeps beside it, made if it is not there yet."""
        leaves = self.slot_leaves(optimizer)
        return self._slots[optimizer.id].treedef.unflatten(leaves)

    def slot_leaves(self, optimizer: Optimizer) -> list[Any]:
        """Its leaves. The list is not to be changed."""
        beside = self._slots.get(optimizer.id)
        if beside is None:
            made = optimizer.transformation.init(self._first())
            beside = self._slots[optimizer.id] = self._placed(made)
        here = self.residence
        if not here.travels:
            return beside.leaves
        sent: list[Any] = here.sent(beside.leaves, here.sharding)
        return sent

    def part(self) -> None:
        """Keeps one copy for each replica from now on, all equal so far."""
        with self.residence.turn:
            self.residence.settle()
            if self.is_apart:
                return  # another thread was here first
            copies = self._equal(np.asarray(self._value))
            placed = self.residence.place_apart(copies)
            with self.residence.lock:
                self._value, self.is_apart = placed, True
            # Last: who traces without the lock and finds this number finds the copies.
            self.residence.parted += 1

    @property
    def sharding(self) -> Sharding | None:
        """That of the value, None if it lives on one device."""
        here = self.residence
        return here.sharding_apart if self.is_apart else here.sharding

    @property
    def kept(self) -> Sharding:
        """Where the value lies between steps."""
        where: Sharding = self._value.sharding
        return where

    def placed(self, array: Any) -> jax.Array:
        """A copy of an array of the value's form, where the value lives."""
        here = self.residence
        return here.place_apart(array) if self.is_apart else here.place(array)

    def take_over(self, value: jax.Array) -> None:
        """The value from now on. It is nobody else's."""
        here = self.residence
        self._value = here.returned(value) if here.travels else value

    def shown(self) -> np.ndarray:
        """The value from outside of the replicas."""
        return self._seen()

    def take_over_shown(self, value: np.ndarray) -> None:
        """The inverse: every copy begins anew, and so do optimizers whose slots are
        lost."""
        self._value = self.placed(self._shared_out(value))
        for number in [n for n, each in self._slots.items() if each.is_lost]:
            del self._slots[number]

    @property
    def is_lost(self) -> bool:
        """Whether a step was given value or slots, and put nothing back."""
        # A copy of the slots: who holds the lock alone may look while others come.
        return self._value.is_deleted() or any(
            beside.is_lost for beside in [*self._slots.values()]
        )

    def like(self) -> np.ndarray:
        """Zeros of the form of what is shown, whatever became of the value."""
        shape = self._value.shape[1:] if self.is_apart else self._value.shape
        return np.zeros(shape, self._value.dtype)

    def require_kept(self, name: str) -> None:
        """Refuses a value that is gone.

        Raises:
            DataLossError: Names the variable, and says what to do.
        """
        if self.is_lost:
            raise DataLossError(
                "this process",
                name,
                "its value is gone, because a step failed while it was computing the "
                "next one: restore a checkpoint, take the values of another process "
                "(MultiWorkerMirroredStrategy.reform), or assign a value",
            )

    def take_over_slots(self, optimizer: Optimizer, leaves: list[Any]) -> None:
        """The leaves of what the optimizer keeps from now on; it keeps something
        already. They are nobody else's."""
        here = self.residence
        made = here.returned(leaves) if here.travels else leaves
        treedef = self._slots[optimizer.id].treedef
        self._slots[optimizer.id] = Beside(made, treedef)

    def optimizers(self) -> frozenset[int]:
        """The numbers of those that keep something beside it."""
        return frozenset(self._slots)

    # ---- the home of a variable ----------------------------------------------------

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
            if not self.is_apart:
                self.part()
            self._value = self.residence.place_apart(copies)

    async def read_async(self, variable: Variable) -> np.ndarray:
        return self.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        with self.residence.turn:
            self.prepare(op)
            before = self.read(variable)
            kept = None if optimizer is None else self.slots(optimizer)
            dtype = variable.spec.numpy_dtype
            if self.is_apart:
                apart = operands[0].ndim > len(variable.shape)  # a share for each copy
                given = zip(operands[0]) if apart else itertools.repeat(operands)
                moves = [
                    moved(row, kept, op, own, optimizer)
                    for row, own in zip(self.copies(variable), given, strict=False)
                ]
                made = np.stack([np.asarray(value, dtype) for value, _ in moves])
                slots = moves[0][1]
            else:
                value, slots = moved(before, kept, op, operands, optimizer)
                made = np.asarray(value, dtype)
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

    def prepare(self, op: UpdateOp) -> None:
        """Before an update: what is lost is made anew, as zeros, for an assignment,
        which does not depend on it. Of several copies each waits for its own."""
        with self.residence.turn:
            self.residence.settle()  # first: slots may come with the value
            if self.is_lost and op is UpdateOp.ASSIGN:
                self.take_over_shown(self.like())

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

    def _looked_at(self, name: str, seen: Callable[[], np.ndarray]) -> np.ndarray:
        """What is seen of the value. Who waits for it holds no lock: what computes it
        may read other variables."""
        here = self.residence
        here.settle()
        with here.lock:
            self.require_kept(name)
            value = self._value
        with suppress(
            Exception
        ):  # if it is given away now, or is none: it is seen below
            _wait(value)
        with here.lock:
            if self._value is value and not self.is_lost:
                return seen()
        with here.turn:
            self.require_kept(name)
            return seen()

    def _all_copies(self) -> np.ndarray:
        value = np.asarray(self._value)
        return value if self.is_apart else self._equal(value)

    def _placed(self, slots: Any) -> Beside:
        leaves, treedef = jax.tree.flatten(slots)
        return Beside([self.residence.place(np.asarray(x)) for x in leaves], treedef)

    def _first(self) -> np.ndarray:
        """The value, or the first copy."""
        # Of memory that numpy looks at XLA makes no new value in place.
        value = np.asarray(self._value)
        return np.asarray(value[0]) if self.is_apart else value

    def _seen(self) -> np.ndarray:
        """The value from outside of the replicas."""
        if not self.is_apart or self._on_read is None:
            return self._first()
        return np.asarray(aggregated(np.asarray(self._value), self._on_read))

    def _shared_out(self, value: np.ndarray) -> np.ndarray:
        """Copies that make up the value, with those of other processes."""
        copies = self._equal(value)
        if self._on_read is VariableAggregation.SUM:
            first, total = self.residence.replicas()
            copies = shares_of(value, total)[first : first + len(copies)]
        return np.asarray(copies if self.is_apart else copies[0])

    def _equal(self, value: np.ndarray) -> np.ndarray:
        """Copies of a value, ``[copies, ...]``."""
        return np.broadcast_to(value, (self.residence.copies, *value.shape))
