"""What replicas do together: those of this process, and those of other processes.

The replicas of one process are one program over the named axis of `_replicas`: they are
brought together by jax's own collectives, inside of XLA. What they have together goes
to the other processes once (`zstrat.program.stages._cross`).

Law of the file: everything here runs inside a replica function, and gives every replica
the same result.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from zstrat.program.stages import (
    PROCESS,
    Channel,
    first_of,
    gather_from,
    sum_over,
    within_mesh,
)
from zstrat.variables import (
    GradientCall,
    IndexedSlices,
    VariableAggregation,
    VariableHandle,
    cut_for_mean,
    mean_of_cut,
)
from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Sequence

AXIS: Final = "replica"
"""Name of the mapped axis."""

# jax's stubs leave it untyped.
_psum: Final[Any] = jax.lax.psum

_NOT_ADDITIVE: Final = (
    UpdateOp.SCATTER_MIN,
    UpdateOp.SCATTER_MAX,
    UpdateOp.SCATTER_UPDATE,
)
_FACTORS: Final = (UpdateOp.SCATTER_MUL, UpdateOp.SCATTER_DIV)


@dataclass(frozen=True, slots=True, eq=False)
class Team:
    """The replicas that compute together: ``local`` of them in this process, and as
    many in each other process of ``channel``, if there is one."""

    local: int
    channel: Channel | None = None

    @property
    def size(self) -> int:
        """How many replicas."""
        return self.local * (1 if self.channel is None else self.channel.size)

    @property
    def first(self) -> int:
        """The number of the first replica of this process."""
        return 0 if self.channel is None else self.channel.rank * self.local

    def replica_id(self) -> int | jax.Array:
        """The number of the replica that runs, from 0; int32 where several replicas are
        one program."""
        return self.id_of(0 if self.local == 1 else jax.lax.axis_index(AXIS))

    def id_of(self, replica: int | jax.Array) -> int | jax.Array:
        """The number that a replica of this process has among all of them."""
        if within_mesh.get():
            # One program for all processes: XLA takes a number that is written in it
            # for that of each of them, and would gather one process's own from all.
            return jax.lax.axis_index(PROCESS) * self.local + replica
        return self.first + replica

    def all_reduce(self, tree: Any, *, mean: bool) -> Any:
        """Sums (or averages) the pytree; every replica gets the result.

        `IndexedSlices` are concatenated in replica order, duplicates kept; for the mean
        their values are divided by the number of replicas.
        """
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_slices)
        # One collective for all the dense leaves: XLA makes one all-reduce of it.
        dense = iter(self.reduced([x for x in leaves if not _is_slices(x)], mean))
        return jax.tree.unflatten(
            treedef,
            [self._joined(x, mean) if _is_slices(x) else next(dense) for x in leaves],
        )

    def all_gather(self, tree: Any, axis: int) -> Any:
        """The replicas' arrays one after the other along ``axis``, in replica order."""
        leaves, treedef = jax.tree.flatten(tree)
        fronts = [jnp.moveaxis(jnp.asarray(x), axis, 0) for x in leaves]
        found = [jnp.moveaxis(x, 0, axis) for x in self._gathered(fronts)]
        return jax.tree.unflatten(treedef, found)

    def aggregate(
        self, variable: VariableHandle, op: UpdateOp, operands: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Operands of one update for all the replicas that make it. The mean of
        integers is one, exactly; what is behind the point is left out: of rows, of what
        all replicas together add to each row.

        Raises:
            ValueError: The variable's aggregation is NONE.
            NotImplementedError: Rows that are not added cannot be summed, and there is
                no mean of factors that are integers.
        """
        if self.size == 1:
            return operands
        has_rows = len(operands) > 1
        how = together(variable, op, has_rows)
        if how is Together.FIRST:
            return tuple(self._first(operands))
        mean = how is Together.MEAN
        if has_rows:
            return self._rows(operands, mean)
        (operand,) = operands
        if mean and operand.dtype.kind in "iu":
            sums = self.reduced(cut_for_mean(operand, self.size), mean=False)
            return (mean_of_cut(sums, self.size).astype(operand.dtype),)
        return (self.reduced(operands, mean)[0].astype(operand.dtype),)

    def aggregate_call(self, call: GradientCall) -> GradientCall:
        """The gradients of all the replicas together: their sums, unless they are the
        same in all of them already. Of further arguments the mean, or what the first
        replica has of those that are no floats."""
        if self.size == 1:
            return call
        if call.is_reduced:
            return call.with_arrays(self._first(call.arrays))
        arrays: list[jax.Array] = []
        for leaf, target, sparse, mine in call.leaves():
            if call.has_examples(leaf):
                arrays += self._gathered(mine)
                continue
            op = UpdateOp.OPTIMIZE_ROWS if sparse else UpdateOp.OPTIMIZE
            arrays += self.aggregate(target.components[0], op, mine)
        further = [jnp.asarray(x) for x in call.further]
        floats = iter(self.reduced([x for x in further if x.dtype.kind == "f"], True))
        firsts = iter(self._first([x for x in further if x.dtype.kind != "f"]))
        arrays += [next(floats if x.dtype.kind == "f" else firsts) for x in further]
        return call.with_arrays(arrays)

    def reduced(self, leaves: Sequence[Any], mean: bool) -> list[jax.Array]:
        """Sums or means of arrays. Means of integers are floats."""
        arrays = [strong(summable(jnp.asarray(leaf), mean=mean)) for leaf in leaves]
        if self.local > 1:
            arrays = _psum(arrays, AXIS)
        if self.channel is not None:
            arrays = sum_over(self.channel, arrays)
        return [x / self.size for x in arrays] if mean else list(arrays)

    def _first(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Replica 0's values."""
        arrays = list(operands)
        if self.local > 1:
            # A select, because 0 * nan of another replica is nan.
            is_mine = jax.lax.axis_index(AXIS) == 0
            mine = [jnp.where(is_mine, x, jnp.zeros_like(x)) for x in arrays]
            summed: list[jax.Array] = _psum(mine, AXIS)
            arrays = [s.astype(x.dtype) for s, x in zip(summed, arrays, strict=True)]
        return arrays if self.channel is None else first_of(self.channel, arrays)

    def _rows(
        self, operands: tuple[jax.Array, ...], mean: bool
    ) -> tuple[jax.Array, ...]:
        indices, values = operands
        is_cut = mean and values.dtype.kind in "iu"
        joined = self._joined(IndexedSlices(values, indices), mean and not is_cut)
        if is_cut:
            return rows_of_mean(joined, self.size)
        return joined.indices, joined.values

    def _joined(self, slices: IndexedSlices, mean: bool) -> IndexedSlices:
        values, indices = self._gathered([slices.values, slices.indices])
        if mean:
            values = values / self.size
        return IndexedSlices(values, indices, slices.dense_shape)

    def _gathered(self, leaves: Sequence[Any]) -> list[jax.Array]:
        arrays = [strong(jnp.asarray(leaf)) for leaf in leaves]
        if self.local > 1:
            arrays = [jax.lax.all_gather(x, AXIS, tiled=True) for x in arrays]
        return arrays if self.channel is None else gather_from(self.channel, arrays)


def rows_of_mean(slices: IndexedSlices, count: int) -> tuple[jax.Array, jax.Array]:
    """Indices and rows of the mean of integers that ``count`` replicas add to rows of a
    variable: one row for each index, and zeros for one of them in place of the rest."""
    indices, values = slices.indices, slices.values
    size = indices.shape[0]
    if not size:
        return indices, values
    unique, inverse = jnp.unique(indices, return_inverse=True, size=size)
    sums = [
        jax.ops.segment_sum(x, inverse.reshape(-1), num_segments=size)
        for x in cut_for_mean(values, count)
    ]
    return unique, mean_of_cut(sums, count).astype(values.dtype)


def _is_slices(node: Any) -> bool:
    return isinstance(node, IndexedSlices)


def strong(array: jax.Array) -> jax.Array:
    """The array in its dtype, whatever it meets: what replicas have together is no
    Python number any more, and a sum is not cut to the bytes of what it meets."""
    if not jax.typeof(array).weak_type:
        return array
    found: jax.Array = jax.lax.convert_element_type(array, array.dtype)
    return found


def summable(array: Any, *, mean: bool) -> Any:
    """The array in a dtype that holds the sum of several: booleans are counted, and
    narrow integers, whose mean is a float, do not wrap on the way to it."""
    dtype = array.dtype
    is_narrow = mean and dtype.kind in "iu" and dtype.itemsize < 4
    return array.astype(int) if dtype.kind == "b" or is_narrow else array


class Together(enum.Enum):
    """How what several replicas do to a variable becomes one update."""

    SUM = enum.auto()
    MEAN = enum.auto()
    FIRST = enum.auto()


def together(variable: VariableHandle, op: UpdateOp, has_rows: bool) -> Together:
    """The way of an update. Gradients are summed; all else follows the variable.

    Raises:
        ValueError: The variable's aggregation is NONE.
        NotImplementedError: Rows that are not added cannot be summed, and there is no
            mean of factors that are integers.
    """
    if op in (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS):
        return Together.SUM
    match variable.aggregation:
        case VariableAggregation.NONE:
            raise ValueError(
                f"You must specify an aggregation method to update {variable.spec} "
                "in replica context: its replicas would disagree. Create it with, "
                "for example, "
                "zs.Variable(..., aggregation=zs.VariableAggregation.SUM)"
            )
        case VariableAggregation.ONLY_FIRST_REPLICA:
            return Together.FIRST
        case aggregation if has_rows and op in _NOT_ADDITIVE:
            raise NotImplementedError(
                f"{op.name.lower()} of {variable.spec} in replica context is "
                "only supported with VariableAggregation.ONLY_FIRST_REPLICA, "
                f"not with {aggregation.name}"
            )
        case VariableAggregation.MEAN if op in _FACTORS and _is_integer(variable):
            raise NotImplementedError(
                f"{op.name.lower()} of {variable.spec} in replica context: the mean of "
                "its replicas' factors is none of integers. Create it with "
                "VariableAggregation.SUM, for the factors of all replicas, or with "
                "VariableAggregation.ONLY_FIRST_REPLICA"
            )
        case VariableAggregation.MEAN:
            return Together.MEAN
    return Together.SUM


def _is_integer(variable: VariableHandle) -> bool:
    return variable.dtype.kind in "iu"
