"""`Variable`: a handle that consists of a spec (name, shape, location) and a storage,
which has the value.

`AbstractVariable` has the methods that read and update it.

Variables are opaque leaves of pytrees. jax functions that are compiled at the call
(``jnp.exp``, ``jnp.sum``, ...) do not take foreign objects: inside such calls write
``v.value()``, or convert a whole pytree with `values`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.wire import UpdateOp

from ._abstract import AbstractVariable
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
from ._local import CopyStorage, LocalStorage, UnboundStorage
from ._operators import ArrayOperators
from ._recorder import VariableUse, note_use
from ._storage import LOCAL, VariableAggregation, VariableSpec, VariableSynchronization
from ._table import Table

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from ._storage import Storage, StorageUpdate, VariableHandle
    from .gradients._gradient_call import TraceRecorder
    from .gradients._slots import OptimizerHandle

# Negative: those of variables on parameter servers are not.
_local_keys = itertools.count(-1, -1)
_UNBOUND: Final = UnboundStorage()


class Variable(AbstractVariable):
    """A shared, mutable array.

    Inside ``strategy.scope()`` the variable is created where the strategy stores
    variables, such as on its parameter servers; elsewhere it is stored in this process.
    If the strategy's partitioner shards it, the call returns a `ShardedVariable`, as in
    TF.

    Args:
        initial_value: An array, a Python value, or a callable. A callable is called
            with ``(shape, dtype)`` if it takes two arguments and ``shape`` is given
            (`zstrat.initializers`), otherwise without arguments.
        trainable: Whether ``trainable_variables`` of a module includes the variable.
            Default: True, unless its synchronization is ON_READ.
        shape: Shape of the value; needed only by an initializer.
        dtype: A string, numpy dtype or jax scalar type. Default: float32 or int32 for
            Python values and initializers, for arrays their dtype.
        per_worker_variable: Whether each worker has its own value: then the call
            returns a `PerWorkerVariable`, which optimizers do not update.

    Raises:
        ValueError: ``initial_value`` is None, or has another shape; ``aggregation`` or
            ``synchronization`` is not a member of its enum; the variable is trainable
            and its synchronization is ON_READ; a step is being traced.
        TypeError: The value is not an array of numbers or booleans, or the name is not
            a string.

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
            raise TypeError(f"name={name!r:.80}: expected a string")
        request = VariableRequest(
            initial_value,
            None if shape is None else _sizes(shape, name),
            dtype,
            name,
            is_trainable(trainable, synchronization, name),
            aggregation,
            synchronization,
        )
        # In `__new__`, because a partitioner makes this a variable of another class.
        variable: Any
        if per_worker_variable:
            variable = create_per_worker(request)
        else:
            variable = create([request])[0]
        return variable  # type: ignore[no-any-return]  # or a variable of another class

    @property
    def spec(self) -> VariableSpec:
        """The description of the variable without its value: name, shape, dtype,
        location."""
        return self._spec

    @property
    def storage(self) -> Storage:
        """The storage that reads and updates use outside of traced steps."""
        return self._storage

    @property
    def device(self) -> str:
        """TF's device string, as ``/job:ps/replica:0/task:0/device:CPU:0``; if several
        devices have a copy, that of the first."""
        note_use(VariableUse.NAME, self)
        storage = self._storage
        if isinstance(storage, DeviceStorage | CopyStorage):
            return storage.device_name()
        return self._spec.device

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope the variable was created, as long as it is alive;
        None for a plain variable of this process.

        Raises:
            RuntimeError: This handle came from another task, which has the strategy.
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
        """The `ShardedVariable` of which this variable is a component, as long as it is
        alive; None for a variable that is not sharded."""
        return None if self._container is None else self._container()

    @property
    def components(self) -> tuple[Variable, ...]:
        return (self,)

    @property
    def table(self) -> Table:
        if not self._spec.shape:
            raise ValueError(f"{self._spec} is a scalar and has no rows")
        return Table(self._spec.name, (self,))

    @property
    def is_aggregated_on_read(self) -> bool:
        """Whether a read aggregates the values of several processes or replicas, so
        that no storage can return single rows."""
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
        # As rows of a table: gradients of one row are summed, because an optimizer
        # takes one step per row. Scatter updates keep their duplicates, in order.
        return self.table if op is UpdateOp.OPTIMIZE_ROWS else self

    @property
    def owner(self) -> Creator | None:
        """The creator (see `_creator`) of the strategy that the variable belongs to,
        which also creates copies of it; None for a plain variable of this process."""
        return self._storage if isinstance(self._storage, Creator) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Creates a new variable with the present value.

        The copy of a strategy's variable belongs to the same strategy, both in its
        scope and outside of any scope; the copy of a variable of this process is
        created where the current scope stores variables. The copy of a component is not
        sharded. If the strategy has several processes, all of them must copy the
        variable at the same point of the program.

        Raises:
            RuntimeError: The current scope is of another strategy than the variable's.
        """
        copied: Any = self._duplicated(self.numpy())
        return copied  # type: ignore[no-any-return]  # or a ShardedVariable

    def _duplicated(self, value: np.ndarray) -> AbstractVariable:
        # Sharded variables are copied component by component, so that this is not cut
        # again.
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
    """Makes a handle of an existing variable from its spec and storage."""
    variable = object.__new__(Variable)
    variable._spec, variable._storage, variable._container = spec, storage, None
    return variable


def stand_in(variable: Variable) -> Variable:
    """Makes another handle of the same variable that is not equal to any other
    object."""
    copied = object.__new__(type(variable))
    # Variables have slots and no `__dict__`.
    slots = [name for kind in type(variable).__mro__ for name in _slots(kind)]
    for name in slots:
        setattr(copied, name, getattr(variable, name))
    return copied


def _slots(kind: type) -> Sequence[str]:
    return [name for name in vars(kind).get("__slots__", ()) if name != "__weakref__"]


def unbound(spec: VariableSpec) -> Variable:
    """Makes a handle without a value, for use in step functions only."""
    return handle(spec, _UNBOUND)


def _sizes(shape: Sequence[int], name: str) -> tuple[int, ...]:
    with contextlib.suppress(TypeError):
        sizes = tuple(operator.index(size) for size in shape)
        if all(size >= 0 for size in sizes):
            return sizes
    raise ValueError(
        f"variable {name!r}: shape={shape!r:.80}: expected whole numbers, 0 or more"
    )


def create(
    requests: Sequence[VariableRequest], owner: Creator | None = None
) -> Sequence[AbstractVariable]:
    """Creates variables where the current scope stores them; a strategy may shard them.

    If no scope is current, the creator ``owner`` creates the variables; a current scope
    must belong to it.

    Raises:
        ValueError: A step is being traced, or the creator refuses a request.
        RuntimeError: The current scope does not belong to ``owner``.

    Warns:
        DowncastWarning: A variable has 64 bits, and its request names no dtype.
    """
    for request in requests:
        check(request)
    current = creator.get()
    if owner is not None:
        require_owner(current, owner, requests[0].name)
        # Outside of every scope the copy stays with the strategy of its original.
        current = owner if current is None else current
    if current is None:
        variables: Sequence[AbstractVariable] = [
            _local(request) for request in requests
        ]
    else:
        variables = current.create_variables(requests)
    _warn_of_wide(requests, variables)
    return variables


def like(variable: Variable, value: np.ndarray, *, is_whole: bool) -> VariableRequest:
    """Makes a request for a variable with the attributes of this one and another
    value."""
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
    """Returns the key of a new variable of this process."""
    return next(_local_keys)


def owned(request: VariableRequest, array: np.ndarray, storage: Storage) -> Variable:
    """Makes a variable of this process whose value ``storage`` already has."""
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
"""Maximum number of variables that one warning names."""


def _warn_of_wide(
    requests: Sequence[VariableRequest], variables: Sequence[AbstractVariable]
) -> None:
    """Warns of new variables that steps will refuse, because their request has no dtype
    and their initial value has floats of 64 bits. (Integers of 64 bits are taken as
    intended: they count things outside of steps.)

    Warns:
        DowncastWarning: One warning for all such variables.
    """
    wide = [
        variable
        for request, variable in zip(requests, variables, strict=True)
        if request.dtype is None
        and variable.dtype.kind in "fc"
        and downcast_dtype(variable.dtype).itemsize < variable.dtype.itemsize
        # From another variable: its dtype was chosen, or warned of, when that was
        # created.
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
