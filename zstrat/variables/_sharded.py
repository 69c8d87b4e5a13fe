"""`ShardedVariable`: one array whose rows are stored in several variables.

The components are usually on different parameter servers. A dense update is split over
them, updates of rows go to the components that have these rows, and reads fetch only
the rows that they need. Like a `Variable` it is an opaque leaf of pytrees.

Law of the file: the components never change. Each component knows which rows it has
(`VariableSpec.part`), and refers weakly to the sharded variable.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp
import numpy as np

from . import _convert
from ._abstract import AbstractVariable
from ._device import DeviceStorage
from ._indexing import select
from ._recorder import recorder, refuse_read
from ._storage import (
    ComponentRows,
    VariableSpec,
    VariableSynchronization,
    read_all,
    read_all_async,
    read_parts,
)
from ._table import Table
from ._variable import Variable, create, like

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.wire import UpdateOp

    from ._storage import StorageUpdate
    from ._table import IndexedSlices
    from .gradients._gradient_call import TraceRecorder
    from .gradients._slots import OptimizerHandle


class ShardedVariable(AbstractVariable):
    """One array whose rows are those of several variables, its components.

    Strategies with a partitioner create sharded variables. The constructor joins
    existing ``variables``, in the order of their rows.

    Raises:
        TypeError: ``variables`` is not a non-empty list or tuple of variables.
        ValueError: The variables differ in dtype, or in shape beyond the first axis; or
            a variable occurs twice, or is already a component of another sharded
            variable.
    """

    __slots__ = ("__weakref__", "_components", "_table")
    _components: tuple[Variable, ...]
    _table: Table

    def __init__(
        self, variables: Sequence[Variable], name: str = "ShardedVariable"
    ) -> None:
        _check(variables)
        components = tuple(variables)
        table = Table(name, components)
        for index, variable in enumerate(variables):
            offset = int(table.offsets[index])
            part = ComponentRows(name, index, len(variables), offset, table.shape[0])
            variable._spec = replace(variable._spec, part=part)
        _fill(self, components, table)

    @property
    def variables(self) -> list[Variable]:
        """The components, in the order of their rows."""
        return list(self._components)

    @property
    def components(self) -> tuple[Variable, ...]:
        return self._components

    @property
    def table(self) -> Table:
        return self._table

    @property
    def _is_aggregated_on_read(self) -> bool:
        return any(component.is_aggregated_on_read for component in self.components)

    def _read_now(self) -> np.ndarray:
        if self._is_aggregated_on_read:
            # A storage knows only the replicas of this process.
            return _joined([component._read_now() for component in self.components])
        return _joined(read_all(self.components))

    async def _read_now_async(self) -> np.ndarray:
        if self._is_aggregated_on_read:
            return _joined([await part._read_now_async() for part in self.components])
        return _joined(await read_all_async(self.components))

    def _traced_value(self, recording: TraceRecorder) -> Any:
        parts = [component._traced_value(recording) for component in self.components]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        # Asked of each component, as one that is ON_READ gives its replicas shares.
        return [
            update
            for component, part in self._split(value)
            for update in component._updates(op, part, optimizer)
        ]

    def _record(
        self,
        recording: TraceRecorder,
        op: UpdateOp,
        value: Any,
        optimizer: OptimizerHandle | None = None,
    ) -> None:
        for component, part in self._split(value):
            component._record(recording, op, part, optimizer)

    def _split(self, value: Any) -> Iterator[tuple[Variable, Any]]:
        bounds = itertools.pairwise(self._table.offsets.tolist())
        for component, (start, stop) in zip(self.components, bounds, strict=True):
            yield component, value[start:stop]

    def _target_of_rows(self, op: UpdateOp) -> Table:
        for component in self.components:
            # A strategy's own refuses updates of rows.
            if component.synchronization is VariableSynchronization.ON_READ:
                component._target_of_rows(op)
        return self._table

    def __iter__(self) -> Iterator[Variable]:
        """Iterates over the components, as in TF; ``iter(v.value())`` iterates over
        rows."""
        return iter(self.components)

    def __len__(self) -> int:
        """Returns the number of components."""
        return len(self.components)

    def __getitem__(self, index: Any) -> Any:
        """Indexes as numpy does, by integers, slices, ``...``, None and masks.

        Outside of steps it fetches only the rows of the result. Inside a step it reads
        whole components, but only those that have rows of the result; for a few rows of
        a large table `sparse_read` is cheaper there.

        Raises:
            TypeError: The index, or a bound of a slice, is an array.
            IndexError: The index is out of bounds, or has more axes than the value.
            ValueError: The step of a slice is zero.
        """
        selection = select(index, self.shape)
        pieces = [
            (self.components[n], rows) for n, rows in selection.pieces(self._table)
        ]
        recording = recorder.get()
        if recording is None:
            refuse_read(self._spec)
            if self._is_aggregated_on_read:
                # All processes take part, and others may want other rows.
                return self._read_now()[index]
            return self._fetched(pieces)[selection.index]
        _convert.require_untruncated(self._spec)
        parts = [component._traced_value(recording)[rows] for component, rows in pieces]
        parts = parts or [jnp.zeros((0, *self.shape[1:]), self.dtype)]
        return jnp.concatenate(parts)[selection.index]

    def _fetched(self, pieces: Sequence[tuple[Variable, Any]]) -> np.ndarray:
        """Fetches the rows of the pieces and joins them. Cost: one request to each
        storage."""
        wanted = [_count(rows, component) for component, rows in pieces]
        touched = sum(component.shape[0] for component, _ in pieces)
        if not pieces:
            parts = [np.empty((0, *self.shape[1:]), self.dtype)]
        # For most rows whole components: no indices are sent, and none are gathered.
        elif sum(wanted) * 2 > touched:
            values = read_all(component for component, _ in pieces)
            parts = [
                value[rows] for value, (_, rows) in zip(values, pieces, strict=True)
            ]
        else:
            parts = read_parts([(c, _indices(rows, c)) for c, rows in pieces])
        return _joined(parts)

    def batch_scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Replaces rows; TF's other name for `scatter_update`."""
        return self.scatter_update(sparse_delta, use_locking, name)

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Reads rows ``indices`` [n], in their order: ``[n, ...]``. Fetches each of
        these rows once, and no others.

        Raises:
            ValueError: Indices are not a vector of integers.
            IndexError: An index is out of bounds; in a step, if its value is known.
        """
        indices = self._vector(indices)
        return super().sparse_read(indices, name)

    async def sparse_read_async(
        self, indices: Any, name: str | None = None
    ) -> np.ndarray:
        """Reads rows like `sparse_read`, without blocking the running loop."""
        indices = self._vector(indices)
        return await super().sparse_read_async(indices, name)

    def _vector(self, indices: Any) -> Any:
        indices = _convert.array_given(indices)
        # As TF's class, which takes no other.
        if np.ndim(indices) != 1:
            raise ValueError(
                f"sparse_read of {self._spec}: indices must be rank 1, got rank "
                f"{np.ndim(indices)}; zs.embedding_lookup takes any"
            )
        return indices

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedVariable:
        """Creates a new variable with the same components and the present values.

        A component of a strategy is copied in that strategy; other components are
        copied to where the current scope creates variables.

        Raises:
            RuntimeError: The current scope is of another strategy than that of the
                components.
        """
        refuse_read(self._spec)
        parts = self.components
        owners = {id(part.owner) for part in parts}
        copies: list[Any]
        if len(owners) == 1 and not any(
            isinstance(part.storage, DeviceStorage) for part in parts
        ):
            pairs = zip(parts, read_all(parts), strict=True)
            requests = [like(part, value, is_whole=True) for part, value in pairs]
            copies = [*create(requests, parts[0].owner)]
        else:
            # The program has joined components of several strategies, or replicas have
            # values of their own, which only the component itself can copy.
            copies = [part.__deepcopy__(memo) for part in parts]
        return ShardedVariable(copies, self.name)

    def __reduce__(self) -> Any:
        return joined, (self.components, self.name)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.ShardedVariable {spec.name!r} shape={spec.shape} "
            f"dtype={spec.dtype} parts={len(self.components)}>"
        )


def joined(components: Sequence[Variable], name: str) -> ShardedVariable:
    """Makes the handle of an existing sharded variable from its components."""
    sharded = object.__new__(ShardedVariable)
    parts = tuple(components)
    _fill(sharded, parts, Table(name, parts))
    return sharded


def _fill(
    sharded: ShardedVariable, components: tuple[Variable, ...], table: Table
) -> None:
    # It has no key of its own, because servers know only the components.
    first = components[0].spec
    sharded._spec = VariableSpec(
        first.key,
        table.name,
        table.shape,
        first.dtype,
        first.ps,
        first.trainable,
        first.aggregation,
        first.synchronization,
    )
    sharded._components, sharded._table = components, table
    for component in components:
        # Weakly, as the sharded variable holds its components.
        component._container = weakref.ref(sharded)


def _check(variables: Any) -> None:
    is_list = isinstance(variables, list | tuple) and bool(variables)
    if not is_list or not all(isinstance(v, Variable) for v in variables):
        raise TypeError(
            f"variables={variables!r}: expected a non-empty list of zs.Variable"
        )
    dtypes = {v.dtype.name for v in variables}
    if len(dtypes) > 1:
        raise ValueError(
            f"all variables of a ShardedVariable must have the same dtype, got "
            f"{[v.dtype.name for v in variables]}"
        )
    if any(not v.shape for v in variables) or len({v.shape[1:] for v in variables}) > 1:
        raise ValueError(
            f"all variables of a ShardedVariable must have the same shapes except for "
            f"the first axis, got {[v.shape for v in variables]}"
        )
    if len({v.spec.key for v in variables}) < len(variables):
        raise ValueError(
            f"a ShardedVariable has a variable twice among its variables: "
            f"{[v.name for v in variables]}"
        )
    for variable in variables:
        if variable.spec.part is not None:
            raise ValueError(
                f"{variable.spec} is part {variable.spec.part.index} of "
                f"{variable.spec.part.whole!r} already: a variable can be in only one "
                "ShardedVariable"
            )


def _count(rows: Any, component: Variable) -> int:
    if isinstance(rows, slice):
        return len(range(*rows.indices(component.shape[0])))
    return len(rows)


def _indices(rows: Any, component: Variable) -> np.ndarray:
    if isinstance(rows, slice):
        return np.arange(*rows.indices(component.shape[0]))
    return np.asarray(rows)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the rows of all parts to one array, which is read-only like the arrays of
    storages."""
    whole = parts[0].view() if len(parts) == 1 else np.concatenate(parts)
    whole.flags.writeable = False
    return whole
