"""Barriers of sequential replicas: where they wait for each other to merge, reduce or
update.

A barrier computes a result from all replicas' values. Results are the same as when the
replicas are one program: the algorithms are those of `_collective`, on columns whose
parts are all in this process.

Law of barriers: every replica gets the same result, or its part of one result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.variables import is_staging, recorder

from ._collective import TeamReduction
from ._columns import columns_of, require_alike, require_joinable, strong
from ._fibers import ReplicaBarrier
from ._per_replica import (
    PerReplica,
    is_concrete,
    loose,
    on_one_device,
    regroup,
    select_replica,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.strategy._frames import AbstractStrategy
    from zstrat.variables import GradientCall, OptimizerHandle, VariableHandle
    from zstrat.wire import UpdateOp

    from ._collective import Team
    from ._columns import Column


def merging(
    strategy: AbstractStrategy,
    merge_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ReplicaBarrier:
    """Makes the barrier of ``merge_call``: ``merge_fn`` is called once, with the values
    of all replicas. Each replica gets its part of the result, moved to its device."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        merged, named = regroup(values, PerReplica)
        result = merge_fn(strategy, *merged, **named)
        given = [select_replica(number, result) for number in range(len(values))]
        current = recorder.get()
        if is_staging() or not (current is None or current.live):
            return given  # a program places values by itself
        there = strategy._devices()
        # A strategy that only plans has no devices here.
        return [*map(to_device, given, there), *given[len(there) :]]

    return ReplicaBarrier("merge_call", "merge_call", (tuple(args), dict(kwargs)), join)


def to_device(tree: Any, device: jax.Device) -> Any:
    """Moves arrays of a pytree that are bound to a device to ``device``. On a CPU the
    results are bound to no device, so they can be combined with arrays of other
    devices."""
    return jax.tree.map(
        lambda x: _array_to_device(x, device) if is_concrete(x) and x.committed else x,
        tree,
    )


def _array_to_device(array: jax.Array, device: jax.Device) -> jax.Array:
    if array.devices() != {device}:
        array = jax.device_put(array, device)
    return loose(array)


def reducing(team: Team, op: ReduceOp, tree: Any) -> ReplicaBarrier:
    """Makes the barrier of ``all_reduce``: every replica gets the sum or mean of a
    pytree; see `Team.all_reduce`.

    ``join`` of the barrier raises ValueError if structures or shapes of the replicas'
    values differ.
    """

    def join(values: Sequence[Any]) -> Sequence[Any]:
        columns, treedef = columns_of(values)
        for column in columns:
            require_alike("all_reduce", column, "pad them, or use all_gather")
        reduced = SequentialReduction(team).all_reduced(columns, op is ReduceOp.MEAN)
        return [treedef.unflatten(reduced)] * len(values)

    words = f"all_reduce {op.name}{_options_of(team)}"
    return ReplicaBarrier(("all_reduce", op, team.channel), words, tree, join)


def gathering(team: Team, tree: Any, axis: int) -> ReplicaBarrier:
    """Makes the barrier of ``all_gather``: every replica gets the arrays of all
    replicas, concatenated along an axis."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        columns, treedef = columns_of(values)
        gathered = SequentialReduction(team).gathered(columns, axis)
        return [treedef.unflatten(gathered)] * len(values)

    words = f"all_gather along {axis}{_options_of(team)}"
    return ReplicaBarrier(("all_gather", axis, team.channel), words, tree, join)


def updating(
    team: Team,
    variable: VariableHandle,
    op: UpdateOp,
    operands: tuple[jax.Array, ...],
    optimizer: OptimizerHandle | None,
    apply: Callable[[tuple[jax.Array, ...]], None],
) -> ReplicaBarrier:
    """Makes the barrier of an update: the operands of all replicas are combined, and
    applied to the variable once."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        apply(SequentialReduction(team).aggregated(variable, op, values))
        return [None] * len(values)

    rule = None if optimizer is None else optimizer.id
    # Updates return nothing, so the replicas only need to wait until it is done.
    words = f"an update ({op.name.lower()}) of {variable.spec}"
    return ReplicaBarrier((variable.spec.key, op, rule), words, operands, join)


def optimizing(
    team: Team, call: GradientCall, apply: Callable[[GradientCall], None]
) -> ReplicaBarrier:
    """Makes the barrier of ``apply_gradients``: the gradients of all replicas are
    combined and applied once; see `Team.aggregate_call`."""

    def join(values: Sequence[Any]) -> Sequence[Any]:
        calls = [call.with_arrays(arrays) for arrays in values]
        apply(SequentialReduction(team).aggregated_call(calls))
        return [None] * len(values)

    keys = tuple([variable.spec.key for variable in call.variables])
    words = f"gradients of {', '.join([str(v.spec) for v in call.variables[:3]])}"
    stacked = tuple([call.has_examples(leaf) for leaf in call.given])
    # A stack of gradients and a single one cannot be combined, so this is in the key.
    what = (keys, call.sparse, stacked, call.is_reduced, call.optimizer.id)
    return ReplicaBarrier(what, words, call.arrays, join)


def own(tree: Any) -> Any:
    """Copies arrays that are given to all replicas to the device of this replica. The
    copies are distinct objects in each replica, and strongly typed."""
    return jax.tree.map(_own, tree)


def _own(array: Any) -> Any:
    if isinstance(array, jax.core.Tracer):
        return jnp.copy(strong(array))
    if isinstance(array, jax.Array) and not isinstance(array.dtype, np.dtype):
        return array.copy()  # keys, which numpy does not take
    # Through numpy: a new object on the device of the replica, of a strong dtype.
    return jnp.asarray(np.array(array))


def _options_of(team: Team) -> str:
    options = None if team.channel is None else team.channel.options
    return "" if options is None else f" with {options}"


@final
class SequentialReduction(TeamReduction):
    """Reduces the values of sequential replicas. A column has the parts of all replicas
    in this process, and the parts are moved to the device of the first replica."""

    def _added(self, columns: Sequence[Column]) -> list[jax.Array]:
        totals: list[jax.Array] = []
        for column in columns:
            # In the order of replicas, so that a sum of floats is the same in every
            # run.
            first, *others = on_one_device(column)
            totals.append(sum(others, start=first))
        return totals

    def _concatenated(self, columns: Sequence[Column], axis: int) -> list[jax.Array]:
        # Before any concatenation, so that the error names the replicas' shapes.
        for column in columns:
            require_joinable("all_gather", [x.shape for x in column], axis)
        return [jnp.concatenate(on_one_device(column), axis) for column in columns]

    def _of_first(self, columns: Sequence[Column]) -> list[jax.Array]:
        return [column[0] for column in columns]
