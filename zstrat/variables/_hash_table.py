"""`HashTable`: a table with rows for any 64-bit ids; the first gradient creates a row.

The rows are stored on all parameter servers, each of which has a range of the ids'
hashes. A table has no whole value: steps look rows up, and optimizers update rows. The
initial value of a row depends only on the seed, the table's name and the id, so a
look-up never creates a row.

Law of the file: ids keep all their bits. The first axis of the shape is nominal; ids
are never compared with it.
"""

from __future__ import annotations

import asyncio
import math
import operator
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

import numpy as np

from zstrat.ids import BUCKETS
from zstrat.wire import EvictionRule, UpdateOp

from . import _convert
from ._abstract import AbstractVariable
from ._recorder import recorder, refuse_read, refuse_update
from ._rows import integers
from ._storage import KeepsTables, VariableSpec, update_all, update_all_async
from ._table import ABSENT, IndexedSlices, Table, TableLayout
from ._table_creation import checked_request, create_table
from .admission import Admission
from .eviction import Eviction

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.initializers import Initializer

    from ._storage import StorageUpdate
    from ._variable import Variable
    from .gradients._gradient_call import TraceRecorder
    from .gradients._slots import OptimizerHandle

BUCKET_ROWS: Final = 2**18
"""Nominal number of rows of a bucket, which gives a table a nominal 2**30 rows."""

_SLICE: Final = 4096
"""Number of rows that one eviction update examines, about: takes about a
millisecond."""

_BATCH: Final = 4 * 2**20
"""Approximate bytes of rows that `HashTable.items` reads at a time."""


class _PartSize(NamedTuple):
    """The size of one part of a table, with the fields that a server returns
    (`KeepsTables.table_sizes`)."""

    rows: int
    nbytes: int
    cut: int
    waiting: int


class TableChanges(NamedTuple):
    """The changes in a table since an earlier call (`HashTable.changes`).

    ``ids`` ``[n]`` have the ``rows`` ``[n, ...]`` now; ids ``removed`` ``[m]`` have no
    row any longer. ``cut`` marks this moment; give it to the next call.
    """

    ids: np.ndarray
    rows: np.ndarray
    removed: np.ndarray
    cut: tuple[int, ...]


class HashTable(AbstractVariable):
    """A table with a row for any 64-bit id, on the parameter servers.

    `embedding_lookup` and similar functions take the table in place of a variable, with
    ids that need not be known beforehand. A row that neither an optimizer nor `assign`
    has written yet has its initial value, which depends only on ``seed``, the table's
    name and the id; the first update creates the row. Create the table in the scope of
    a `zs.ParameterServerStrategy`.

    Ids in arguments of steps and in elements of datasets keep their 64 bits even where
    jax computes with 32. The id -2147483647 means padding: its row reads as zeros, and
    is not updated.

    Args:
        dim: Length of a row, or its shape.
        dtype: Default: float32.
        initializer: Makes the initial values: `zs.initializers.uniform` (the default,
            from -0.05 to 0.05), ``normal`` or ``constant``; the seed of the initializer
            is not used.
        seed: Seed of the initial values, which are the same each time the program runs.
        admission: The rule for which ids get a row (`zs.admission`). Default: all ids.
        eviction: The rule for which rows `evict` drops (`zs.eviction`).
        follow_changes: Whether servers record changes, which `changes` reads, in 8
            bytes a row.
        trainable: Whether ``trainable_variables`` of a module includes the table.

    Raises:
        ValueError: The table is not created in the scope of a strategy with parameter
            servers, the initializer does not make rows of single ids in this dtype, or
            rows are empty or have more than 65,536 bytes.
        TypeError: ``initializer`` is not one of `zs.initializers`, or another argument
            has another type.
    """

    __slots__ = (
        "__weakref__", "_admission", "_components", "_eviction", "_follows", "_table"
    )  # fmt: skip
    _admission: Admission
    _components: tuple[Variable, ...]
    _eviction: Eviction | None
    _follows: bool
    _table: Table

    def __new__(
        cls,
        dim: int | Sequence[int],
        dtype: Any = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        *,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        follow_changes: bool = False,
        trainable: bool = True,
        name: str | None = None,
    ) -> HashTable:
        request = checked_request(
            dim,
            dtype,
            initializer,
            seed,
            "HashTable" if name is None else name,
            admission=admission,
            eviction=eviction,
            follow_changes=follow_changes,
            trainable=trainable,
        )
        made: HashTable = create_table(request)
        return made

    @property
    def components(self) -> tuple[Variable, ...]:
        return self._components

    @property
    def table(self) -> Table:
        return self._table

    @property
    def tracks(self) -> bool:
        """Whether servers record when rows had gradients, as some rules of `evict`
        need."""
        return self._eviction is not None and self._eviction.tracks

    @property
    def follows(self) -> bool:
        """Whether servers record changes, for `changes` and incremental checkpoints."""
        return self._follows

    @property
    def counts(self) -> bool:
        """Whether servers count the gradients of ids that have no row yet, as some
        rules of admission need."""
        return self._admission.gradients > 1

    @property
    def dim(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])

    def lookup(self, ids: Any, default: Any = None) -> Any:
        """Reads rows, ``ids.shape + row``: in a step like `embedding_lookup`, elsewhere
        at once. Creates no rows.

        Args:
            default: The value, a scalar or a row, that ids without a row get; only
                outside of steps. Default: their initial value.

        Raises:
            ValueError: Ids are not integers, or the default does not fit a row.
            RuntimeError: ``default`` was given in a step.
            PSUnavailableError: A parameter server is gone.
        """
        return self.sparse_read(ids) if default is None else self._known(ids, default)

    async def lookup_async(self, ids: Any, default: Any = None) -> np.ndarray:
        """Reads rows like `lookup`, outside of steps, without blocking the running
        loop."""
        if default is None:
            return await self.sparse_read_async(ids)
        return await asyncio.to_thread(self._known, ids, default)

    def _known(self, ids: Any, default: Any) -> np.ndarray:
        """Reads the rows of ids; ids without a row get ``default``."""
        storage = self._kept("lookup with a default")
        index = integers(_convert.array_given(ids), f"ids of {self._table}")
        row, dtype = self.shape[1:], self.dtype
        rest = np.asarray(default)
        if rest.shape not in ((), row) or not np.can_cast(
            rest.dtype, dtype, "same_kind"
        ):
            raise ValueError(
                f"lookup of {self._table}: expected a default of shape () or "
                f"{list(row)} that fits {dtype}, got {rest.dtype} of shape "
                f"{list(rest.shape)}"
            )
        runs = self._table.runs(index.reshape(-1))
        unique = np.full((len(runs.unique), *row), rest, dtype)
        # With each row its id travels, of 8 bytes.
        size = max(1, _BATCH // (self.dim * dtype.itemsize + 8))
        # Each id once, and each server is asked for its own.
        for piece in self._table.pieces(runs.unique):
            part, values = self._components[piece.component], unique[piece.positions]
            for start in range(0, len(piece.local), size):
                some = piece.local[start : start + size]
                ids, rows = storage.table_rows(part, 0, 0, ids=[some])
                # Those that have a row come in the order that was asked for.
                values[start : start + size][np.isin(some, ids)] = rows
        read: np.ndarray = unique[runs.inverse()].reshape(*index.shape, *row)
        read.flags.writeable = False
        return read

    def assign(self, ids: Any, values: Any) -> Self:  # type: ignore[override]
        """Writes rows ``values`` ``[n, ...]`` of ids ``[n]``, outside of steps, and
        creates rows for new ids. If an id occurs several times, its last row wins.

        Raises:
            ValueError: Shapes or dtypes do not fit, or an id is the one of padding.
            RuntimeError: Called in a step.
        """
        return self.scatter_update(self._assigned(ids, values))

    async def assign_async(self, ids: Any, values: Any) -> Self:  # type: ignore[override]
        """Writes rows like `assign`, without blocking the running loop.

        Cancellation: the rows may or may not have been written.
        """
        slices = self._assigned(ids, values)
        return await self.scatter_async(UpdateOp.SCATTER_UPDATE, slices)

    def remove(self, ids: Any) -> Self:
        """Drops the rows of ids ``[n]`` and the optimizers' slots of these rows,
        outside of steps. Ids without a row are ignored. A later update creates a row
        again.

        Raises:
            ValueError: Ids are not a vector of integers.
            RuntimeError: Called in a step.
        """
        update_all(self._removed(ids))
        return self

    async def remove_async(self, ids: Any) -> Self:
        """Drops rows like `remove`, without blocking the running loop.

        Cancellation: the rows may or may not have been dropped.
        """
        await update_all_async(self._removed(ids))
        return self

    def evict(self, now: float | None = None) -> Self:
        """Drops the rows that the rule of ``eviction=`` chooses, a slice of the table
        at a time, between pushes of gradients. Also forgets the counts of ids that have
        no row yet, if there are too many such ids (``admission.count(n, waiting=)``).
        Training continues meanwhile. The program should call this every so many steps.

        Args:
            now: The time in seconds, for `zs.eviction.age`. Default: ``time.time()``.

        Raises:
            ValueError: The table has no such rule; or ``now`` is given but not finite,
                or given for another rule than `zs.eviction.age`.
            RuntimeError: Called in a step.
            PSUnavailableError: A parameter server is gone.
        """
        for updates in self._evicted(self._rules(now), self._sizes(), now):
            update_all(updates)
        return self

    async def evict_async(self, now: float | None = None) -> Self:
        """Drops rows like `evict`, without blocking the running loop.

        Cancellation: rows of some slices of the table may have been dropped.
        """
        rules, sizes = self._rules(now), await asyncio.to_thread(self._sizes)
        for updates in self._evicted(rules, sizes, now):
            await update_all_async(updates)
        return self

    def _rules(self, now: float | None) -> list[Eviction]:
        """Returns the rules that `evict` applies.

        Raises:
            ValueError: There are none, or ``now`` is for another one, or not finite.
        """
        self._require_outside("evict")
        rules = [] if self._eviction is None else [self._eviction]
        # A rule of admission, but carried out as an eviction.
        if self._admission.waiting is not None:
            most = float(self._admission.waiting)
            rules.append(Eviction(EvictionRule.WAITING, most))
        if not rules:
            raise ValueError(
                f"{self._table} has no rule of eviction: create it with eviction=, one "
                "of zs.eviction, or with admission=zs.admission.count(n, waiting=rows)"
            )
        if now is not None and not math.isfinite(now):
            raise ValueError(
                f"evict(now={now}) of {self._table}: expected finite seconds"
            )
        if now is not None and all(x.rule is not EvictionRule.AGE for x in rules):
            raise ValueError(
                f"evict(now={now}) is for tables with eviction=zs.eviction.age("
                f"seconds), which {self._table} has not: leave now= out"
            )
        return rules

    def _evicted(
        self,
        rules: Sequence[Eviction],
        sizes: Sequence[_PartSize],
        now: float | None,
    ) -> Iterator[list[StorageUpdate]]:
        """Makes the updates that one eviction sends: yields, for each slice, an update
        for each part of the table."""
        time_now = time.time() if now is None else float(now)
        for rule in rules:
            limit, is_waiting = rule.limit, rule.rule is EvictionRule.WAITING
            if rule.rule is EvictionRule.AGE:
                # Servers look at no clock: the time comes in order with the pushes.
                noted = np.array([time_now, limit])
                yield [(x, UpdateOp.NOTE_TIME, (noted,), None) for x in self.components]
                limit = time_now - limit
            longest = max(x.waiting if is_waiting else x.rows for x in sizes)
            # By the largest part, so that no update takes a server more than about a
            # millisecond.
            slices = max(1, -(-longest // _SLICE))
            for number in range(slices):
                updates: list[StorageUpdate] = []
                # All servers work on the same slice at a time.
                for part in self._components:
                    assert part.spec.buckets is not None
                    first, end = part.spec.buckets
                    start = first + (end - first) * number // slices
                    stop = first + (end - first) * (number + 1) // slices
                    if start == stop:
                        continue
                    share = limit
                    if rule.is_share:
                        # Rounded up, so that a small slice may keep a row, too.
                        share = math.ceil(limit * (stop - start) / BUCKETS)
                    operand = np.array([rule.rule, share, start, stop], np.float64)
                    updates.append((part, UpdateOp.EVICT_ROWS, (operand,), None))
                yield updates

    def __len__(self) -> int:
        """Returns the number of existing rows. Cost: one request to each server.

        Raises:
            RuntimeError: Called in a step.
            PSUnavailableError: A parameter server is gone.
        """
        return sum(size.rows for size in self._sizes())

    def __bool__(self) -> bool:
        return True  # also without rows, and in steps

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes on the servers: rows, optimizers' slots of rows,
        ids, index. Raises as `__len__`."""
        return sum(size.nbytes for size in self._sizes())

    def items(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads all rows, in batches of some megabytes: ids ``[n]``, int64, and rows
        ``[n, ...]``. The order of rows does not depend on the number of servers. A row
        that changes meanwhile is returned as it was before or after the change.

        Raises:
            RuntimeError: Called in a step.
            PSUnavailableError: A parameter server is gone.
        """
        # -1: of no cut, so all rows.
        for ids, rows in self._batches([-1] * len(self._components)):
            if len(ids):
                yield ids, rows

    def changes(self, since: tuple[int, ...] | None = None) -> TableChanges:
        """Reads the rows that have changed since an earlier call, to update a copy of
        the table, such as one that serves predictions. ``since`` is the ``cut`` that
        the earlier call returned; None: read all rows. Rows that change meanwhile are
        returned by this call or the next one. The table records removed ids until the
        next call, so only one reader may call this.

        Raises:
            InvalidArgumentError: The changes since that cut are not known: the table or
                its server was restored; more ids were removed than servers record, or
                another reader has read them; or the cut is of another run of the
                program. Call this without a cut.
            ValueError: The table was created without ``follow_changes=True``, or for
                another number of servers.
            TypeError: ``since`` is not a cut of an earlier call.
            RuntimeError: Called in a step.
            PSUnavailableError: A parameter server is gone.
        """
        if not self._follows:
            raise ValueError(
                f"{self._table} does not note what changes: create it with "
                "follow_changes=True"
            )
        count = len(self._components)
        if since is not None:
            try:
                since = tuple(map(operator.index, since))
            except TypeError:
                raise TypeError(
                    f"changes(since={since!r:.80}) of {self._table}: expected the cut "
                    "of an earlier call, changes().cut, or None"
                ) from None
            if len(since) != count:
                raise ValueError(
                    f"{self._table} has {count} parts, and the cut is of {len(since)}: "
                    "call changes() without a cut"
                )
        # Before anything is read: what changes meanwhile comes again.
        sizes = self._sizes()
        # It has the dtypes, should nothing else be there.
        batches = [self._nothing()]
        for ids, rows, *removed in self._batches(since or [-1] * count):
            batches.append((ids, rows, removed[0] if removed else ids[:0]))
        ids, rows, gone = [np.concatenate(each) for each in zip(*batches, strict=True)]
        if since is not None:
            # What was removed up to the earlier cut has arrived, so servers need not
            # note it.
            op = UpdateOp.FORGET_REMOVED
            pairs = zip(self._components, since, strict=True)
            update_all([(x, op, (np.array([cut]),), None) for x, cut in pairs])
        return TableChanges(ids, rows, gone, tuple([x.cut for x in sizes]))

    def _batches(self, since: Sequence[int]) -> Iterator[Any]:
        """Reads the rows of all parts, some buckets at a time, changed since the cut of
        each part (-1: all). Yields the results of `KeepsTables.table_rows`."""
        storage, rows = self._kept(), len(self)
        nbytes = max(1, rows) * (self.dim * self.dtype.itemsize + 8)
        # Hashes spread the rows evenly over the buckets.
        step = max(1, BUCKETS * _BATCH // nbytes)
        for part, cut in zip(self._components, since, strict=True):
            assert part.spec.buckets is not None
            start, stop = part.spec.buckets
            for first in range(start, stop, step):
                last = min(first + step, stop)
                yield storage.table_rows(part, first, last, cut)

    def _nothing(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = np.empty(0, np.int64)
        return ids, np.empty((0, *self.shape[1:]), self.dtype), ids

    def _sizes(self) -> list[_PartSize]:
        sizes = self._kept().table_sizes(self._components)
        return [_PartSize(*size) for size in sizes]

    def _kept(self, what: str = "len, nbytes, items, changes or evict") -> KeepsTables:
        self._require_outside(what)
        # All parts are in the session of one strategy.
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
        if (vector == ABSENT).any():
            raise ValueError(
                f"cannot assign a row of id {ABSENT} of {self._table}: it stands for "
                "padding, and reads as zeros; give that row another id"
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
        rules = self._admission, self._eviction, self._follows
        return hashed, (self._components, self.name, *rules)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.HashTable {spec.name!r} row={list(spec.shape[1:])} "
            f"dtype={spec.dtype} parts={len(self._components)}>"
        )


def hashed(
    components: Sequence[Variable],
    name: str,
    admission: Admission | None = None,
    eviction: Eviction | None = None,
    follows: bool = False,
) -> HashTable:
    """Makes the handle of an existing table from its components, which are in the order
    of their buckets."""
    # Not by the class, which would create a table on the servers.
    table = object.__new__(HashTable)
    parts, first = tuple(components), components[0].spec
    table._components, table._table = parts, Table(name, parts, TableLayout.HASH)
    table._admission = Admission() if admission is None else admission
    table._eviction, table._follows = eviction, follows
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
