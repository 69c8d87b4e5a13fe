"""Where the value of a variable lives between steps, and who may change it.

A storage answers reads and takes updates, each in a blocking and an awaitable form. The
parameter servers are a storage (the session's), this process is one for each of its
variables (`_local`, `_device`), and a handle that was unpickled on another task has
none (`_local.UnboundStorage`). The functions here go through several variables, and ask
each storage once.

Storages on devices share the `DevicePool` of their strategy. Law of pools: whoever
makes a next value has the turn, and holds the lock, too, while the present one is given
away, or while several fields change. Law of `JointState`: what a storage has taken out
is not in the list any more, and who finds the list whole finds the state of every
storage in it.
"""

from __future__ import annotations

import abc
import threading
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import numpy as np

from .gradients._slots import OptimizerHandle

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    import jax
    from jax.sharding import Mesh, Sharding

    from zstrat.wire import UpdateOp

    from ._spec import VariableAggregation, VariableSpec, VariableSynchronization
    from .gradients._slots import SlotRule


Operands = tuple[np.ndarray, ...]
StorageRows: TypeAlias = "tuple[VariableHandle, np.ndarray]"
"""A variable and indices ``[n]`` of its first axis."""
StorageUpdate: TypeAlias = (
    "tuple[VariableHandle, UpdateOp, Operands, OptimizerHandle | None]"
)
"""What is to be done to a variable, for its storage."""


class VariableHandle(Protocol):
    """A variable in one piece, as storages, tables and recorders know it: what it is,
    and where its value lives."""

    @property
    def spec(self) -> VariableSpec: ...

    @property
    def storage(self) -> Storage: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def device(self) -> str: ...

    @property
    def aggregation(self) -> VariableAggregation: ...

    @property
    def synchronization(self) -> VariableSynchronization: ...

    @property
    def is_brought_together(self) -> bool:
        """Whether no storage has rows of it, see `Variable.is_brought_together`."""
        ...

    @property
    def components(self) -> tuple[VariableHandle, ...]:
        """The variable itself, which is in one piece."""
        ...

    def value(self) -> Any:
        """The value, here and now."""
        ...

    def numpy(self) -> np.ndarray: ...

    def _read_now(self) -> np.ndarray:
        """The value, from its storage."""
        ...

    async def _read_now_async(self) -> np.ndarray: ...


class Storage(Protocol):
    """Keeps values. The caller has checked shapes and dtypes of the operands."""

    def read(self, variable: VariableHandle) -> np.ndarray:
        """The value, as an array that nobody writes to any more."""
        ...

    def read_many(self, variables: Sequence[VariableHandle]) -> list[np.ndarray]:
        """The values of several variables, in order. One request to each ps."""
        ...

    async def read_many_async(
        self, variables: Sequence[VariableHandle]
    ) -> list[np.ndarray]: ...

    def read_rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        """Rows ``[n, ...]`` of variables, in order. One request to each ps."""
        ...

    async def read_rows_async(
        self, parts: Sequence[StorageRows]
    ) -> list[np.ndarray]: ...

    def update_many(self, updates: Sequence[StorageUpdate]) -> None:
        """Applies updates of different variables; returns when they are visible to
        every reader. One request to each ps."""
        ...

    async def update_many_async(self, updates: Sequence[StorageUpdate]) -> None: ...


class KnowsSlots(OptimizerHandle, Protocol):
    """An optimizer that knows what it keeps beside a variable of this process."""

    def slot_rule(self, variable: VariableHandle) -> SlotRule:
        """What the optimizer keeps beside the variable.

        Raises:
            RuntimeError: It has not seen the variable yet.
        """
        ...


@runtime_checkable
class KeepsSlots(Protocol):
    """A storage whose slots can be looked at, and assigned, while training goes on."""

    def read_slots(
        self, optimizer: OptimizerHandle, variables: Sequence[VariableHandle]
    ) -> list[Mapping[str, np.ndarray]]:
        """What the optimizer keeps beside each variable, by name; nothing, if it has
        not moved it yet."""
        ...

    def write_slot(
        self,
        optimizer: KnowsSlots,
        variable: VariableHandle,
        name: str,
        value: np.ndarray,
    ) -> None:
        """Assigns one of them, which is there, or is made of the tree of the
        optimizer."""
        ...


def read_all(variables: Iterable[VariableHandle]) -> list[np.ndarray]:
    """The values of variables, in order; see `Storage.read`.

    Cost: one request to each storage.
    """
    wanted = list(variables)
    found: dict[int, np.ndarray] = {}
    for storage, places in _storages(wanted):
        values = storage.read_many([wanted[place] for place in places])
        found.update(zip(places, values, strict=True))
    return [found[place] for place in range(len(wanted))]


async def read_all_async(variables: Iterable[VariableHandle]) -> list[np.ndarray]:
    """`read_all`, without blocking the running loop."""
    wanted = list(variables)
    found: dict[int, np.ndarray] = {}
    for storage, places in _storages(wanted):
        values = await storage.read_many_async([wanted[place] for place in places])
        found.update(zip(places, values, strict=True))
    return [found[place] for place in range(len(wanted))]


def read_parts(parts: Sequence[StorageRows]) -> list[np.ndarray]:
    """Rows ``[n, ...]`` of variables, in order. Cost: one request to each storage."""
    found: dict[int, np.ndarray] = {}
    for storage, places in _storages([variable for variable, _ in parts]):
        rows = storage.read_rows([parts[place] for place in places])
        found.update(zip(places, rows, strict=True))
    return [found[place] for place in range(len(parts))]


async def read_parts_async(parts: Sequence[StorageRows]) -> list[np.ndarray]:
    """`read_parts`, without blocking the running loop."""
    found: dict[int, np.ndarray] = {}
    for storage, places in _storages([variable for variable, _ in parts]):
        rows = await storage.read_rows_async([parts[place] for place in places])
        found.update(zip(places, rows, strict=True))
    return [found[place] for place in range(len(parts))]


def update_all(updates: Sequence[StorageUpdate]) -> None:
    """Applies updates. Cost: one request to each storage."""
    for storage, places in _storages([update[0] for update in updates]):
        storage.update_many([updates[place] for place in places])


async def update_all_async(updates: Sequence[StorageUpdate]) -> None:
    """`update_all`, without blocking the running loop.

    Cancellation: some of the updates may have been applied.
    """
    for storage, places in _storages([update[0] for update in updates]):
        await storage.update_many_async([updates[place] for place in places])


def _storages(variables: Sequence[VariableHandle]) -> list[tuple[Storage, list[int]]]:
    """Each storage with the places of its variables, in order of the first ones."""
    places: dict[int, list[int]] = {}
    for place, variable in enumerate(variables):
        places.setdefault(id(variable.storage), []).append(place)
    return [(variables[found[0]].storage, found) for found in places.values()]


class DevicePool(abc.ABC):
    """Where the variables of one strategy live.

    Args:
        names: TF's names of the devices that keep the copies of the replicas, in their
            order, or of the one that keeps all of them.
        mesh: The devices of all processes, if values are arrays over them.
        copies: How many replicas of this process may have a copy each.

    Whoever makes next values of the present ones has the ``turn``, from the first look
    to the last value put back; a step over several parts of the CPU has it until they
    have computed. Whoever reads takes the ``lock``, which a step holds only while the
    values are given away: what computes a step may read a variable, in another thread.
    The turn is taken before the lock, and nobody waits for a value while holding the
    lock.
    """

    travels: bool = False
    """Whether values are kept on another device than that where steps run."""

    def __init__(
        self, names: Sequence[str], mesh: Mesh | None = None, copies: int = 1
    ) -> None:
        self.names = tuple(names)
        self.mesh = mesh
        self.copies = copies
        self.parted = 0
        """How many variables have begun to have a copy for each replica."""
        self.steps = 0
        """How many steps have put back new values."""
        self.has_failed = False
        """Whether a step failed, so that values may be gone."""
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
        """The sharding of values; None if they live on one device."""

    @property
    @abc.abstractmethod
    def sharding_apart(self) -> Sharding | None:
        """The sharding of copies; None if they live on one device."""

    @abc.abstractmethod
    def fingerprint(self) -> Hashable:
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
        """Pytrees that a step made, where values are kept: undoes `sent`."""
        return trees


class JointState:
    """Values and slots of several variables, in the order of a step's program.

    A step computes the next state of all that it moves, and the next call of the same
    program takes all of it again. To hand each variable its own in between would cost
    more than many a step. So the list is kept as it is, each storage knows its place in
    it, and takes its own out when somebody asks the storage for it.

    ``arrays`` are replaced by those of the next step, by whoever has the turn and the
    lock of the pool. ``is_whole``: no storage has taken its own out.
    """

    __slots__ = ("arrays", "is_whole")

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.is_whole = True

    def taken(self) -> list[Any] | None:
        """All arrays, in a list of the caller's; None: some are elsewhere."""
        found = self.arrays[:]
        # Asked afterwards: a storage says so before it takes anything out.
        return found if self.is_whole else None


class JointPlace(NamedTuple):
    """Where in the list the arrays of one storage are: the value, and from where to
    where the slots of each optimizer."""

    state: JointState
    value: int
    slots: tuple[tuple[SlotRule, int, int], ...]

    def leave(self) -> None:
        """The storage has its arrays elsewhere, and they are not kept here as well."""
        state = self.state
        state.is_whole = False
        state.arrays[self.value] = None
        for _, first, end in self.slots:
            state.arrays[first:end] = [None] * (end - first)
