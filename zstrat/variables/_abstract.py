"""`AbstractVariable`: what `Variable` and `ShardedVariable` have in common.

Reads and updates go to the step that is being traced in this thread, if any, else to
the storages. The blocking methods may be called anywhere, in a running asyncio loop,
too: the storage of a cluster works on a thread of its own, so the call delays the
caller's loop but cannot deadlock it. The methods named ``..._async`` do not block the
loop; they are for the coordinator, outside of steps.

Law of the file: the two classes differ in the abstract members below, and in nothing
else.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Final, Self

import jax
import numpy as np

from zstrat.wire import UpdateOp

from . import _convert
from ._operators import ArrayOperators
from ._recorder import VariableUse, note_use, recorder, refuse_read, refuse_update
from ._rows import read_rows, read_rows_async, row_updates
from ._storage import update_all, update_all_async
from ._table import Table
from .gradients._gradient_call import TraceRecorder, VariableUpdate

if TYPE_CHECKING:
    from ._storage import (
        StorageUpdate,
        VariableAggregation,
        VariableHandle,
        VariableSpec,
        VariableSynchronization,
    )
    from ._table import IndexedSlices
    from .gradients._slots import OptimizerHandle


class ValueWanted(RuntimeError):
    """Python needs a value that is known only when the step runs."""


class AbstractVariable(ArrayOperators):
    """A shared, mutable array: reads, updates, attributes."""

    __slots__ = ("_spec",)
    _spec: VariableSpec

    @property
    @abc.abstractmethod
    def components(self) -> tuple[VariableHandle, ...]:
        """The variables that store the value, in the order of their rows; only the
        variable itself unless it is sharded."""

    @property
    @abc.abstractmethod
    def table(self) -> Table:
        """The rows of the value, over the components.

        Raises:
            ValueError: The value is a scalar.
        """

    @abc.abstractmethod
    def _read_now(self) -> np.ndarray:
        """Reads the value from its storages."""

    @abc.abstractmethod
    async def _read_now_async(self) -> np.ndarray: ...

    @abc.abstractmethod
    def _traced_value(self, recording: TraceRecorder) -> Any:
        """Reads the value in the step that is being traced."""

    @abc.abstractmethod
    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        """Splits an update by an operand of the whole shape over the components."""

    @abc.abstractmethod
    def _target_of_rows(self, op: UpdateOp) -> VariableHandle | Table:
        """Returns the target of an update by indices and rows: a table, if the update
        concerns several components."""

    @property
    def name(self) -> str:
        """The name of the variable."""
        note_use(VariableUse.NAME, self)
        return self._spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._spec.shape

    def get_shape(self) -> tuple[int, ...]:
        """`shape`, by TF's other name."""
        return self._spec.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the value."""
        return len(self._spec.shape)

    @property
    def size(self) -> int:
        """Number of elements of the value."""
        return int(np.prod(self._spec.shape, dtype=np.int64))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the value."""
        return self._spec.numpy_dtype

    @property
    def trainable(self) -> bool:
        """Whether `Module.trainable_variables` has the variable."""
        return self._spec.trainable

    @property
    def aggregation(self) -> VariableAggregation:
        """How updates of several replicas are combined."""
        return self._spec.aggregation

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies of replicas are combined."""
        return self._spec.synchronization

    def require_optimizable(self) -> None:  # most are
        """Refuses a variable that optimizers cannot update.

        Raises:
            ValueError: Optimizers cannot update it.
        """

    def value(self) -> Any:
        """Reads the value: traced by jax inside a step, else a read-only numpy array.

        Raises:
            TypeError: Inside a step, if jax would truncate the dtype.
            RuntimeError: Outside of steps, while jax traces a function. (In a replica
                function that runs sequentially the value is read when that runs.)
            PSUnavailableError: The parameter server that stored it is gone.
        """
        recording = recorder.get()
        if recording is None:
            refuse_read(self._spec)
            return self._read_now()
        _convert.require_untruncated(self._spec)
        return self._traced_value(recording)

    def read_value(self) -> Any:
        """Reads the value, as `value` does; TF's other name."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """Reads the value as a read-only numpy array.

        Raises:
            RuntimeError: A step is being traced and has no value yet (eager steps have
                values); or jax traces another function, and would keep the value.
        """
        current = recorder.get()
        if current is not None:
            if current.has_values:
                value = self.value()
                # An eager step has values, but a function that jax transforms inside of
                # it has not.
                if not isinstance(value, jax.core.Tracer):  # of jax.jit and the like
                    return np.asarray(value)
            raise ValueWanted(
                f"{self._spec}: numpy() inside a step function, where values are not "
                "known yet: use value() and jax.numpy"
            )
        refuse_read(self._spec)
        return self._read_now()

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Reads rows ``indices``, in their order: shape ``indices.shape + row``.

        Fetches each of these rows once, and no others. ``name`` is accepted for
        compatibility with TF, and ignored.

        Raises:
            ValueError: The variable is a scalar, or indices are not integers.
            IndexError: An index is out of bounds; in a step, if its value is known.
        """
        table = self.table
        recording = recorder.get()
        if recording is None:
            refuse_read(self._spec)
            return read_rows(table, indices)
        _convert.require_untruncated(self._spec)
        return recording.lookup(table, _convert.traced_ids(table, indices))

    async def read_value_async(self) -> np.ndarray:
        """`value`, without blocking the running loop.

        Cancellation: nothing is lost, a read has no effect.
        """
        return await self._read_now_async()

    async def value_async(self) -> np.ndarray:
        """Reads the value, as `read_value_async` does."""
        return await self._read_now_async()

    async def sparse_read_async(
        self, indices: Any, name: str | None = None
    ) -> np.ndarray:
        """`sparse_read`, without blocking the running loop."""
        return await read_rows_async(self.table, indices)

    # All arguments after the first one are TF's, in its order.

    def assign(
        self,
        value: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Replaces the value; returns the variable.

        The other arguments of this and of all updates are TF's, and change nothing:
        every update holds a lock, so that none is lost and no reader sees half of it
        (``use_locking``); operations have no names (``name``); the call reads nothing
        (``read_value``).

        Raises:
            ValueError: The shape differs, or the dtype is of another kind.
            RuntimeError: Outside of steps, while jax traces a function. All updates
                raise it there.
        """
        return self._dense(UpdateOp.ASSIGN, value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Adds ``delta``, of the variable's own shape; returns the variable. The other
        arguments are those of `assign`.

        Raises:
            ValueError: The shape differs, or the dtype is of another kind.
        """
        return self._dense(UpdateOp.ADD, delta)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Subtracts ``delta``, of the variable's own shape; returns the variable. The
        other arguments are those of `assign`.

        Raises:
            ValueError: The shape differs, or the dtype is of another kind.
        """
        return self._dense(UpdateOp.SUB, delta)

    async def assign_async(
        self,
        value: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """`assign`, without blocking the running loop.

        Cancellation: the update may or may not have been applied.
        """
        return await self._dense_async(UpdateOp.ASSIGN, value)

    async def assign_add_async(
        self,
        delta: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """`assign_add`, without blocking the running loop; see `assign_async`."""
        return await self._dense_async(UpdateOp.ADD, delta)

    async def assign_sub_async(
        self,
        delta: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """`assign_sub`, without blocking the running loop; see `assign_async`."""
        return await self._dense_async(UpdateOp.SUB, delta)

    def scatter_add(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Adds rows; duplicates accumulate. Returns the variable, as all of these do.
        ``use_locking`` and ``name`` are those of `assign`.

        Raises:
            ValueError: Indices are not a vector of integers, or the rows do not fit.
            IndexError: Outside a step, if an index is out of bounds.
        """
        return self._sparse(UpdateOp.SCATTER_ADD, sparse_delta)

    def scatter_sub(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Subtracts rows; duplicates accumulate. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_SUB, sparse_delta)

    def scatter_mul(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Multiplies rows; duplicates accumulate. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MUL, sparse_delta)

    def scatter_div(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Divides rows, one after the other if an index occurs twice; integers are
        truncated towards zero. A step whose variables are in this process divides an
        integer by zero as XLA does. Raises as `scatter_add`, and

        Raises:
            InvalidArgumentError: Integers would be divided by zero.
        """
        return self._sparse(UpdateOp.SCATTER_DIV, sparse_delta)

    def scatter_min(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Replaces rows by the minimum of old and given. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MIN, sparse_delta)

    def scatter_max(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Replaces rows by the maximum of old and given. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MAX, sparse_delta)

    def scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Replaces rows; of duplicates the last one wins. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_UPDATE, sparse_delta)

    async def scatter_async(
        self,
        op: UpdateOp,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Applies any scatter update, without blocking the running loop.

        Cancellation: the update may or may not have been applied.

        Raises:
            ValueError: ``op`` is not one of the scatter updates, the dtype of the
                variable does not have it, or the rows do not fit.
            IndexError: An index is out of bounds.
        """
        # Other operations take other operands: ASSIGN would store the indices.
        if not UpdateOp.SCATTER_ADD <= op <= UpdateOp.SCATTER_UPDATE:
            raise ValueError(
                f"scatter_async of {self._spec}: {op!r} does not update rows: expected "
                "UpdateOp.SCATTER_ADD, or another SCATTER_... operation"
            )
        _convert.require_defined(self._spec, op)
        # Planned first, so that an invalid update raises before anything is sent.
        await update_all_async(self._planned_rows(op, sparse_delta))
        return self

    def _operand(self, value: Any) -> Any:
        """Converts the argument of a dense update, or a gradient, to an operand; for a
        variable with copies, to the operand of every copy.

        Raises:
            TypeError: It is not an operand.
        """
        return value

    def _dense(self, op: UpdateOp, value: Any) -> Self:
        _convert.require_defined(self._spec, op)
        recording = recorder.get()
        if recording is None:
            update_all(self._planned(op, value))
        else:
            given = self._operand(value)
            traced = _convert.traced_operand(self._spec, given, WORDS[op])
            self._record(recording, op, traced)
        return self

    async def _dense_async(self, op: UpdateOp, value: Any) -> Self:
        _convert.require_defined(self._spec, op)
        await update_all_async(self._planned(op, value))
        return self

    def _sparse(self, op: UpdateOp, delta: IndexedSlices) -> Self:
        _convert.require_defined(self._spec, op)
        recording = recorder.get()
        if recording is None:
            update_all(self._planned_rows(op, delta))
        else:
            traced = _convert.traced_rows(
                self._spec, delta.indices, delta.values, WORDS[op]
            )
            self._record_rows(recording, op, traced)
        return self

    def _planned(self, op: UpdateOp, value: Any) -> list[StorageUpdate]:
        """Checks an update outside of steps, and splits it over the components."""
        refuse_update(self._spec, WORDS[op])
        given = self._operand(value)
        operand = _convert.plain_operand(self._spec, given, WORDS[op])
        return self._updates(op, operand)

    def _planned_rows(self, op: UpdateOp, delta: IndexedSlices) -> list[StorageUpdate]:
        refuse_update(self._spec, WORDS[op])
        rows = _convert.plain_rows(self._spec, delta.indices, delta.values, WORDS[op])
        _convert.require_divisors(self._spec, op, rows[1])
        return self._row_updates(op, rows)

    def _record(
        self,
        recording: TraceRecorder,
        op: UpdateOp,
        value: Any,
        optimizer: OptimizerHandle | None = None,
    ) -> None:
        """Records an update by a traced operand of the whole shape."""
        for update in self._updates(op, value, optimizer):
            recording.update(VariableUpdate(*update))

    def _record_rows(
        self,
        recording: TraceRecorder,
        op: UpdateOp,
        rows: tuple[Any, Any],
        optimizer: OptimizerHandle | None = None,
    ) -> None:
        """Records an update by traced indices and rows."""
        target = self._target_of_rows(op)
        recording.update(VariableUpdate(target, op, rows, optimizer))

    def _row_updates(
        self,
        op: UpdateOp,
        rows: tuple[np.ndarray, np.ndarray],
        optimizer: OptimizerHandle | None = None,
    ) -> list[StorageUpdate]:
        """Splits an update by indices and rows over the components that have them."""
        target = self._target_of_rows(op)
        if isinstance(target, Table):
            return row_updates(target, op, rows, optimizer)
        return [(target, op, rows, optimizer)]


WORDS: Final = {
    UpdateOp.ASSIGN: "assign to",
    UpdateOp.ADD: "assign_add to",
    UpdateOp.SUB: "assign_sub from",
    UpdateOp.SCATTER_ADD: "scatter_add to",
    UpdateOp.SCATTER_SUB: "scatter_sub from",
    UpdateOp.SCATTER_MUL: "scatter_mul",
    UpdateOp.SCATTER_DIV: "scatter_div",
    UpdateOp.SCATTER_MIN: "scatter_min of",
    UpdateOp.SCATTER_MAX: "scatter_max of",
    UpdateOp.SCATTER_UPDATE: "scatter_update of",
    UpdateOp.OPTIMIZE: "apply a gradient to",
    UpdateOp.OPTIMIZE_ROWS: "apply gradient rows to",
}
