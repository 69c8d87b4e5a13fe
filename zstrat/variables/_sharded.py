"""A variable in parts: its rows are in several variables, each on a ps of its own.

To its user it is one array. Whatever is done with it goes to the components that are
concerned: a dense update is cut, rows go where they live, and what is read in part is
fetched in part. Like a `Variable` it is an opaque leaf of pytrees.

Law of the file: the components never change, and each of them knows which rows it is
(`VariableSpec.part`) and, without holding it, of what.
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
from ._spec import ComponentRows, VariableSpec
from ._storage import read_all, read_all_async, read_parts
from ._table import Table, select
from ._tracing import TraceRecorder, recorder, refuse_read
from ._variable import Variable, create, like

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.wire import UpdateOp

    from ._storage import StorageUpdate
    from ._table import IndexedSlices
    from .gradients._slots import OptimizerHandle


class ShardedVariable(AbstractVariable):
    """One array over the rows of several variables.

    A strategy with a partitioner makes them; ``variables`` of one's own, in the order
    of their rows, are joined here, and know from then on that they are parts.

    Raises:
        TypeError: ``variables`` is no list or tuple of variables, or an empty one.
        ValueError: They differ in dtype, or in shape beyond the first axis; or one of
            them is there twice, or a part of another variable already.
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

    def _read_now(self) -> np.ndarray:
        return _joined(read_all(self.components))

    async def _read_now_async(self) -> np.ndarray:
        return _joined(await read_all_async(self.components))

    def _traced_value(self, recording: TraceRecorder) -> Any:
        parts = [recording.read(component) for component in self.components]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        bounds = itertools.pairwise(self._table.offsets.tolist())
        return [
            (component, op, (value[start:stop],), optimizer)
            for component, (start, stop) in zip(self.components, bounds, strict=True)
        ]

    def _target_of_rows(self, op: UpdateOp) -> Table:
        return self._table

    def __iter__(self) -> Iterator[Variable]:
        """The components, as in TF; ``iter(v.value())`` goes through the rows."""
        return iter(self.components)

    def __len__(self) -> int:
        """How many components there are: what iterating gives."""
        return len(self.components)

    def __getitem__(self, index: Any) -> Any:
        """What numpy's indexing gives for integers, slices, ``...``, None and masks.

        Outside of steps only the rows that are wanted are fetched; inside, whole
        components, but only those that have such rows. For some rows of a large table
        `sparse_read` is the cheaper word there.

        Raises:
            TypeError: The index, or a bound of a slice, is an array.
            IndexError: It is out of bounds, or for more axes than there are.
            ValueError: The step of a slice is zero.
        """
        selection = select(index, self.shape)
        pieces = [
            (self.components[n], rows) for n, rows in selection.pieces(self._table)
        ]
        recording = recorder.get()
        if recording is None:
            refuse_read(self._spec)
            return self._fetched(pieces)[selection.index]
        _convert.require_untruncated(self._spec)
        parts = [recording.read(component)[rows] for component, rows in pieces]
        parts = parts or [jnp.zeros((0, *self.shape[1:]), self.dtype)]
        return jnp.concatenate(parts)[selection.index]

    def _fetched(self, pieces: Sequence[tuple[Variable, Any]]) -> np.ndarray:
        """Fetches rows and puts them together. Cost: one request to each storage."""
        wanted = [_count(rows, component) for component, rows in pieces]
        touched = sum(component.shape[0] for component, _ in pieces)
        if not pieces:
            parts = [np.empty((0, *self.shape[1:]), self.dtype)]
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
        """Updates as `scatter_update`, which takes any number of rows."""
        return self.scatter_update(sparse_delta, use_locking, name)

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Rows ``indices`` [n] of the value, in their order: ``[n, ...]``. Nothing but
        these rows is fetched, each of them once.

        Raises:
            ValueError: Indices are no integers, or no vector.
            IndexError: An index is out of bounds; inside a step where it is known.
        """
        indices = self._vector(indices)
        return super().sparse_read(indices, name)

    async def sparse_read_async(
        self, indices: Any, name: str | None = None
    ) -> np.ndarray:
        """`sparse_read`, without blocking the running loop."""
        indices = self._vector(indices)
        return await super().sparse_read_async(indices, name)

    def _vector(self, indices: Any) -> Any:
        indices = _convert.array_given(indices)
        if np.ndim(indices) != 1:
            raise ValueError(
                f"sparse_read of {self._spec}: indices must be rank 1, got rank "
                f"{np.ndim(indices)}; zs.embedding_lookup takes any"
            )
        return indices

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedVariable:
        """A new variable in the same parts with the present values. Parts that belong
        to a strategy have copies there, others where the current scope puts them.

        Raises:
            RuntimeError: In the scope of another strategy than that of the parts.
        """
        refuse_read(self._spec)
        requests = [
            like(part, value, is_whole=True)
            for part, value in zip(
                self.components, read_all(self.components), strict=True
            )
        ]
        owners = [part.owner for part in self.components]
        made: list[Any]
        if all(owner is owners[0] for owner in owners):
            made = [*create(requests, owners[0])]
        else:  # parts that a program has joined
            pairs = zip(requests, owners, strict=True)
            made = [create([request], owner)[0] for request, owner in pairs]
        return ShardedVariable(made, self.name)

    def __reduce__(self) -> Any:
        return joined, (self.components, self.name)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.ShardedVariable {spec.name!r} shape={spec.shape} "
            f"dtype={spec.dtype} parts={len(self.components)}>"
        )


def joined(components: Sequence[Variable], name: str) -> ShardedVariable:
    """The variable over components that know already that they are its parts."""
    sharded = object.__new__(ShardedVariable)
    parts = tuple(components)
    _fill(sharded, parts, Table(name, parts))
    return sharded


def _fill(
    sharded: ShardedVariable, components: tuple[Variable, ...], table: Table
) -> None:
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
        component._container = weakref.ref(sharded)


def _check(variables: Any) -> None:
    is_list = isinstance(variables, list | tuple) and bool(variables)
    if not is_list or not all(isinstance(v, Variable) for v in variables):
        raise TypeError(
            f"variables should be a non-empty list of zs.Variable, got {variables!r}"
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
            f"a variable is there twice among those of a ShardedVariable: "
            f"{[v.name for v in variables]}"
        )
    for variable in variables:
        if variable.spec.part is not None:
            raise ValueError(
                f"{variable.spec} is part {variable.spec.part.index} of "
                f"{variable.spec.part.whole!r} already: a variable is in one "
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
    """The rows of all parts; read-only, as what storages give is."""
    whole = parts[0].view() if len(parts) == 1 else np.concatenate(parts)
    whole.flags.writeable = False
    return whole
