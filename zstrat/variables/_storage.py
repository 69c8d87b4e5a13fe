"""The spec of a variable, and the storage of its value.

A storage keeps the value of a variable between steps. It answers reads and applies
updates, each in a blocking and an awaitable form. All variables on parameter servers
share the storage of their session; each variable of this process has a storage of its
own (`_local`, `_device`); a handle that was unpickled on another task has an
`UnboundStorage`, which refuses everything. The functions here take several variables
and send one request to each storage.

`VariableSpec` describes a variable without its value. Law: a spec holds and sends no
value. It is equal on every task, so it identifies a variable in plans, in pickled step
functions and on parameter servers.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from zstrat.wire import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zstrat.wire import UpdateOp

    from .gradients._slots import OptimizerHandle


LOCAL: Final = -1
"""Value of `VariableSpec.ps` for a variable that is stored in the process that created
it."""
RESIDENT: Final = -2
"""Value of `VariableSpec.ps` for an array that each worker keeps between windows
(groups of local training steps)."""


class VariableSynchronization(enum.Enum):
    """When the copies that replicas have of a variable are aggregated (TF's names)."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the updates of several replicas are combined to one (TF's names)."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3  # noqa: PIE796  # an alias
    """TF 1.12's name for ONLY_FIRST_REPLICA."""


@dataclass(frozen=True, slots=True)
class ComponentRows:
    """Which rows of a sharded variable a component has.

    The component has rows ``[offset, offset + shape[0])`` of ``rows``; it is component
    ``index`` of ``count`` of the variable named ``whole``.
    """

    whole: str
    index: int
    count: int
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """Name, shape, dtype and location of one variable; ``part`` if the variable is a
    component.

    ``key`` is unique in the session: not negative for a variable on a parameter server,
    negative for others. ``ps`` is the task index of the server, or `LOCAL` or
    `RESIDENT`.
    """

    key: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    ps: int = LOCAL
    trainable: bool = True
    aggregation: VariableAggregation = VariableAggregation.NONE
    synchronization: VariableSynchronization = VariableSynchronization.AUTO
    part: ComponentRows | None = None
    buckets: tuple[int, int] | None = None
    """For a part of a hash table: the part has the ids in buckets ``[first, end)``
    (`zstrat.ids`), and the first axis of its shape is nominal."""

    @property
    def device(self) -> str:
        """TF's name of the device. For a variable of one process it is the CPU of its
        host, as only that process knows the real device (`Variable.device`)."""
        if self.ps < 0:
            return "/job:localhost/replica:0/task:0/device:CPU:0"
        return f"/job:ps/replica:0/task:{self.ps}/device:CPU:0"

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy knows it (bfloat16 and the float8 types included)."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the value; 0 for a hash table, whose rows are created later."""
        if self.buckets is not None:
            return 0
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    def __str__(self) -> str:
        if self.buckets is not None:
            row = list(self.shape[1:])
            return f"table {self.name!r} (any id, rows {self.dtype}{row})"
        return f"variable {self.name!r} ({self.dtype}{list(self.shape)})"


Operands = tuple[np.ndarray, ...]
StorageRows: TypeAlias = "tuple[VariableHandle, np.ndarray]"
"""A variable and indices ``[n]`` of its first axis."""
StorageUpdate: TypeAlias = (
    "tuple[VariableHandle, UpdateOp, Operands, OptimizerHandle | None]"
)
"""One update: the variable, the operation, its operands, the optimizer or None."""


class VariableHandle(Protocol):
    """A variable that is not sharded, in the form that storages, tables and recorders
    use."""

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
    def is_aggregated_on_read(self) -> bool:
        """Whether reads aggregate copies, so that no storage can return single rows;
        see the property of `Variable`."""
        ...

    @property
    def components(self) -> tuple[VariableHandle, ...]:
        """The variable itself, its only component, as it is not sharded."""
        ...

    def value(self) -> Any:
        """Reads the value; traced inside a step, otherwise from the storage."""
        ...

    def numpy(self) -> np.ndarray: ...

    def _read_now(self) -> np.ndarray:
        """Reads the value from its storage."""
        ...

    async def _read_now_async(self) -> np.ndarray: ...


class Storage(Protocol):
    """Keeps the values of variables. Callers check shapes and dtypes of operands."""

    def read(self, variable: VariableHandle) -> np.ndarray:
        """Returns the value of one variable as a read-only array."""
        ...

    def read_many(self, variables: Sequence[VariableHandle]) -> list[np.ndarray]:
        """Reads several variables. Returns the values in order; sends one request to
        each parameter server."""
        ...

    async def read_many_async(
        self, variables: Sequence[VariableHandle]
    ) -> list[np.ndarray]: ...

    def read_rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        """Reads rows of several variables. Returns an array ``[n, ...]`` for each part,
        in order; sends one request to each parameter server."""
        ...

    async def read_rows_async(
        self, parts: Sequence[StorageRows]
    ) -> list[np.ndarray]: ...

    def update_many(self, updates: Sequence[StorageUpdate]) -> None:
        """Applies updates of different variables, with one request to each parameter
        server.

        When it returns, every reader sees the updates.
        """
        ...

    async def update_many_async(self, updates: Sequence[StorageUpdate]) -> None: ...


@runtime_checkable
class KeepsSlots(Protocol):
    """A storage whose optimizer slots can be read and assigned between steps."""

    def read_slots(
        self, optimizer: OptimizerHandle, variables: Sequence[VariableHandle]
    ) -> list[Mapping[str, np.ndarray]]:
        """Reads the slots that the optimizer keeps for each variable: a mapping from
        slot names to arrays.

        The mapping is empty for a variable that the optimizer has not updated yet.
        """
        ...

    def write_slot(
        self,
        optimizer: OptimizerHandle,
        variable: VariableHandle,
        name: str,
        value: np.ndarray,
    ) -> None:
        """Assigns one slot of an optimizer for a variable; creates all slots first if
        the optimizer has none for it yet."""
        ...


@runtime_checkable
class KeepsTables(Protocol):
    """A storage of hash tables (`HashTable`)."""

    def table_sizes(
        self, parts: Sequence[VariableHandle]
    ) -> list[tuple[int, int, int, int]]:
        """Returns for each part of a table: its number of rows, its bytes, its present
        cut (a position in the sequence of changes), and the number of ids that are
        counted but have no row yet."""
        ...

    def table_rows(
        self,
        part: VariableHandle,
        first: int,
        last: int,
        since: int = -1,
        ids: Sequence[np.ndarray] = (),
    ) -> Sequence[np.ndarray]:
        """Reads ids ``[n]`` and rows ``[n, ...]`` of a part of a table, in the buckets
        from ``first`` to before ``last``, sorted by bucket and then by id.

        With ``since``, an earlier cut, it reads the rows that have changed since that
        cut, and also returns the ids ``[m]`` that were removed and the present cut,
        ``[1]``. ``ids`` may have one array, int64 ``[k]``: then these ids are read
        instead of buckets, those that have rows, in their order.
        """
        ...


def read_all(variables: Iterable[VariableHandle]) -> list[np.ndarray]:
    """Reads variables; returns their values in order. Cost: one request to each
    storage."""
    wanted = list(variables)
    values: list[Any] = [None] * len(wanted)
    for storage, numbers in _by_storage(wanted):
        read = storage.read_many([wanted[n] for n in numbers])
        _scatter(values, numbers, read)
    return values


async def read_all_async(variables: Iterable[VariableHandle]) -> list[np.ndarray]:
    """Reads variables like `read_all`, without blocking the running loop."""
    wanted = list(variables)
    values: list[Any] = [None] * len(wanted)
    for storage, numbers in _by_storage(wanted):
        read = await storage.read_many_async([wanted[n] for n in numbers])
        _scatter(values, numbers, read)
    return values


def read_parts(parts: Sequence[StorageRows]) -> list[np.ndarray]:
    """Reads rows of several variables; returns an array ``[n, ...]`` for each part, in
    order. Cost: one request to each storage."""
    rows: list[Any] = [None] * len(parts)
    for storage, numbers in _by_storage([variable for variable, _ in parts]):
        _scatter(rows, numbers, storage.read_rows([parts[n] for n in numbers]))
    return rows


async def read_parts_async(parts: Sequence[StorageRows]) -> list[np.ndarray]:
    """Reads rows like `read_parts`, without blocking the running loop."""
    rows: list[Any] = [None] * len(parts)
    for storage, numbers in _by_storage([variable for variable, _ in parts]):
        read = await storage.read_rows_async([parts[n] for n in numbers])
        _scatter(rows, numbers, read)
    return rows


def update_all(updates: Sequence[StorageUpdate]) -> None:
    """Applies updates of variables. Cost: one request to each storage."""
    for storage, numbers in _by_storage([update[0] for update in updates]):
        storage.update_many([updates[n] for n in numbers])


async def update_all_async(updates: Sequence[StorageUpdate]) -> None:
    """Applies updates like `update_all`, without blocking the running loop.

    Cancellation: some of the updates may have been applied.
    """
    # One after the other: variables on parameter servers share one storage, so there is
    # seldom a second one to wait for.
    for storage, numbers in _by_storage([update[0] for update in updates]):
        await storage.update_many_async([updates[n] for n in numbers])


def _by_storage(
    variables: Sequence[VariableHandle],
) -> list[tuple[Storage, list[int]]]:
    """Groups variables by their storage. Returns each storage with the indices of its
    variables, in order."""
    # By identity: the variables keep their storages alive, so no id is used twice.
    groups: dict[int, list[int]] = {}
    for number, variable in enumerate(variables):
        groups.setdefault(id(variable.storage), []).append(number)
    return [(variables[group[0]].storage, group) for group in groups.values()]


def _scatter(
    into: list[Any], numbers: Sequence[int], values: Sequence[np.ndarray]
) -> None:
    for number, value in zip(numbers, values, strict=True):
        into[number] = value
