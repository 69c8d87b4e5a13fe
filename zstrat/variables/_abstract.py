"""What every variable is to its user, whether it is whole or in parts.

Reads and updates go to the step that is being traced in this thread, if there is one,
and to the storages of the variables otherwise. The blocking methods may be called from
anywhere, a running asyncio loop included: the storage of a cluster works on a thread of
its own, so the call delays the caller's loop but cannot deadlock it. The twins named
``..._async`` leave the loop free; they are for the coordinator and have no meaning
inside a step.

Law of the file: what differs between a whole variable and one in parts are the abstract
members below, and nothing else.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Final, Self

import jax
import numpy as np

from zstrat.wire import UpdateOp

from . import _convert
from ._operators import ArrayOperators
from ._rows import read_rows, read_rows_async, row_updates
from ._storage import update_all, update_all_async
from ._table import Table
from ._tracing import (
    RunsWithValues,
    TraceRecorder,
    VariableUse,
    note_use,
    recorder,
    refuse_read,
    refuse_update,
)
from .gradients._gradient_call import VariableUpdate

if TYPE_CHECKING:
    from ._spec import VariableAggregation, VariableSpec, VariableSynchronization
    from ._storage import StorageUpdate, VariableHandle
    from ._table import IndexedSlices
    from .gradients._gradient_call import UpdateRecorder
    from .gradients._slots import OptimizerHandle


class ValueWanted(RuntimeError):
    """Python asks for a value that is known only when the step runs."""


class AbstractVariable(ArrayOperators):
    """A shared, mutable array: reads, updates, and what it is."""

    __slots__ = ("_spec",)
    _spec: VariableSpec

    @property
    @abc.abstractmethod
    def components(self) -> tuple[VariableHandle, ...]:
        """The variables that hold the value, in the order of their rows; the variable
        itself unless it is in parts."""

    @property
    @abc.abstractmethod
    def table(self) -> Table:
        """The rows of the value, over the components.

        Raises:
            ValueError: A value without a first axis has no rows.
        """

    @abc.abstractmethod
    def _read_now(self) -> np.ndarray:
        """The value, from its storages."""

    @abc.abstractmethod
    async def _read_now_async(self) -> np.ndarray: ...

    @abc.abstractmethod
    def _traced_value(self, recording: TraceRecorder) -> Any:
        """The value in the step that is being traced."""

    @abc.abstractmethod
    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        """What an operand of the whole shape, traced or not, does to each component."""

    @abc.abstractmethod
    def _target_of_rows(self, op: UpdateOp) -> VariableHandle | Table:
        """What an update by indices and rows is told to be of: a table, if it may be of
        several components, or is one for all of them."""

    @property
    def name(self) -> str:
        """The name that the variable was given."""
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
        """How updates of several replicas become one."""
        return self._spec.aggregation

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies of replicas are combined."""
        return self._spec.synchronization

    def require_optimizable(self) -> None:  # most are
        """Refuses what no optimizer moves.

        Raises:
            ValueError: Says why.
        """

    def value(self) -> Any:
        """The value: traced by jax inside a step, a read-only numpy array elsewhere.

        Raises:
            TypeError: Inside a step, if jax would truncate the dtype.
            RuntimeError: Outside of steps, in what jax traces before it runs. (In a
                replica function that runs sequentially it is read when that runs.)
            PSUnavailableError: The parameter server that held it is gone.
        """
        recording = recorder.get()
        if recording is None:
            refuse_read(self._spec)
            return self._read_now()
        _convert.require_untruncated(self._spec)
        return self._traced_value(recording)

    def read_value(self) -> Any:
        """Reads as `value` does."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """The value as a read-only numpy array.

        Raises:
            RuntimeError: A step is being traced, so there is no value yet (an eager
                one has values); or jax traces something else, and would keep the value.
        """
        current = recorder.get()
        if current is not None:
            if isinstance(current, RunsWithValues) and current.has_values:
                value = self.value()
                if not isinstance(value, jax.core.Tracer):  # of jax.jit and the like
                    return np.asarray(value)
            raise ValueWanted(
                f"{self._spec}: numpy() inside a step function, where values are not "
                "known yet: use value() and jax.numpy"
            )
        refuse_read(self._spec)
        return self._read_now()

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Rows ``indices`` of the value, in their order: shape ``indices.shape + row``.
        Nothing but these rows is fetched, each of them once. ``name`` is taken for
        TF's sake: there is no graph whose operations had names.

        Raises:
            ValueError: The variable has no first axis, or indices are no integers.
            IndexError: An index is out of bounds; inside a step where it is known.
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
        """Reads as `read_value_async` does."""
        return await self._read_now_async()

    async def sparse_read_async(
        self, indices: Any, name: str | None = None
    ) -> np.ndarray:
        """`sparse_read`, without blocking the running loop."""
        return await read_rows_async(self.table, indices)

    #
    # The arguments behind the first one are TF's, in its order.

    def assign(
        self,
        value: Any,
        use_locking: bool | None = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Replaces the value; returns the variable.

        The other arguments say what is so in any case, here and in all updates: every
        update is made under a lock, so that none is lost and no reader sees half of it
        (``use_locking``); there is no graph whose operations had names (``name``); and
        reading costs nothing until it is done (``read_value``).

        Raises:
            ValueError: The shape is another one, or the dtype is of another kind.
            RuntimeError: Outside of steps, in what jax traces before it runs. This
                holds for every update.
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
            ValueError: The shape is another one, or the dtype is of another kind.
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
            ValueError: The shape is another one, or the dtype is of another kind.
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
            ValueError: Indices are no vector of integers, or the rows do not fit.
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
        """Divides rows, one after the other where an index is there twice; integers
        are cut off towards zero. A step whose variables are in this process divides an
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
        """Keeps the smaller of old and given rows. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MIN, sparse_delta)

    def scatter_max(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Keeps the larger of old and given rows. Raises as `scatter_add`."""
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
        """Any of the scatter updates, without blocking the running loop.

        Cancellation: the update may or may not have been applied.
        """
        await update_all_async(self._planned_rows(op, sparse_delta))
        return self

    def _operand(self, value: Any) -> Any:
        """What an update of the whole variable, or a gradient, is given: the operand of
        every copy, of a variable that has some.

        Raises:
            TypeError: It is none.
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
        """A checked update outside of steps, split over the components."""
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
        recording: UpdateRecorder,
        op: UpdateOp,
        value: Any,
        optimizer: OptimizerHandle | None = None,
    ) -> None:
        """Notes an update by a traced operand of the whole shape."""
        for update in self._updates(op, value, optimizer):
            recording.update(VariableUpdate(*update))

    def _record_rows(
        self,
        recording: UpdateRecorder,
        op: UpdateOp,
        rows: tuple[Any, Any],
        optimizer: OptimizerHandle | None = None,
    ) -> None:
        """Notes an update by traced indices and rows."""
        target = self._target_of_rows(op)
        recording.update(VariableUpdate(target, op, rows, optimizer))

    def _row_updates(
        self,
        op: UpdateOp,
        rows: tuple[np.ndarray, np.ndarray],
        optimizer: OptimizerHandle | None = None,
    ) -> list[StorageUpdate]:
        """What indices and rows do to the components that have some of them."""
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
