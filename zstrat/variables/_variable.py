"""A variable: a handle of what it is (its spec) and where its value lives (its
storage).

What can be done with it is said in `AbstractVariable`.

Variables are opaque leaves of pytrees. jax functions that are compiled at the call
(``jnp.exp``, ``jnp.sum``, ...) do not take foreign objects: inside such calls write
``v.value()``, or convert a whole pytree with `values`.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.wire import UpdateOp

from ._abstract import AbstractVariable
from ._copy_storage import CopyStorage
from ._creator import (
    Creator,
    StrategyCreator,
    VariableRequest,
    check,
    create_per_worker,
    creator,
    initialize,
    is_trainable,
    require_owner,
)
from ._device import DeviceStorage
from ._downcast import DowncastWarning, downcast_dtype, user_stacklevel
from ._local import LocalStorage, UnboundStorage
from ._operators import ArrayOperators
from ._spec import LOCAL, VariableAggregation, VariableSpec, VariableSynchronization
from ._table import Table
from ._tracing import VariableUse, note_use

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from ._storage import Storage, StorageUpdate, VariableHandle
    from ._tracing import TraceRecorder
    from .gradients._slots import OptimizerHandle

# Negative: those of variables on parameter servers are not.
_local_keys = itertools.count(-1, -1)
_UNBOUND: Final = UnboundStorage()


class Variable(AbstractVariable):
    """A shared, mutable array.

    Inside ``strategy.scope()`` it is created on the parameter servers; elsewhere it
    lives in this process. Where a strategy's partitioner wants it in several parts, a
    `ShardedVariable` comes back, as in TF.

    Args:
        initial_value: An array, a Python value, or a callable. A callable is called
            with ``(shape, dtype)`` if it takes two arguments and ``shape`` is given
            (`zstrat.initializers`), else without any.
        trainable: Whether it is among the ``trainable_variables`` of a module. Left
            out: it is, unless its synchronization is ON_READ.
        shape: Of the value; may be left out unless an initializer needs it.
        dtype: A string, numpy dtype or jax scalar type. Left out: float32 or int32
            for Python values and initializers, the array's own for arrays.
        per_worker_variable: Each worker has one of its own: a `PerWorkerVariable`,
            which no optimizer moves.

    Raises:
        ValueError: ``initial_value`` is None, or has another shape; ``aggregation`` or
            ``synchronization`` is not of its enum; it is to be trainable and its
            synchronization is ON_READ; a step is being traced.
        TypeError: The value is no array of numbers or booleans, or the name no text.

    Warns:
        DowncastWarning: No dtype was given, and the value is an array of float64, as
            numpy makes them: steps would refuse the variable.
    """

    __slots__ = ("__weakref__", "_container", "_storage")
    _storage: Storage
    _container: weakref.ref[AbstractVariable] | None

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        shape: Sequence[int] | int | None = None,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        per_worker_variable: bool = False,
    ) -> Variable:
        if isinstance(shape, int | np.integer):
            shape = (int(shape),)
        name = "Variable" if name is None else name
        if not isinstance(name, str):
            raise TypeError(f"name={name!r:.80}: expected the name of a variable, text")
        request = VariableRequest(
            initial_value,
            None if shape is None else tuple(int(n) for n in shape),
            dtype,
            name,
            is_trainable(trainable, synchronization, name),
            aggregation,
            synchronization,
        )
        made: Any
        if per_worker_variable:
            made = create_per_worker(request)
        else:
            made = create([request])[0]
        return made  # type: ignore[no-any-return]  # or a variable of another class

    @property
    def spec(self) -> VariableSpec:
        """What the variable is, without its value."""
        return self._spec

    @property
    def storage(self) -> Storage:
        """Where the value lives when no step is being traced."""
        return self._storage

    @property
    def device(self) -> str:
        """TF's device string, as ``/job:ps/replica:0/task:0/device:CPU:0``; of a
        variable that several devices have, the first one's."""
        note_use(VariableUse.NAME, self)
        storage = self._storage
        if isinstance(storage, DeviceStorage | CopyStorage):
            return storage.device_name()
        return self._spec.device

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was created, while somebody holds that; None:
        it is a plain variable of this process.

        Raises:
            RuntimeError: This handle came from another task, where the strategy is.
        """
        note_use(VariableUse.NAME, self)
        if isinstance(self._storage, UnboundStorage):
            raise RuntimeError(
                f"{self._spec} came from another task, and its strategy stayed there: "
                "in a step ask zs.get_strategy()"
            )
        owner = self.owner
        return owner.strategy if isinstance(owner, StrategyCreator) else None

    @property
    def sharded_container(self) -> AbstractVariable | None:
        """The `ShardedVariable` that this one is a component of, as long as somebody
        holds it; None for one that is whole."""
        return None if self._container is None else self._container()

    @property
    def components(self) -> tuple[Variable, ...]:
        return (self,)

    @property
    def table(self) -> Table:
        if not self._spec.shape:
            raise ValueError(f"{self._spec} has no first axis, hence no rows")
        return Table(self._spec.name, (self,))

    @property
    def is_brought_together(self) -> bool:
        """Whether the value that is meant here and now is made of several ones when it
        is read, so that no storage has rows of it."""
        return False

    def _read_now(self) -> np.ndarray:
        return self._storage.read(self)

    async def _read_now_async(self) -> np.ndarray:
        return (await self._storage.read_many_async([self]))[0]

    def _traced_value(self, recording: TraceRecorder) -> Any:
        return recording.read(self)

    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        return [(self, op, (value,), optimizer)]

    def _target_of_rows(self, op: UpdateOp) -> VariableHandle | Table:
        # As rows of a table: gradients of one row are summed, as an optimizer takes one
        # step a row. What is scattered keeps its duplicates, in their order.
        return self.table if op is UpdateOp.OPTIMIZE_ROWS else self

    @property
    def owner(self) -> Creator | None:
        """The strategy's creator that it belongs to, which makes copies of it; None:
        it is a plain variable of this process."""
        return self._storage if isinstance(self._storage, Creator) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """A new variable with the present value. That of a strategy belongs to the
        same strategy, in its scope or outside of all; that of this process goes where
        the current scope puts it. Of a part it is one that is whole. Of several
        processes all copy it, at the same place of the program.

        Raises:
            RuntimeError: In the scope of another strategy than the variable's.
        """
        made: Any = self._duplicated(self.numpy())
        return made  # type: ignore[no-any-return]  # or a ShardedVariable

    def _duplicated(self, value: np.ndarray) -> AbstractVariable:
        is_whole = self.owner is not None or self._spec.part is not None
        return create([like(self, value, is_whole=is_whole)], self.owner)[0]

    def __reduce__(self) -> Any:
        return unbound, (self._spec,)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.Variable {spec.name!r} shape={spec.shape} dtype={spec.dtype} "
            f"device={self.device}>"
        )


def handle(spec: VariableSpec, storage: Storage) -> Variable:
    """A handle of a variable that exists already."""
    variable = object.__new__(Variable)
    variable._spec, variable._storage, variable._container = spec, storage, None
    return variable


def stand_in(variable: Variable) -> Variable:
    """Another handle of the same variable, which is equal to nothing else."""
    made = object.__new__(type(variable))
    slots = [name for kind in type(variable).__mro__ for name in _slots(kind)]
    for name in slots:
        setattr(made, name, getattr(variable, name))
    return made


def _slots(kind: type) -> Sequence[str]:
    return [name for name in vars(kind).get("__slots__", ()) if name != "__weakref__"]


def unbound(spec: VariableSpec) -> Variable:
    """A handle without a value: usable inside a step function alone."""
    return handle(spec, _UNBOUND)


def create(
    requests: Sequence[VariableRequest], owner: Creator | None = None
) -> Sequence[AbstractVariable]:
    """New variables, where the current scope puts them; it may cut them in parts.

    ``owner`` makes them where no scope is current, and has to be that of the scope.

    Raises:
        ValueError: A step is being traced, or the creator refuses a request.
        RuntimeError: The scope is not that of the owner.

    Warns:
        DowncastWarning: One has 64 bits, which nobody asked for.
    """
    for request in requests:
        check(request)
    current = creator.get()
    if owner is not None:
        require_owner(current, owner, requests[0].name)
        current = owner if current is None else current
    if current is None:
        made: Sequence[AbstractVariable] = [_local(request) for request in requests]
    else:
        made = current.create_variables(requests)
    _warn_of_wide(requests, made)
    return made


def like(variable: Variable, value: np.ndarray, *, is_whole: bool) -> VariableRequest:
    """Asks for a variable as this one is, with this value."""
    spec = variable.spec
    return VariableRequest(
        value,
        None,
        variable.dtype,
        spec.name,
        spec.trainable,
        spec.aggregation,
        spec.synchronization,
        is_whole,
    )


def _local(request: VariableRequest) -> Variable:
    array = initialize(request)
    return owned(request, array, LocalStorage(array))


def next_key() -> int:
    """The key of a variable of this process."""
    return next(_local_keys)


def owned(request: VariableRequest, array: np.ndarray, storage: Storage) -> Variable:
    """A new variable of this process, as asked for, with this value in its storage."""
    spec = VariableSpec(
        next_key(),
        request.name,
        array.shape,
        array.dtype.name,
        LOCAL,
        request.trainable,
        request.aggregation,
        request.synchronization,
    )
    return handle(spec, storage)


_NAMED: Final = 3
"""Variables of one call that are named."""


def _warn_of_wide(
    requests: Sequence[VariableRequest], made: Sequence[AbstractVariable]
) -> None:
    """Says which new variables no step will take, because nobody said their dtype and
    their first value happens to have floats of 64 bits. (Integers of 64 bits are meant:
    they count what is outside of steps.)

    Warns:
        DowncastWarning: Once for all of them.
    """
    wide = [
        variable
        for request, variable in zip(requests, made, strict=True)
        if request.dtype is None
        and variable.dtype.kind in "fc"
        and downcast_dtype(variable.dtype).itemsize < variable.dtype.itemsize
        and not isinstance(request.initial_value, ArrayOperators)
    ]
    if not wide:
        return
    own, kind = wide[0].dtype, downcast_dtype(wide[0].dtype)
    names = ", ".join(repr(variable.name) for variable in wide[:_NAMED])
    more = f" and {len(wide) - _NAMED} more" if len(wide) > _NAMED else ""
    warnings.warn(
        f"{names}{more}: created with dtype {own}, that of the initial value, and a "
        f"step would refuse it, because jax computes with {kind}. Give "
        f'dtype="{kind}", or value.astype("{kind}"); or, if {own} is meant, '
        f'dtype="{own}", and switch on jax_enable_x64 (JAX_ENABLE_X64=1) to use it in '
        "steps",
        DowncastWarning,
        stacklevel=user_stacklevel(),
    )
