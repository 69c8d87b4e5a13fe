"""Reduces and gathers values across processes.

As in TF, a value that is not distributed counts as the value of this process: two
processes with 1.0 have a sum of 2.0. First the values within each process are combined,
then, in one collective, those of all processes. In a step both are part of the program;
elsewhere they happen at once, on numpy arrays, which keep their dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.program.stages import CrossKind, gather_from, sum_over
from zstrat.strategy.replica._columns import by_kind, columns_of, is_sparse
from zstrat.strategy.replica._per_replica import local_results
from zstrat.variables import IndexedSlices, is_staging, recorder

from ._values import (
    as_axes,
    as_axis,
    concatenate,
    is_whole,
    reduce_slices,
    require_no_axes,
    total_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program.stages import Channel
    from zstrat.strategy.replica._collective import Team
    from zstrat.strategy.replica._columns import Column


def reduce_across(team: Team, op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduces every leaf of a pytree over all replicas, and before that over ``axis``.
    `IndexedSlices` are concatenated, the rows of rank 0 first; duplicates are kept.

    Cost: one collective for all arrays, and one for all `IndexedSlices`, if there are
    any.

    Raises:
        ValueError: ``axis`` is outside the rank, or given for IndexedSlices; replicas
            differ in shape; in a step, processes differ in their number of rows.
        TypeError: ``axis`` is not an integer or a sequence of integers.
    """
    channel = team.channel
    assert channel is not None
    axes = as_axes(axis)
    leaves: list[Any]
    treedef: Any  # its stubs lack what we call
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_whole)
    split = [columns_of(local_results(leaf)) for leaf in leaves]
    # All leaves as one list, so that they travel together.
    columns = [column for each, _ in split for column in each]
    if any(map(is_sparse, columns)):
        require_no_axes(axes)  # before it waits for others
    found = iter(
        by_kind(
            columns,
            is_sparse,
            lambda dense: _sums_across(channel, op, dense, axes),
            lambda sparse: _slices_across(channel, op, sparse),
        )
    )
    return treedef.unflatten(
        [inner.unflatten([next(found) for _ in each]) for each, inner in split]
    )


def _sums_across(
    channel: Channel,
    op: ReduceOp,
    columns: Sequence[Column],
    axes: tuple[int, ...] | None,
) -> list[Any]:
    """Sums or averages each column of arrays over the replicas of all processes."""
    is_mean = op is ReduceOp.MEAN
    local = [total_of(parts, axes, mean=is_mean) for parts in columns]
    sums = [total for total, _ in local]
    if not is_mean:
        return _over(channel, sums)
    # Processes may have different numbers of values, so the counts travel, too.
    counts = [np.asarray(count, np.int32) for _, count in local]
    both = _over(channel, [*sums, *counts])
    pairs = zip(both, both[len(sums) :], sums, strict=False)
    return [_mean(total, count, own) for total, count, own in pairs]


def _slices_across(
    channel: Channel, op: ReduceOp, columns: Sequence[Column]
) -> list[IndexedSlices]:
    """Concatenates the rows of each column of IndexedSlices over the replicas of all
    processes."""
    # Added without a mean: it is divided once, by the replicas of all processes.
    local = [reduce_slices(ReduceOp.SUM, parts) for parts in columns]
    fronts = [array for each in local for array in (each.values, each.indices)]
    joined = iter(_concatenated(channel, fronts))
    result = []
    for parts, each in zip(columns, local, strict=True):
        values, indices = next(joined), next(joined)
        if op is ReduceOp.MEAN:
            # Every process runs the same program, with as many replicas.
            values = values / (len(parts) * channel.size)
        result.append(IndexedSlices(values, indices, each.dense_shape))
    return result


def gather_across(team: Team, value: Any, axis: Any) -> Any:
    """Concatenates the parts of each leaf along ``axis``, those of rank 0 first.
    Lengths may differ outside of steps; in a step all processes must have the same
    length.

    Raises:
        TypeError: ``axis`` is not an integer.
        NotImplementedError: A leaf is an IndexedSlices.
        ValueError: A part has rank 0, or other dimensions than the first part.
    """
    channel, along = team.channel, as_axis(axis, "gather")
    assert channel is not None

    def leaf(node: Any) -> Any:
        columns, inner = columns_of(local_results(node))
        return inner.unflatten([_gathered(channel, each, along) for each in columns])

    return jax.tree.map(leaf, value, is_leaf=is_whole)


def _gathered(channel: Channel, parts: Column, axis: int) -> Any:
    local = concatenate(parts, axis)
    # Outside of programs in numpy, which keeps dtypes of 64 bits.
    of = jnp if _is_in_program() else np
    (whole,) = _concatenated(channel, [of.moveaxis(of.asarray(local), axis, 0)])
    return of.moveaxis(whole, 0, axis)


def _concatenated(channel: Channel, fronts: Sequence[Any]) -> list[Any]:
    """Concatenates the arrays of all processes along the first axis, those of rank 0
    first."""
    if not fronts:
        return []
    if _is_in_program():
        return gather_from(channel, [jnp.asarray(x) for x in fronts])
    local = [np.ascontiguousarray(x) for x in fronts]
    return channel.carry_out(CrossKind.GATHER, local)


def _over(channel: Channel, arrays: Sequence[Any]) -> list[Any]:
    """Sums each array over all processes."""
    if not arrays:
        return []
    if _is_in_program():
        return list(sum_over(channel, arrays))
    return channel.carry_out(CrossKind.SUM, arrays)


def _mean(total: Any, count: Any, local: Any) -> Any:
    """Divides a sum by a count, in the dtype that the mean has within one process.
    ``local`` is this process's sum, a jax or numpy array, whose rules for dtypes
    differ."""
    if isinstance(total, jax.core.Tracer):
        return total / count
    if isinstance(local, jax.Array):
        dtype = jnp.result_type(total.dtype, float)
    else:
        dtype = (np.zeros(1, total.dtype) / 1).dtype
    # Rounded last: numpy divides narrow floats by an int32 as wide ones.
    return (total / count).astype(dtype)


def _is_in_program() -> bool:
    """Returns whether the operation becomes part of a program that is being traced."""
    return recorder.get() is not None or is_staging()
