"""Collectives among the replicas of this process and of other processes.

The replicas of one process either are one program over a named axis (`_regions`), or
they run sequentially (`_fibers`). Either way their values are combined in this process
first, and then once with those of the other processes, which may run their replicas the
other way (`zstrat.program.stages._cross`).

Law of the file: every replica gets the same result, and the arguments alone decide the
order of collectives.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp

from zstrat.program.stages import (
    PROCESS,
    Channel,
    first_of,
    gather_from,
    gathered,
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

from ._columns import by_kind, is_slices, is_sparse, strong, summable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._columns import Column

AXIS: Final = "replica"
"""Name of the axis over which replicas that are one program are mapped."""

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
    """The replicas that compute together: ``local`` replicas in this process, and the
    same number in each other process of ``channel``, if there is one.

    The methods that combine values are for replicas that are one program, and are
    called inside of that program.
    """

    local: int
    channel: Channel | None = None

    @property
    def size(self) -> int:
        """Number of replicas in all processes."""
        return self.local * (1 if self.channel is None else self.channel.size)

    @property
    def first(self) -> int:
        """The id of the first replica of this process."""
        return 0 if self.channel is None else self.channel.rank * self.local

    def replica_id(self) -> int | jax.Array:
        """Returns the id of the replica that runs, from 0; a traced int32 where several
        replicas are one program."""
        return self.id_of(0 if self.local == 1 else jax.lax.axis_index(AXIS))

    def id_of(self, replica: int | jax.Array) -> int | jax.Array:
        """Returns the id, among all replicas, of replica number ``replica`` of this
        process."""
        if within_mesh.get():
            # One program for all processes: a constant in it would be the same number
            # in each of them, so the number of the process is an index of the mesh.
            return jax.lax.axis_index(PROCESS) * self.local + replica
        return self.first + replica

    def all_reduce(self, tree: Any, *, mean: bool) -> Any:
        """Sums (or averages) a pytree over the replicas; every replica gets the result.

        `IndexedSlices` are concatenated in replica order, duplicates kept; for the mean
        their values are divided by the number of replicas.
        """
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
        reduced = MappedReduction(self).all_reduced([(x,) for x in leaves], mean)
        return jax.tree.unflatten(treedef, reduced)

    def all_gather(self, tree: Any, axis: int) -> Any:
        """Concatenates the arrays of the replicas along ``axis``, in replica order;
        every replica gets the result."""
        leaves, treedef = jax.tree.flatten(tree)
        gathered = MappedReduction(self).gathered([(x,) for x in leaves], axis)
        return jax.tree.unflatten(treedef, gathered)

    def aggregate(
        self, variable: VariableHandle, op: UpdateOp, operands: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Combines the operands that all replicas pass to an update into those of one
        update; raises as `TeamReduction.aggregated`."""
        return MappedReduction(self).aggregated(variable, op, [operands])

    def aggregate_call(self, call: GradientCall) -> GradientCall:
        """Combines the gradients of all replicas into one call; see
        `TeamReduction.aggregated_call`."""
        return MappedReduction(self).aggregated_call([call])


class TeamReduction(abc.ABC):
    """Combines the values of the replicas of a team, whether they are one program or
    run sequentially.

    Arrays are passed as columns (`_columns`). Two subclasses define, in the first three
    methods, how a column becomes one array in this process. Everything else is the same
    for both, so processes whose replicas are one program can compute with processes
    whose replicas run sequentially.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    @property
    def _axis(self) -> str | None:
        """Name of the axis over which several replicas are mapped."""
        return None

    @abc.abstractmethod
    def _added(self, columns: Sequence[Column]) -> list[jax.Array]:
        """Sums the arrays of each column, which have the same shape."""

    @abc.abstractmethod
    def _concatenated(self, columns: Sequence[Column], axis: int) -> list[jax.Array]:
        """Concatenates the arrays of each column.

        Raises:
            ValueError: Arrays have no such axis, or differ in another dimension.
        """

    @abc.abstractmethod
    def _of_first(self, columns: Sequence[Column]) -> list[jax.Array]:
        """Returns, for each column, the array of the first replica of this process."""

    def reduced(self, columns: Sequence[Column], mean: bool) -> list[jax.Array]:
        """Sums or averages each column over all replicas, in one collective. Means of
        integers are floats."""
        totals = self._added(
            [[summable(jnp.asarray(x), mean=mean) for x in each] for each in columns]
        )
        if self._team.channel is not None:
            # One collective for all columns: messages are matched by their order, and a
            # large one is cheaper than many small ones.
            totals = sum_over(self._team.channel, totals, self._axis)
        return [x / self._team.size for x in totals] if mean else totals

    def gathered(self, columns: Sequence[Column], axis: int = 0) -> list[jax.Array]:
        """Concatenates the arrays of each column over all replicas along ``axis``, in
        one collective.

        Raises:
            ValueError: Arrays have no such axis, or differ in another dimension.
        """
        whole = self._concatenated(
            [[jnp.asarray(x) for x in column] for column in columns], axis
        )
        if self._team.channel is None:
            return whole
        # Processes gather along the first axis.
        fronts = [_moved(x, axis, 0) for x in whole]
        whole = gather_from(self._team.channel, fronts, self._axis)
        return [_moved(x, 0, axis) for x in whole]

    def firsts(self, columns: Sequence[Column]) -> list[jax.Array]:
        """Returns, for each column, the array of replica 0 of all processes."""
        local, channel = self._of_first(columns), self._team.channel
        return local if channel is None else first_of(channel, local)

    def joined(self, column: Sequence[IndexedSlices], mean: bool) -> IndexedSlices:
        """Concatenates the rows of a column of `IndexedSlices` over all replicas; for a
        mean, divides the values by the number of replicas."""
        parts = [x.values for x in column], [x.indices for x in column]
        # Rows and their indices travel in one collective.
        values, indices = self.gathered(parts)
        values = values / self._team.size if mean else values
        return IndexedSlices(values, indices, column[0].dense_shape)

    def all_reduced(self, columns: Sequence[Column], mean: bool) -> list[Any]:
        """Sums or averages each column: arrays in one collective, which XLA executes as
        one all-reduce; `IndexedSlices` as in `joined`."""
        return by_kind(
            columns,
            is_sparse,
            lambda dense: self.reduced(dense, mean),
            lambda sparse: [self.joined(column, mean) for column in sparse],
        )

    def aggregated(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Sequence[tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, ...]:
        """Combines the operands of an update in each replica into those of one update.
        The mean of integers is computed exactly and then truncated to an integer; for
        updates of rows, after summing what all replicas add to each row.

        Raises:
            ValueError: The variable's aggregation is NONE.
            NotImplementedError: An update of rows other than an addition cannot be
                aggregated, and a mean of integer factors is not an integer.
        """
        # Also with VariableAggregation.NONE: one replica cannot disagree with itself.
        if self._team.size == 1:
            return operands[0]
        columns = list(zip(*operands, strict=True))
        has_rows = len(columns) > 1
        how = aggregation_rule(variable, op, has_rows)
        if how is VariableAggregation.ONLY_FIRST_REPLICA:
            return tuple(self.firsts(columns))
        mean = how is VariableAggregation.MEAN
        if has_rows:
            indices, values = columns
            return self._rows(indices, values, mean)
        (column,) = columns
        dtype = column[0].dtype
        # A sum of int32 may overflow and float32 has 24 bits, so quotients and
        # remainders are summed separately, as integers.
        if mean and dtype.kind in "iu":
            size = self._team.size
            cut = zip(*[cut_for_mean(x, size) for x in column], strict=True)
            sums = self.reduced(list(cut), mean=False)
            return (mean_of_cut(sums, size).astype(dtype),)
        # Back from the dtype that holds the sum (`summable`).
        return (self.reduced(columns, mean)[0].astype(dtype),)

    def aggregated_call(self, calls: Sequence[GradientCall]) -> GradientCall:
        """Combines the gradients of the calls of all replicas: sums the gradients,
        unless they are already the same in all replicas. Of further arguments it takes
        the mean over the replicas, or the value of the first replica if they are not
        floats."""
        call = calls[0]
        if self._team.size == 1:
            return call
        if call.is_reduced:
            # Not each replica's own: equal gradients may still differ in the last bit
            # between devices, and copies of variables would drift apart.
            columns = list(zip(*[each.arrays for each in calls], strict=True))
            return call.with_arrays(self.firsts(columns))
        arrays: list[Any] = []
        for index, (leaf, target, sparse, _) in enumerate(call.leaves()):
            operands = [each.operands[index] for each in calls]
            if call.has_examples(leaf):
                # All of them: an optimizer that needs the gradient of each example (a
                # private one, for example) does not take sums.
                arrays += self.gathered(list(zip(*operands, strict=True)))
                continue
            op = UpdateOp.OPTIMIZE_ROWS if sparse else UpdateOp.OPTIMIZE
            arrays += self.aggregated(target.components[0], op, operands)
        further = list(zip(*[each.further for each in calls], strict=True))
        # Counters and flags have no mean.
        arrays += by_kind(
            further,
            lambda column: jnp.asarray(column[0]).dtype.kind != "f",
            lambda floats: self.reduced(floats, mean=True),
            self.firsts,
        )
        return call.with_arrays(arrays)

    def _rows(
        self, indices: Column, values: Column, mean: bool
    ) -> tuple[jax.Array, ...]:
        slices = [IndexedSlices(x, i) for i, x in zip(indices, values, strict=True)]
        is_downcast = mean and values[0].dtype.kind in "iu"
        joined = self.joined(slices, mean and not is_downcast)
        if is_downcast:
            return rows_of_mean(joined, self._team.size)
        return joined.indices, joined.values


@final
class MappedReduction(TeamReduction):
    """Combines the values of replicas that are one program over `AXIS`, with jax's own
    collectives inside of XLA. A column has one part, which is traced for all
    replicas."""

    @property
    def _axis(self) -> str | None:
        return None if self._team.local == 1 else AXIS

    def _added(self, columns: Sequence[Column]) -> list[jax.Array]:
        arrays = [strong(array) for (array,) in columns]
        if self._team.local == 1:
            return arrays
        summed: list[jax.Array] = _psum(arrays, AXIS)
        return list(summed)

    def _concatenated(self, columns: Sequence[Column], axis: int) -> list[jax.Array]:
        arrays = [strong(array) for (array,) in columns]
        if self._team.local == 1:
            return arrays
        fronts = [_moved(x, axis, 0) for x in arrays]
        return [_moved(gathered(x, AXIS), 0, axis) for x in fronts]

    def _of_first(self, columns: Sequence[Column]) -> list[jax.Array]:
        arrays = [jnp.asarray(array) for (array,) in columns]
        if self._team.local == 1:
            return arrays
        # A select, because 0 * nan of another replica is nan.
        is_first = jax.lax.axis_index(AXIS) == 0
        local = [jnp.where(is_first, x, jnp.zeros_like(x)) for x in arrays]
        summed: list[jax.Array] = _psum(local, AXIS)
        # Back: a sum of booleans is an integer.
        return [s.astype(x.dtype) for s, x in zip(summed, arrays, strict=True)]


def _moved(array: jax.Array, axis: int, to: int) -> jax.Array:
    return array if axis == to else jnp.moveaxis(array, axis, to)


def rows_of_mean(slices: IndexedSlices, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns indices and rows of the mean of integers that ``count`` replicas add to
    rows of a variable."""
    indices, values = slices.indices, slices.values
    size = indices.shape[0]
    if not size:
        return indices, values
    # Rows of one index are summed first, because a mean is truncated once. As a trace
    # has fixed shapes, the entries left over add zeros to one of them.
    unique, inverse = jnp.unique(indices, return_inverse=True, size=size)
    sums = [
        jax.ops.segment_sum(x, inverse.reshape(-1), num_segments=size)
        for x in cut_for_mean(values, count)
    ]
    return unique, mean_of_cut(sums, count).astype(values.dtype)


def aggregation_rule(
    variable: VariableHandle, op: UpdateOp, has_rows: bool
) -> VariableAggregation:
    """Returns how an update of a variable is aggregated over replicas. Gradients are
    summed; other updates follow the variable's aggregation.

    Raises:
        ValueError: The variable's aggregation is NONE.
        NotImplementedError: An update of rows other than an addition cannot be
            aggregated, and a mean of integer factors is not an integer.
    """
    if op in (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS):
        return VariableAggregation.SUM
    match variable.aggregation:
        case VariableAggregation.NONE:
            raise ValueError(
                f"You must specify an aggregation method to update {variable.spec} "
                "in replica context: its replicas would disagree. Create it with, "
                "for example, "
                "zs.Variable(..., aggregation=zs.VariableAggregation.SUM)"
            )
        case VariableAggregation.ONLY_FIRST_REPLICA as aggregation:
            return aggregation
        case aggregation if has_rows and op in _NOT_ADDITIVE:
            raise NotImplementedError(
                f"{op.name.lower()} of {variable.spec} in replica context is "
                "only supported with VariableAggregation.ONLY_FIRST_REPLICA, "
                f"not with {aggregation.name}"
            )
        case VariableAggregation.MEAN if op in _FACTORS and variable.dtype.kind in "iu":
            raise NotImplementedError(
                f"{op.name.lower()} of {variable.spec} in replica context: the mean of "
                "the factors of its replicas is not an integer. Create it with "
                "VariableAggregation.SUM, for the factors of all replicas, or with "
                "VariableAggregation.ONLY_FIRST_REPLICA"
            )
    return variable.aggregation
