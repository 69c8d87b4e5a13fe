"""A variable: a handle of what it is (its spec) and where its value lives (its home).

Reads and updates go to the step that is being traced in this thread, if there is one,
and to the home otherwise. The blocking methods may be called from anywhere, a running
asyncio loop included: the home of a cluster works on a thread of its own, so the call
delays the caller's loop but cannot deadlock it. The twins named ``..._async`` leave the
loop free; they are for the coordinator and have no meaning inside a step.

Variables are opaque leaves of pytrees. jax functions that are compiled at the call
(``jnp.exp``, ``jnp.sum``, ...) do not take foreign objects: inside such calls write
``v.value()``, or convert a whole pytree with `values`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, Self

import jax.numpy as jnp
import numpy as np

from zstrat.wire import UpdateOp

from . import _convert
from ._creator import Request, check, creator, initialize
from ._home import Detached, Home, LocalHome
from ._operators import ArrayOperators
from ._recorder import recorder
from ._spec import LOCAL, VariableAggregation, VariableSpec, VariableSynchronization
from ._staging import refuse_read, refuse_update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._optimizer import Optimizer
    from ._slices import IndexedSlices

_local_keys = itertools.count(-1, -1)
_DETACHED: Final = Detached()


class Variable(ArrayOperators):
    """A shared, mutable array.

    Inside ``strategy.scope()`` it is created on the parameter servers; elsewhere it
    lives in this process.

    Args:
        initial_value: An array, a Python value, or a callable. A callable is called
            with ``(shape, dtype)`` if it takes two arguments and ``shape`` is given
            (`zstrat.initializers`), else without any.
        shape: Of the value; may be left out unless an initializer needs it.
        dtype: A string, numpy dtype or jax scalar type. Left out: float32 or int32
            for Python values and initializers, the array's own for arrays.

    Raises:
        ValueError: ``initial_value`` is None, or has another shape; ``aggregation`` or
            ``synchronization`` is not of its enum; a step is being traced.
        TypeError: The value is no array of numbers or booleans.
    """

    __slots__ = ("__weakref__", "_home", "_spec")
    _spec: VariableSpec
    _home: Home

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
        shape: Sequence[int] | int | None = None,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    ) -> Variable:
        if isinstance(shape, int):
            shape = (shape,)
        request = Request(
            initial_value,
            None if shape is None else tuple(int(n) for n in shape),
            dtype,
            "Variable" if name is None else name,
            bool(trainable),
            aggregation,
            synchronization,
        )
        return create([request])[0]

    @property
    def spec(self) -> VariableSpec:
        """What the variable is, without its value."""
        return self._spec

    @property
    def home(self) -> Home:
        """Where the value lives when no step is being traced."""
        return self._home

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self._spec.shape, dtype=np.int64))

    @property
    def dtype(self) -> np.dtype:
        return self._spec.numpy_dtype

    @property
    def device(self) -> str:
        """TF's device string, as ``/job:ps/replica:0/task:0/device:CPU:0``."""
        return self._spec.device

    @property
    def trainable(self) -> bool:
        return self._spec.trainable

    @property
    def aggregation(self) -> VariableAggregation:
        return self._spec.aggregation

    @property
    def synchronization(self) -> VariableSynchronization:
        return self._spec.synchronization

    # ---- reads -------------------------------------------------------------------

    def value(self) -> Any:
        """The value: traced by jax inside a step, a read-only numpy array elsewhere.

        Raises:
            TypeError: Inside a step, if jax would truncate the dtype.
            RuntimeError: Outside of steps, in what jax traces before it runs.
            PSUnavailableError: The parameter server that held it is gone.
        """
        recording = recorder.get()
        if recording is None:
            return self._read_now()
        _convert.require_traceable(self._spec)
        return recording.read(self)

    def read_value(self) -> Any:
        """The same as `value`."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """The value as a read-only numpy array.

        Raises:
            RuntimeError: A step is being traced, so there is no value yet; or jax
                traces something else, and would keep the value.
        """
        if recorder.get() is not None:
            raise RuntimeError(
                f"{self._spec}: numpy() inside a step function, where values are not "
                "known yet: use value() and jax.numpy"
            )
        return self._read_now()

    def sparse_read(self, indices: Any) -> Any:
        """Rows ``indices`` of the value, in their order: shape ``indices.shape + row``.

        Raises:
            ValueError: The variable has no first axis, or indices are no integers.
            IndexError: Outside a step, if an index is out of bounds.
        """
        if not self._spec.shape:
            raise ValueError(f"sparse_read of {self._spec}: it has no first axis")
        if recorder.get() is not None:
            return jnp.take(self.value(), jnp.asarray(indices), axis=0)
        return self._rows(self._read_now(), indices)

    async def read_value_async(self) -> np.ndarray:
        """`value`, without blocking the running loop.

        Cancellation: nothing is lost, a read has no effect.
        """
        return await self._home.read_async(self)

    async def value_async(self) -> np.ndarray:
        """The same as `read_value_async`."""
        return await self._home.read_async(self)

    async def sparse_read_async(self, indices: Any) -> np.ndarray:
        """`sparse_read`, without blocking the running loop."""
        return self._rows(await self._home.read_async(self), indices)

    def _read_now(self) -> np.ndarray:
        refuse_read(self._spec)
        return self._home.read(self)

    def _rows(self, value: np.ndarray, indices: Any) -> np.ndarray:
        index = np.asarray(indices)
        if index.dtype.kind not in "iu":
            raise ValueError(
                f"sparse_read of {self._spec}: indices must be integers, "
                f"not {index.dtype}"
            )
        _convert.check_indices(self._spec, index, "sparse_read of")
        rows: np.ndarray = value[index]
        return rows

    # ---- updates of the whole value ----------------------------------------------

    def assign(self, value: Any, read_value: bool = True) -> Self:
        """Replaces the value; returns the variable. ``read_value`` is taken for TF's
        sake and changes nothing: reading costs nothing until it is done.

        Raises:
            ValueError: The shape is another one, or the dtype is of another kind.
            RuntimeError: Outside of steps, in what jax traces before it runs. This
                holds for every update.
        """
        return self._dense(UpdateOp.ASSIGN, value)

    def assign_add(self, delta: Any, read_value: bool = True) -> Self:
        """Adds ``delta``, of the variable's own shape; returns the variable.

        Raises:
            ValueError: The shape is another one, or the dtype is of another kind.
        """
        return self._dense(UpdateOp.ADD, delta)

    def assign_sub(self, delta: Any, read_value: bool = True) -> Self:
        """Subtracts ``delta``, of the variable's own shape; returns the variable.

        Raises:
            ValueError: The shape is another one, or the dtype is of another kind.
        """
        return self._dense(UpdateOp.SUB, delta)

    async def assign_async(self, value: Any) -> Self:
        """`assign`, without blocking the running loop.

        Cancellation: the update may or may not have been applied.
        """
        return await self._dense_async(UpdateOp.ASSIGN, value)

    async def assign_add_async(self, delta: Any) -> Self:
        """`assign_add`, without blocking the running loop; see `assign_async`."""
        return await self._dense_async(UpdateOp.ADD, delta)

    async def assign_sub_async(self, delta: Any) -> Self:
        """`assign_sub`, without blocking the running loop; see `assign_async`."""
        return await self._dense_async(UpdateOp.SUB, delta)

    # ---- updates of rows ---------------------------------------------------------

    def scatter_add(self, sparse_delta: IndexedSlices) -> Self:
        """Adds rows; duplicates accumulate. Returns the variable, as all of these do.

        Raises:
            ValueError: Indices are no vector of integers, or the rows do not fit.
            IndexError: Outside a step, if an index is out of bounds.
        """
        return self._sparse(UpdateOp.SCATTER_ADD, sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Self:
        """Subtracts rows; duplicates accumulate. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_SUB, sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Self:
        """Multiplies rows; duplicates accumulate. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MUL, sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Self:
        """Divides rows; duplicates accumulate. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_DIV, sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Self:
        """Keeps the smaller of old and given rows. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MIN, sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Self:
        """Keeps the larger of old and given rows. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_MAX, sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Self:
        """Replaces rows; of duplicates the last one wins. Raises as `scatter_add`."""
        return self._sparse(UpdateOp.SCATTER_UPDATE, sparse_delta)

    async def scatter_async(self, op: UpdateOp, sparse_delta: IndexedSlices) -> Self:
        """Any of the scatter updates, without blocking the running loop.

        Cancellation: the update may or may not have been applied.
        """
        return await self._sparse_async(op, sparse_delta)

    # ---- the one way of every update ---------------------------------------------

    def _dense(
        self, op: UpdateOp, value: Any, optimizer: Optimizer | None = None
    ) -> Self:
        recording = recorder.get()
        if recording is None:
            refuse_update(self._spec, _WORDS[op])
            operand = _convert.plain_operand(self._spec, value, _WORDS[op])
            self._home.update(self, op, (operand,), optimizer)
        else:
            traced = _convert.traced_operand(self._spec, value, _WORDS[op])
            recording.update(self, op, (traced,), optimizer)
        return self

    async def _dense_async(
        self, op: UpdateOp, value: Any, optimizer: Optimizer | None = None
    ) -> Self:
        operand = _convert.plain_operand(self._spec, value, _WORDS[op])
        await self._home.update_async(self, op, (operand,), optimizer)
        return self

    def _sparse(
        self, op: UpdateOp, delta: IndexedSlices, optimizer: Optimizer | None = None
    ) -> Self:
        recording = recorder.get()
        what, indices, values = _WORDS[op], delta.indices, delta.values
        if recording is None:
            refuse_update(self._spec, what)
            rows = _convert.plain_rows(self._spec, indices, values, what)
            self._home.update(self, op, rows, optimizer)
        else:
            traced = _convert.traced_rows(self._spec, indices, values, what)
            recording.update(self, op, traced, optimizer)
        return self

    async def _sparse_async(
        self, op: UpdateOp, delta: IndexedSlices, optimizer: Optimizer | None = None
    ) -> Self:
        indices, values = delta.indices, delta.values
        rows = _convert.plain_rows(self._spec, indices, values, _WORDS[op])
        await self._home.update_async(self, op, rows, optimizer)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """A new variable with the present value, where the current scope puts it."""
        return Variable(
            self.numpy(),
            self.trainable,
            self.name,
            aggregation=self.aggregation,
            synchronization=self.synchronization,
        )

    def __reduce__(self) -> Any:
        return detached, (self._spec,)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.Variable {spec.name!r} shape={spec.shape} dtype={spec.dtype} "
            f"device={spec.device}>"
        )


_WORDS: Final = {
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


def handle(spec: VariableSpec, home: Home) -> Variable:
    """A handle of a variable that exists already."""
    variable = object.__new__(Variable)
    variable._spec, variable._home = spec, home
    return variable


def detached(spec: VariableSpec) -> Variable:
    """A handle without a value: usable inside a step function alone."""
    return handle(spec, _DETACHED)


def create(requests: Sequence[Request]) -> list[Variable]:
    """New variables, where the current scope puts them.

    Raises:
        ValueError: A step is being traced, or the creator refuses a request.
    """
    for request in requests:
        check(request)
    current = creator.get()
    if current is not None:
        return current.create_variables(requests)
    return [_local(request) for request in requests]


def _local(request: Request) -> Variable:
    array = initialize(request)
    spec = VariableSpec(
        next(_local_keys),
        request.name,
        array.shape,
        array.dtype.name,
        LOCAL,
        request.trainable,
        request.aggregation,
        request.synchronization,
    )
    return handle(spec, LocalHome(array))
