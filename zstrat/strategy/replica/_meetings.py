"""What replicas that run in turns meet for, and what comes of it.

The same as in one program (`_collective`), on values that all lie here.

Law of the file: every replica is given the same, or its part of the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.program.gradients import is_live
from zstrat.program.stages import first_of, gather_from, sum_over
from zstrat.strategy.reduce._one_array import require_axes
from zstrat.variables import (
    IndexedSlices,
    cut_for_mean,
    is_staging,
    mean_of_cut,
    recorder,
)
from zstrat.wire import UpdateOp

from ._collective import Together, rows_of_mean, strong, summable, together
from ._per_replica import PerReplica, loose, on_one_device, select_replica
from ._regroup import regroup
from ._turns import ReplicaRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.strategy._abstract import AbstractStrategy
    from zstrat.variables import GradientCall, OptimizerHandle, VariableHandle

    from ._collective import Team


def merging(
    strategy: AbstractStrategy,
    merge_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ReplicaRendezvous:
    """``merge_fn`` is called once, with the values of all replicas. Each computes with
    what it is given, so that comes to its device."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        merged, named = regroup(values, PerReplica)
        result = merge_fn(strategy, *merged, **named)
        given = [select_replica(number, result) for number in range(len(values))]
        current = recorder.get()
        if is_staging() or not (current is None or is_live(current)):
            return given  # a program knows by itself where things are
        there = strategy._devices()
        return [*map(brought, given, there), *given[len(there) :]]

    return ReplicaRendezvous(
        "merge_call", "merge_call", (tuple(args), dict(kwargs)), join
    )


def brought(tree: Any, device: jax.Device) -> Any:
    """The pytree, with what is bound to one device or to others as what all that is on
    this one may be computed with: there, and on CPUs bound to no device."""
    return jax.tree.map(
        lambda leaf: _brought(leaf, device) if _is_bound(leaf) else leaf, tree
    )


def _is_bound(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return leaf.committed


def _brought(array: jax.Array, device: jax.Device) -> jax.Array:
    if array.devices() != {device}:
        array = jax.device_put(array, device)
    return loose(array)


def reducing(team: Team, op: ReduceOp, tree: Any) -> ReplicaRendezvous:
    """All get the sum or mean of a pytree; see `Team.all_reduce`.

    ``join`` raises ValueError if they bring different structures or shapes.
    """
    mean = op is ReduceOp.MEAN

    def join(values: Sequence[Any]) -> Sequence[Any]:
        columns, treedef = _columns(values)
        for column in columns:
            _require_alike(column)
        sparse = [_is_slices(column[0]) for column in columns]
        plain = [
            x for x, is_sparse in zip(columns, sparse, strict=True) if not is_sparse
        ]
        # In the order in which one program does it: other processes may run one.
        dense = iter(_summed(team, plain, mean))
        reduced = [
            _joined(team, column, mean) if is_sparse else next(dense)
            for column, is_sparse in zip(columns, sparse, strict=True)
        ]
        return [treedef.unflatten(reduced)] * len(values)

    words = f"all_reduce {op.name}{_options_of(team)}"
    return ReplicaRendezvous(("all_reduce", op, team.channel), words, tree, join)


def gathering(team: Team, tree: Any, axis: int) -> ReplicaRendezvous:
    """All get what the replicas give, one after the other along an axis."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        columns, treedef = _columns(values)
        gathered = _concatenated(team, columns, axis)
        return [treedef.unflatten(gathered)] * len(values)

    words = f"all_gather along {axis}{_options_of(team)}"
    return ReplicaRendezvous(("all_gather", axis, team.channel), words, tree, join)


def updating(
    team: Team,
    variable: VariableHandle,
    op: UpdateOp,
    operands: tuple[jax.Array, ...],
    optimizer: OptimizerHandle | None,
    apply: Callable[[tuple[jax.Array, ...]], None],
) -> ReplicaRendezvous:
    """What the replicas do to a variable is brought together and done once."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        apply(_combined(team, variable, op, values))
        return [None] * len(values)

    rule = None if optimizer is None else optimizer.id
    words = f"an update ({op.name.lower()}) of {variable.spec}"
    return ReplicaRendezvous((variable.spec.key, op, rule), words, operands, join)


def optimizing(
    team: Team, call: GradientCall, apply: Callable[[GradientCall], None]
) -> ReplicaRendezvous:
    """The gradients of all replicas are brought together and applied once; see
    `Team.aggregate_call`."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        apply(call.with_arrays(_combined_call(team, call, values)))
        return [None] * len(values)

    keys = tuple([variable.spec.key for variable in call.variables])
    words = f"gradients of {', '.join([str(v.spec) for v in call.variables[:3]])}"
    stacked = tuple([call.has_examples(leaf) for leaf in call.given])
    what = (keys, call.sparse, stacked, call.is_reduced, call.optimizer.id)
    return ReplicaRendezvous(what, words, call.arrays, join)


def own(tree: Any) -> Any:
    """What all replicas are given, as arrays that are this replica's: on its device,
    other objects than those of the others, and of the dtype that they have together."""
    return jax.tree.map(_own, tree)


def _own(array: Any) -> Any:
    if isinstance(array, jax.core.Tracer):
        return jnp.copy(strong(array))
    return jnp.asarray(np.array(array))


def _options_of(team: Team) -> str:
    options = None if team.channel is None else team.channel.options
    return "" if options is None else f" with {options}"


def _combined(
    team: Team,
    variable: VariableHandle,
    op: UpdateOp,
    several: Sequence[tuple[Any, ...]],
) -> tuple[jax.Array, ...]:
    """Operands of one update for all; see `Team.aggregate`."""
    if team.size == 1:
        return several[0]
    has_rows = len(several[0]) > 1
    how = together(variable, op, has_rows)
    if how is Together.FIRST:
        found = list(several[0])
        return tuple(found if team.channel is None else first_of(team.channel, found))
    mean = how is Together.MEAN
    if has_rows:
        slices = [IndexedSlices(values, indices) for indices, values in several]
        is_cut = mean and slices[0].values.dtype.kind in "iu"
        joined = _joined(team, slices, mean and not is_cut)
        if is_cut:
            return rows_of_mean(joined, team.size)
        return joined.indices, joined.values
    (column,) = zip(*several, strict=True)
    dtype = column[0].dtype
    if mean and dtype.kind in "iu":
        cut = zip(*[cut_for_mean(x, team.size) for x in column], strict=True)
        sums = _summed(team, list(cut), mean=False)
        return (mean_of_cut(sums, team.size).astype(dtype),)
    return (_summed(team, [column], mean)[0].astype(dtype),)


def _combined_call(
    team: Team, call: GradientCall, values: Sequence[tuple[Any, ...]]
) -> list[Any]:
    if team.size == 1:
        return list(values[0])
    if call.is_reduced:
        firsts = list(values[0])
        return firsts if team.channel is None else first_of(team.channel, firsts)
    each = [call.with_arrays(arrays) for arrays in values]
    arrays: list[Any] = []
    for place, (leaf, target, sparse, _) in enumerate(call.leaves()):
        op = UpdateOp.OPTIMIZE_ROWS if sparse else UpdateOp.OPTIMIZE
        several = [own.operands[place] for own in each]
        if call.has_examples(leaf):
            arrays += _concatenated(team, [[own[0] for own in several]], 0)
            continue
        arrays += _combined(team, target.components[0], op, several)
    return [*arrays, *_further(team, [own.further for own in each])]


def _further(team: Team, several: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The mean of floats; of others, what the first replica has."""
    columns = [list(column) for column in zip(*several, strict=True)]
    floats = [c for c in columns if jnp.asarray(c[0]).dtype.kind == "f"]
    others = [c[0] for c in columns if jnp.asarray(c[0]).dtype.kind != "f"]
    means = iter(_summed(team, floats, mean=True)) if floats else iter([])
    if others and team.channel is not None:
        others = first_of(team.channel, others)
    firsts = iter(others)
    return [
        next(means if jnp.asarray(c[0]).dtype.kind == "f" else firsts) for c in columns
    ]


def _columns(values: Sequence[Any]) -> tuple[list[tuple[Any, ...]], Any]:
    """Leaf by leaf what the replicas have.

    Raises:
        ValueError: They have pytrees of different structures.
    """
    flat = [jax.tree.flatten(value, is_leaf=_is_slices) for value in values]
    treedefs = {treedef for _, treedef in flat}
    if len(treedefs) > 1:
        raise ValueError(f"the replicas bring different structures: {treedefs}")
    return list(zip(*[leaves for leaves, _ in flat], strict=True)), flat[0][1]


def _require_alike(column: Sequence[Any]) -> None:
    """Refuses what addition would spread over the others, or could not take.

    Raises:
        ValueError: Replicas have arrays of different shapes, or some IndexedSlices and
            others arrays.
    """
    sparse = [_is_slices(x) for x in column]
    if all(sparse):
        return
    if any(sparse):
        raise ValueError(
            "all_reduce: some replicas bring IndexedSlices and others arrays: make it "
            "the same kind on all of them"
        )
    shapes = [np.shape(x) for x in column]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"all_reduce: the replicas bring arrays of the shapes {shapes}: expected "
            "one shape for all; pad them, or use all_gather"
        )


def _summed(
    team: Team, columns: Sequence[Sequence[Any]], mean: bool
) -> list[jax.Array]:
    """The sum or mean of each column, in one collective."""
    totals: list[jax.Array] = []
    for column in columns:
        arrays = [summable(jnp.asarray(x), mean=mean) for x in column]
        first, *others = on_one_device(arrays)
        totals.append(sum(others, start=first))
    if team.channel is not None:
        totals = sum_over(team.channel, totals)
    return [x / team.size for x in totals] if mean else totals


def _concatenated(
    team: Team, columns: Sequence[Sequence[Any]], axis: int
) -> list[jax.Array]:
    """The arrays of each column one after the other, in one collective."""
    whole: list[jax.Array] = []
    for column in columns:
        arrays = on_one_device([jnp.asarray(x) for x in column])
        _require_joinable([x.shape for x in arrays], axis)
        whole.append(jnp.concatenate(arrays, axis))
    if team.channel is None:
        return whole
    fronts = gather_from(team.channel, [jnp.moveaxis(x, axis, 0) for x in whole])
    return [jnp.moveaxis(x, 0, axis) for x in fronts]


def _require_joinable(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Refuses shapes that differ in another dimension than that one.

    Raises:
        ValueError: They do, or there is no such dimension.
    """
    first = shapes[0]
    require_axes((axis,), first)
    axis %= len(first)
    rests = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rests) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"all_gather along axis {axis}: the replicas give the shapes {shapes}, "
            "which must agree in every other dimension"
        )


def _joined(team: Team, column: Sequence[Any], mean: bool) -> IndexedSlices:
    parts = [x.values for x in column], [x.indices for x in column]
    values, indices = _concatenated(team, parts, 0)
    values = values / team.size if mean else values
    return IndexedSlices(values, indices, column[0].dense_shape)


def _is_slices(node: Any) -> bool:
    return isinstance(node, IndexedSlices)
