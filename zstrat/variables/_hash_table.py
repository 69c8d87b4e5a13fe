"""`HashTable`: rows of any 64-bit ids, which are created by the first gradient.

The rows are stored on all parameter servers, each of which has a range of the ids'
hashes. A table has no whole value: steps look rows up, and optimizers update rows. The
first value of a row follows from seed and id alone, so a look-up never creates one.

Law of the file: nothing of an id is lost. The first axis of the shape is nominal; ids
are never compared with it.
"""

from __future__ import annotations

import math
import operator
import secrets
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import numpy as np

from zstrat.ids import BUCKETS, IdGenerator, hashes_of
from zstrat.initializers import Initializer, uniform
from zstrat.wire import UpdateOp

from . import _convert
from ._abstract import AbstractVariable
from ._creator import TableRequest, create_table
from ._rows import integers
from ._spec import VariableSpec
from ._storage import KeepsTables, update_all, update_all_async
from ._table import IndexedSlices, Table, TableLayout
from ._tracing import recorder, refuse_read, refuse_update

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._storage import StorageUpdate
    from ._variable import Variable
    from .gradients._gradient_call import TraceRecorder
    from .gradients._slots import OptimizerHandle

BUCKET_ROWS: Final = 2**18
"""Nominal rows of a bucket: a table has 2**30."""

_BATCH: Final = 4 * 2**20
"""Bytes of rows that `HashTable.items` reads at a time, about."""


class HashTable(AbstractVariable):
    """A table with a row for any 64-bit id, on the parameter servers.

    `embedding_lookup` and its relatives take it as they take a variable, with ids that
    nobody needs to know beforehand. A row that no optimizer has updated yet, nor
    `assign` written, has its first value, which depends on ``seed``, the table's name
    and the id alone; the first update creates the row. Create it in the scope of a
    `zs.ParameterServerStrategy`.

    Ids of arguments and elements of steps keep their 64 bits where jax computes with
    32. The id -2147483647 stands for padding: it reads as zeros, and is not updated.

    Args:
        dim: Length of a row, or its shape.
        dtype: Default: float32.
        initializer: Makes first values: `zs.initializers.uniform` (the default, from
            -0.05 to 0.05), ``normal`` or ``constant``; its own seed is not used.
        seed: Default: a random one.
        trainable: Whether it is among the ``trainable_variables`` of a module.

    Raises:
        ValueError: It is not created in the scope of a strategy with parameter servers,
            or the initializer does not make rows of single ids in this dtype.
        TypeError: ``initializer`` is not one of `zs.initializers`.
    """

    __slots__ = ("__weakref__", "_components", "_table")
    _components: tuple[Variable, ...]
    _table: Table

    def __new__(
        cls,
        dim: int | Sequence[int],
        dtype: Any = None,
        initializer: Initializer | None = None,
        seed: int | None = None,
        *,
        trainable: bool = True,
        name: str | None = None,
    ) -> HashTable:
        name = "HashTable" if name is None else name
        row = _row_shape(dim, name)
        rows = uniform(-0.05, 0.05) if initializer is None else initializer
        if not isinstance(rows, Initializer):
            raise TypeError(
                f"table {name!r}: initializer={initializer!r:.80} cannot make the row "
                "of one id: expected zs.initializers.uniform, normal or constant"
            )
        kind = _convert.as_dtype("float32" if dtype is None else dtype, name)
        _require_rows(rows, row, kind, name)
        request = TableRequest(row, kind, rows, _mixed(seed, name), name, trainable)
        made: HashTable = create_table(request)
        return made

    @property
    def components(self) -> tuple[Variable, ...]:
        return self._components

    @property
    def table(self) -> Table:
        return self._table

    @property
    def dim(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])

    def lookup(self, ids: Any) -> Any:
        """Reads rows, ``ids.shape + row``: in a step as `embedding_lookup`, else at
        once. It creates none.

        Raises:
            ValueError: Ids are not integers.
            PSUnavailableError: A parameter server is gone.
        """
        return self.sparse_read(ids)

    async def lookup_async(self, ids: Any) -> np.ndarray:
        """`lookup` outside of steps, without blocking the running loop."""
        return await self.sparse_read_async(ids)

    def assign(self, ids: Any, values: Any) -> Self:  # type: ignore[override]
        """Writes rows ``values`` ``[n, ...]`` of ids ``[n]``, and creates those that
        are new; of an id that occurs twice the last one. Outside of steps.

        Raises:
            ValueError: Shapes or dtypes do not fit.
            RuntimeError: In a step.
        """
        return self.scatter_update(self._assigned(ids, values))

    async def assign_async(self, ids: Any, values: Any) -> Self:  # type: ignore[override]
        """`assign`, without blocking the running loop.

        Cancellation: the rows may or may not have been written.
        """
        slices = self._assigned(ids, values)
        return await self.scatter_async(UpdateOp.SCATTER_UPDATE, slices)

    def remove(self, ids: Any) -> Self:
        """Drops the rows of ids ``[n]``, with what optimizers keep beside them; those
        that have none are ignored. A later update creates a row anew. Outside of steps.

        Raises:
            ValueError: Ids are not a vector of integers.
            RuntimeError: In a step.
        """
        update_all(self._removed(ids))
        return self

    async def remove_async(self, ids: Any) -> Self:
        """`remove`, without blocking the running loop.

        Cancellation: the rows may or may not have been dropped.
        """
        await update_all_async(self._removed(ids))
        return self

    def __len__(self) -> int:
        """Returns the number of rows that there are. Cost: one request to each server.

        Raises:
            RuntimeError: In a step.
            PSUnavailableError: A parameter server is gone.
        """
        return self._kept().table_sizes(self._components)[0]

    def __bool__(self) -> bool:
        return True  # also without rows, and in steps

    @property
    def nbytes(self) -> int:
        """Bytes on the servers: rows, what optimizers keep beside them, ids, index.
        Raises as `__len__`."""
        return self._kept().table_sizes(self._components)[1]

    def items(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads all rows, in batches of some megabytes: ids ``[n]``, int64, and rows
        ``[n, ...]``. The same rows come in the same order, on however many servers
        they are; rows that change meanwhile come as they were before or after.

        Raises:
            RuntimeError: In a step.
            PSUnavailableError: A parameter server is gone.
        """
        storage = self._kept()
        rows, _ = storage.table_sizes(self._components)
        nbytes = max(1, rows) * (self.dim * self.dtype.itemsize + 8)
        step = max(1, BUCKETS * _BATCH // nbytes)
        for part in self._components:
            assert part.spec.buckets is not None
            start, stop = part.spec.buckets
            for first in range(start, stop, step):
                last = min(first + step, stop)
                ids, values = storage.table_rows(part, first, last)
                if len(ids):
                    yield ids, values

    def _kept(self) -> KeepsTables:
        self._require_outside("items or len")
        storage = self._components[0].storage
        if not isinstance(storage, KeepsTables):
            raise RuntimeError(
                f"{self._table} came from another task, and its rows are read where "
                "it was created"
            )
        return storage

    def _removed(self, ids: Any) -> list[StorageUpdate]:
        self._require_outside("remove")
        refuse_update(self._spec, "remove rows of")
        unique = self._table.runs(self._vector(ids)).unique
        return [
            (
                self._components[piece.component],
                UpdateOp.REMOVE_ROWS,
                (piece.local,),
                None,
            )
            for piece in self._table.pieces(unique)
        ]

    def _assigned(self, ids: Any, values: Any) -> IndexedSlices:
        self._require_outside("assign")
        vector = self._vector(ids)
        given, wanted = np.shape(values), (len(vector), *self.shape[1:])
        if given != wanted:
            raise ValueError(
                f"cannot assign rows of {self._table}: expected values "
                f"{list(wanted)}, one row for each id, got {list(given)}"
            )
        return IndexedSlices(values, vector)

    def _vector(self, ids: Any) -> np.ndarray:
        index = integers(_convert.array_given(ids), f"ids of {self._table}")
        if index.ndim != 1:
            raise ValueError(
                f"ids of {self._table} must be rank 1 here, got rank {index.ndim}"
            )
        return index.astype(np.int64)

    def _require_outside(self, what: str) -> None:
        if recorder.get() is not None:
            raise RuntimeError(
                f"{what} of {self._table} in a step: call it between steps, from the "
                "program; in a step rows change by an optimizer, or by scatter_add"
            )

    # It has no whole value.

    def _read_now(self) -> np.ndarray:
        refuse_read(self._spec)
        self._refuse("read")

    async def _read_now_async(self) -> np.ndarray:
        self._refuse("read")

    def _traced_value(self, recording: TraceRecorder) -> Any:
        self._refuse("read")

    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        self._refuse("updated")

    def _operand(self, value: Any) -> Any:
        self._refuse("updated")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{self._table} has a row for any id and no whole value, so it cannot be "
            f"{what} as one: look up rows with zs.embedding_lookup or "
            "table.lookup(ids), and change them by gradients of look-ups "
            "(zs.value_and_grad), table.assign(ids, values) or scatter updates"
        )

    def _target_of_rows(self, op: UpdateOp) -> Table:
        return self._table

    def __deepcopy__(self, memo: dict[int, Any]) -> HashTable:
        raise TypeError(
            f"{self._table} cannot be copied: create another zs.HashTable, and assign "
            "it the rows that it should have"
        )

    def __reduce__(self) -> Any:
        return hashed, (self._components, self.name)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.HashTable {spec.name!r} row={list(spec.shape[1:])} "
            f"dtype={spec.dtype} parts={len(self._components)}>"
        )


def _row_shape(dim: Any, name: str) -> tuple[int, ...]:
    """Returns the shape of a row.

    Raises:
        TypeError: ``dim`` is neither an integer nor integers.
        ValueError: It is not positive.
    """
    try:
        row = tuple(map(operator.index, dim if np.iterable(dim) else [dim]))
    except TypeError:
        raise TypeError(
            f"table {name!r}: dim={dim!r:.80} is not the length of a row, nor its "
            "shape: expected an integer, or some"
        ) from None
    if any(size <= 0 for size in row) or not row:
        raise ValueError(f"table {name!r}: dim={dim!r} has to be positive")
    return row


def hashed(components: Sequence[Variable], name: str) -> HashTable:
    """Makes the handle of an existing table from its components, in the order of their
    buckets."""
    table = object.__new__(HashTable)
    parts, first = tuple(components), components[0].spec
    table._components, table._table = parts, Table(name, parts, TableLayout.HASH)
    table._spec = VariableSpec(
        first.key,
        name,
        table._table.shape,
        first.dtype,
        first.ps,
        first.trainable,
        first.aggregation,
        first.synchronization,
        buckets=(0, BUCKETS),
    )
    return table


def _mixed(seed: int | None, name: str) -> int:
    """Returns the seed of a table: tables of other names have other first values."""
    number = secrets.randbits(63) if seed is None else operator.index(seed)
    letters = np.frombuffer(name.encode().ljust(-(-len(name.encode()) // 8) * 8), "<i8")
    mixed = np.array([number % 2**63], np.int64)
    for word in letters:
        mixed = hashes_of(mixed ^ word).view(np.int64)
    return int(mixed[0]) & (2**63 - 1)


def _require_rows(
    initializer: Initializer, row: tuple[int, ...], dtype: np.dtype, name: str
) -> None:
    """Tries the initializer here, where an error is clearer than a server's.

    Raises:
        ValueError: It does not make rows of single ids, or not in this dtype.
    """
    out = np.empty((1, *row), dtype)
    try:
        initializer.rows(IdGenerator(0, np.zeros(1, np.int64)), out)
    except ValueError as error:
        raise ValueError(f"table {name!r}: {error}") from None
