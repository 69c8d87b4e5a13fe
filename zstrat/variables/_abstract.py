"""`AbstractVariable`: what `Variable` and `ShardedVariable` have in common.

If this thread is tracing a step, reads and updates are recorded in that step; otherwise
they go to the storages. The blocking methods may be called anywhere, even in a running
asyncio loop: the storage of a cluster works on its own thread, so the call delays the
caller's loop but cannot deadlock it. The methods named ``..._async`` do not block the
loop; they are for the coordinator, outside of steps.

Law of the file: the two classes differ only in the abstract members below.
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
    """Raised when Python needs the value of a variable that is known only when the step
    runs."""


class AbstractVariable(ArrayOperators):
    """Base of variables: a shared, mutable array with reads, updates and attributes."""

    __slots__ = ("_spec",)
    _spec: VariableSpec

    @property
    @abc.abstractmethod
    def components(self) -> tuple[VariableHandle, ...]:
        """The variables that store the value, in the order of their rows. A variable
        that is not sharded has itself as its only component."""

    @property
    @abc.abstractmethod
    def table(self) -> Table:
        """The rows of the variable as a `Table` over its components.

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
        """Reads the value in the step that ``recording`` records."""

    @abc.abstractmethod
    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        """Splits an update by an operand of the variable's shape into updates of the
        components."""

    @abc.abstractmethod
    def _target_of_rows(self, op: UpdateOp) -> VariableHandle | Table:
        """Returns the object that a recorder updates by indices and rows: the `Table`
        if the update concerns several components, otherwise the variable."""

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
        """The shape of the value, under TF's other name for `shape`."""
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
        """Whether `Module.trainable_variables` includes the variable."""
        return self._spec.trainable

    @property
    def aggregation(self) -> VariableAggregation:
        """How updates of several replicas are combined."""
        return self._spec.aggregation

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies that replicas have of the variable are combined."""
        return self._spec.synchronization

    def require_optimizable(self) -> None:  # most are
        """Refuses a variable that optimizers cannot update.

        Raises:
            ValueError: Optimizers cannot update this variable.
        """

    def value(self) -> Any:
        """Reads the value: traced by jax inside a step, else a read-only numpy array.

        Raises:
            TypeError: Inside a step, if jax would truncate the dtype.
            RuntimeError: Outside of steps, while jax traces a function. (In a replica
                function that runs sequentially the value is read when the function
                runs.)
            PSUnavailableError: The parameter server that stores the value is gone.
        """
        recording = recorder.get()
        if recording is None:
            refuse_read(self._spec)
            return self._read_now()
        _convert.require_untruncated(self._spec)
        return self._traced_value(recording)

    def read_value(self) -> Any:
        """Reads the value; TF's other name for `value`."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """Reads the value as a read-only numpy array.

        Raises:
            RuntimeError: A step is being traced, in which the variable has no value yet
                (in eager steps it has); or jax traces another function, whose program
                would keep the value as a constant.
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
        """Reads the value like `value`, without blocking the running loop.

        Cancellation: nothing is lost, a read has no effect.
        """
        return await self._read_now_async()

    async def value_async(self) -> np.ndarray:
        """Reads the value, as `read_value_async` does."""
        return await self._read_now_async()

    async def sparse_read_async(
        self, indices: Any, name: str | None = None
    ) -> np.ndarray:
        """Reads rows like `sparse_read`, without blocking the running loop."""
        return await read_rows_async(self.table, indices)

    # All arguments after the first one are TF's, in its order.

    def assign(
        self,
        value: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Replaces the value by ``value``; returns the variable.

        ``use_locking``, ``name`` and ``read_value``, here and in all updates, are
        accepted for compatibility with TF and change nothing: every update holds a
        lock, so no update is lost and no reader sees a partial one; operations have no
        names; and the call reads no value.

        Raises:
            ValueError: The shape of ``value`` differs, or its dtype is of another kind.
            RuntimeError: Outside of steps, while jax traces a function. All updates
                raise this error there.
        """
        return self._dense(UpdateOp.ASSIGN, value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Adds ``delta``, an array of the variable's shape; returns the variable. The
        other arguments are those of `assign`.

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
        """Subtracts ``delta``, an array of the variable's shape; returns the variable.
        The other arguments are those of `assign`.

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
        """Replaces the value like `assign`, without blocking the running loop.

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
        """Adds ``delta`` like `assign_add`, without blocking the running loop; see
        `assign_async` for cancellation."""
        return await self._dense_async(UpdateOp.ADD, delta)

    async def assign_sub_async(
        self,
        delta: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Subtracts ``delta`` like `assign_sub`, without blocking the running loop; see
        `assign_async` for cancellation."""
        return await self._dense_async(UpdateOp.SUB, delta)

    def scatter_add(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Adds rows ``sparse_delta``; rows of equal indices accumulate. Returns the
        variable, as all scatter updates do. ``use_locking`` and ``name`` are those of
        `assign`.

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
        """Subtracts rows ``sparse_delta``; rows of equal indices accumulate. Raises as
        `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_SUB, sparse_delta)

    def scatter_mul(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Multiplies rows by ``sparse_delta``; factors of equal indices accumulate.
        Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MUL, sparse_delta)

    def scatter_div(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Divides rows by ``sparse_delta``, by one divisor after the other if an index
        occurs several times; integer quotients are truncated towards zero. A step whose
        variables are in this process divides an integer by zero as XLA does. Raises
        what `scatter_add` raises, and:

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
        """Replaces rows by the element-wise minimum of old and given rows. Raises as
        `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MIN, sparse_delta)

    def scatter_max(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Replaces rows by the element-wise maximum of old and given rows. Raises as
        `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MAX, sparse_delta)

    def scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Replaces rows by ``sparse_delta``; of equal indices the last one wins. Raises
        as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_UPDATE, sparse_delta)

    async def scatter_async(
        self,
        op: UpdateOp,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Applies the scatter update named ``op``, without blocking the running loop.

        Cancellation: the update may or may not have been applied.

        Raises:
            ValueError: ``op`` is not a scatter update, the dtype of the variable does
                not support it, or the rows do not fit.
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
            TypeError: ``value`` cannot be an operand.
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
        """Checks an update outside of steps, and splits it into updates of the
        components."""
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
        """Records an update by a traced operand of the variable's shape in the step
        that is being traced."""
        for update in self._updates(op, value, optimizer):
            recording.update(VariableUpdate(*update))

    def _record_rows(
        self,
        recording: TraceRecorder,
        op: UpdateOp,
        rows: tuple[Any, Any],
        optimizer: OptimizerHandle | None = None,
    ) -> None:
        """Records an update by traced indices and rows in the step that is being
        traced."""
        target = self._target_of_rows(op)
        recording.update(VariableUpdate(target, op, rows, optimizer))

    def _row_updates(
        self,
        op: UpdateOp,
        rows: tuple[np.ndarray, np.ndarray],
        optimizer: OptimizerHandle | None = None,
    ) -> list[StorageUpdate]:
        """Splits an update by indices and rows into updates of the components that have
        these rows."""
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
