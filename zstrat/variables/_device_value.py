"""The value of a variable that stays on this process's devices, and what is beside it.

Where several devices have a replica each, the value is one array that all of them have;
or, of a variable that replicas update each for itself, an array ``[copies, ...]`` of
which each device has its row. From outside of the replicas the value of such a variable
is the first copy; of one whose synchronization is ON_READ, what its aggregation makes
of all of them.

The variables of one strategy live between steps where its `Residence` is.

Law of the file: whoever makes a next value has the turn (`Residence`), and holds the
lock, too, while the present one is given away, or while several fields change.
"""

from __future__ import annotations

import abc
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from zstrat.errors import DataLossError

from ._spec import VariableAggregation
from .gradients._slots import Beside

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from jax.sharding import Mesh, Sharding

    from .gradients._slots import SlotRule


class Residence(abc.ABC):
    """Where the variables of one strategy live.

    ``names`` are TF's names of the devices that keep the copies of the replicas, in
    their order, or of the one that keeps all of them. ``mesh`` are the devices of all
    processes, if values are arrays over them. ``steps`` is how many steps have put back
    new values. ``copies`` is how many replicas of this
    process may have a copy each, ``parted`` how many variables have begun to have them.
    ``travels``: values are kept elsewhere than steps run. ``has_failed``: a step did,
    so that values may be gone.

    Who makes next values of the present ones has the ``turn``, from the first look to
    the last value put back; a step over several parts of the CPU, until they have
    computed. Who reads takes the ``lock``, which a step holds only while the values are
    given away: what computes a step may read a variable, in another thread. The turn is
    taken before the lock, and nobody waits for a value while holding the lock.
    """

    travels: bool = False

    def __init__(
        self, names: Sequence[str], mesh: Mesh | None = None, copies: int = 1
    ) -> None:
        self.names = tuple(names)
        self.mesh = mesh
        self.copies = copies
        self.parted = 0
        self.steps = 0
        self.has_failed = False
        self.turn = threading.RLock()
        self.lock = threading.RLock()

    @abc.abstractmethod
    def place(self, array: Any) -> jax.Array:
        """Puts a copy of an array where the values live."""

    @abc.abstractmethod
    def place_apart(self, copies: Any) -> jax.Array:
        """Puts a copy of an array ``[copies, ...]`` where the values live, a row on
        each device."""

    @property
    @abc.abstractmethod
    def sharding(self) -> Sharding | None:
        """That of values, None if they live on one device."""

    @property
    @abc.abstractmethod
    def sharding_apart(self) -> Sharding | None:
        """That of copies, None if they live on one device."""

    @abc.abstractmethod
    def mark(self) -> Hashable:
        """What a program of a step depends on, but for which variables have copies; it
        is not used under another one."""

    def replicas(self) -> tuple[int, int]:
        """Number of the first replica of this process, and how many all processes
        have."""
        return 0, self.copies

    @abc.abstractmethod
    def settle(self) -> None:
        """Called before values are used, without the lock: they may have to come from
        other processes first."""

    def sent(self, trees: Any, shardings: Any) -> Any:
        """Pytrees of arrays that are kept here, where a step runs; ``shardings`` is a
        prefix of them."""
        del shardings
        return trees

    def returned(self, trees: Any) -> Any:
        """The inverse, of what the step made."""
        return trees


def shares_of(value: Any, count: int) -> Any:
    """Equal shares ``[count, ...]`` that add up to an array. Of integers the first ones
    are larger by one where there is a remainder: none of what was counted is lost."""
    dtype = value.dtype
    numbers = np.arange(count).reshape(count, *[1] * value.ndim)
    if dtype.kind in "iu":
        # There may be more copies than a byte counts.
        wide = value.astype(np.int32) if dtype.itemsize < 4 else value
        return (wide // count + (numbers < wide % count)).astype(dtype)
    return (value / count + np.zeros_like(numbers, dtype)).astype(dtype)


def cut_for_mean(value: Any, count: int) -> list[Any]:
    """Two arrays of integers, whose sums over ``count`` values `mean_of_cut` takes. A
    sum of the values may not fit their dtype, and no float has all their digits."""
    wide = value.astype(np.int32) if value.dtype.itemsize < 4 else value
    return [wide // count, wide % count]


def summed_for_mean(copies: Any, count: int) -> list[Any]:
    """What copies ``[n, ...]`` add to the two sums over ``count`` values: ``[1, ...]``,
    because numpy warns of single numbers that go around, and may do so here."""
    cut = cut_for_mean(copies, count)
    return [x.sum(0, dtype=x.dtype, keepdims=True) for x in cut]


def mean_of_cut(sums: Sequence[Any], count: int) -> Any:
    """The mean of integers, exactly; what is behind the point is left out."""
    quotients, rests = sums
    floor = quotients + rests // count
    return floor + ((floor < 0) & (rests % count != 0))


def aggregated(copies: Any, aggregation: VariableAggregation) -> Any:
    """What copies ``[count, ...]`` are together, in their dtype; NONE: the first."""
    match aggregation:
        case VariableAggregation.SUM:
            return copies.sum(0, dtype=copies.dtype)
        case VariableAggregation.MEAN if copies.dtype.kind in "iu":
            count = copies.shape[0]
            sums = summed_for_mean(copies, count)
            return mean_of_cut(sums, count)[0].astype(copies.dtype)
        case VariableAggregation.MEAN:
            return copies.mean(0).astype(copies.dtype)
        case _:
            return copies[0]


# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready


class DeviceValue:
    """The value of one variable, and the slots of the optimizers that moved it, as
    steps take them and put them back."""

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
        # Copies that are not assigned yet, since all were lost.
        self._missing: frozenset[int] = frozenset()
        self._slots: dict[int, Beside] = {}
        if self.is_apart:
            self._value = residence.place_apart(self._equal(value))
        else:
            self._value = residence.place(value)

    def value(self) -> jax.Array:
        """The value, where steps run."""
        here = self.residence
        return here.sent(self._value, self.sharding) if here.travels else self._value

    def slot_leaves(self, rule: SlotRule, name: str = "") -> list[Any]:
        """What an optimizer keeps beside it, made if it is not there yet. The list is
        not to be changed.

        Args:
            name: The variable's, for errors.

        Raises:
            ValueError: What is there is not what it keeps.
        """
        beside = self._slots.get(rule.id)
        if beside is None:
            made = rule.beside(rule.initial(self._first()))
            beside = self._slots[rule.id] = self._placed(made)
        elif beside.names is not rule.names:
            beside = self._slots[rule.id] = rule.fitted(name, beside)
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
            self._put_apart(copies)

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
        self._begin_anew(self.placed(self._shared_out(value)))

    @property
    def is_lost(self) -> bool:
        """Whether a step was given value or slots, and put nothing back; or a copy is
        still missing after that."""
        return self._is_gone or bool(self._missing)

    @property
    def _is_gone(self) -> bool:
        # A copy of the slots: who holds the lock alone may look while others come.
        return self._value.is_deleted() or any(
            beside.is_lost for beside in [*self._slots.values()]
        )

    def like(self) -> np.ndarray:
        """Zeros of the form of what is shown, whatever became of the value."""
        shape = self._value.shape[1:] if self.is_apart else self._value.shape
        return np.zeros(shape, self._value.dtype)

    def require_kept(self, name: str, copy: int | None = None) -> None:
        """Refuses a value that is gone; or one copy of it.

        Raises:
            DataLossError: Names the variable, and says what to do.
        """
        if self._lacks(copy):
            raise DataLossError(
                "this process",
                name,
                "its value is gone, because a step failed while it was computing the "
                "next one: restore a checkpoint, take the values of another process "
                "(MultiWorkerMirroredStrategy.reform), or assign a value",
            )

    def take_over_slots(self, rule: SlotRule, leaves: list[Any]) -> None:
        """What an optimizer keeps from now on. They are nobody else's."""
        here = self.residence
        made = here.returned(leaves) if here.travels else leaves
        self._slots[rule.id] = rule.beside(made)

    def shown_slots(self) -> dict[int, Beside]:
        """What optimizers keep beside it, by their numbers, from outside of steps."""
        return {number: each.on_host() for number, each in self._slots.items()}

    def take_over_shown_slots(self, optimizer: int, slots: Beside) -> None:
        """The inverse, for one optimizer."""
        self._slots[optimizer] = self._placed(slots)

    def optimizers(self) -> frozenset[int]:
        """The numbers of those that keep something beside it."""
        return frozenset(self._slots)

    def _lacks(self, copy: int | None) -> bool:
        return self.is_lost if copy is None else self._is_gone or copy in self._missing

    def _looked_at(
        self, name: str, seen: Callable[[], np.ndarray], copy: int | None = None
    ) -> np.ndarray:
        """What is seen of the value. Who waits for it holds no lock: what computes it
        may read other variables."""
        here = self.residence
        here.settle()
        with here.lock:
            self.require_kept(name, copy)
            value = self._value
        with suppress(
            Exception
        ):  # if it is given away now, or is none: it is seen below
            _wait(value)
        with here.lock:
            if self._value is value and not self._lacks(copy):
                return seen()
        with here.turn:
            self.require_kept(name, copy)
            return seen()

    def _all_copies(self) -> np.ndarray:
        value = np.asarray(self._value)
        return value if self.is_apart else self._equal(value)

    def _put_apart(
        self, copies: np.ndarray, missing: frozenset[int] = frozenset()
    ) -> None:
        """A copy for each replica, from now on."""
        placed = self.residence.place_apart(copies)
        with self.residence.lock:
            was_apart = self.is_apart
            self._value, self._missing, self.is_apart = placed, missing, True
        if not was_apart:
            # Last: who traces without the lock and finds this number finds the copies.
            self.residence.parted += 1

    def _begin_anew(self, placed: jax.Array) -> None:
        """A value that depends on nothing: of slots those stay that are whole."""
        self._forget_void_slots()
        with self.residence.lock:
            self._value, self._missing = placed, frozenset()

    def _forget_void_slots(self) -> None:
        for number in [n for n, each in self._slots.items() if each.is_void]:
            del self._slots[number]

    @property
    def _is_void(self) -> bool:
        """Whether nothing can be made of value or slots. Waits for them."""
        found = [Beside((), [self._value], ()), *self._slots.values()]
        return any(each.is_void for each in found)

    def _placed(self, slots: Beside) -> Beside:
        place = self.residence.place
        leaves = [place(np.asarray(x)) for x in slots.leaves]
        return Beside(slots.names, leaves, slots.rows)

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
