"""Values of the replicas of several processes, reduced and gathered.

What is not distributed is this process's value, as in TF: two processes with 1.0 have a
sum of 2.0. First the values of this process are brought together, then, once, those of
all. In a step this is part of the program; elsewhere it happens at once, on arrays of
numpy, which keep their dtype.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.program.stages import CrossKind, gather_from, sum_over
from zstrat.strategy.replica._collective import summable
from zstrat.variables import IndexedSlices, is_staging, recorder

from ._values import (
    as_array,
    as_axes,
    as_axis,
    computable,
    concatenate,
    is_distributed,
    is_whole,
    reduce_slices,
    require_axes,
    require_gatherable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program.stages import Channel
    from zstrat.strategy.replica._collective import Team


def reduce_across(team: Team, op: ReduceOp, value: Any, axis: Any) -> Any:
    """The pytree with every leaf reduced over all replicas, and over ``axis`` first.
    Of `IndexedSlices` the rows of rank 0 come first; duplicates are kept.

    Cost: one collective for all arrays, and one for all `IndexedSlices`, if there are
    any.

    Raises:
        ValueError: ``axis`` is outside the rank, or given for IndexedSlices; replicas
            differ in shape; in a step, processes differ in their number of rows.
        TypeError: ``axis`` is no integer or sequence of integers.
    """
    assert team.channel is not None
    axes = as_axes(axis)
    leaves: list[Any]
    treedef: Any  # its stubs lack what we call
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_whole)
    flat = [_flat_parts(leaf) for leaf in leaves]
    columns = [parts for each, _ in flat for parts in each]
    sparse = [any(map(_is_slices, parts)) for parts in columns]
    dense = [x for x, flag in zip(columns, sparse, strict=True) if not flag]
    rows = [x for x, flag in zip(columns, sparse, strict=True) if flag]
    if rows and axes is not None:
        raise ValueError("IndexedSlices are reduced with axis=None")
    sums = iter(_sums_across(team.channel, op, dense, axes))
    slices = iter(_slices_across(team.channel, op, rows))
    found = iter([next(slices if flag else sums) for flag in sparse])
    return treedef.unflatten(
        [inner.unflatten([next(found) for _ in parts]) for parts, inner in flat]
    )


def _sums_across(
    channel: Channel,
    op: ReduceOp,
    columns: Sequence[Sequence[Any]],
    axes: tuple[int, ...] | None,
) -> list[Any]:
    """The sums or means over all processes, of arrays of which there are the parts of
    this one."""
    is_mean = op is ReduceOp.MEAN
    sums, counts = [], []
    for parts in columns:
        arrays = [summable(as_array(part), mean=is_mean) for part in parts]
        total, count = _summed(arrays, axes)
        sums.append(total)
        counts.append(count)
    if not is_mean:
        return _over(channel, sums)
    weights = [np.asarray(count, np.int32) for count in counts]
    both = _over(channel, [*sums, *weights])
    ours = zip(both, both[len(sums) :], sums, strict=False)
    return [_mean(total, count, mine) for total, count, mine in ours]


def _slices_across(
    channel: Channel,
    op: ReduceOp,
    columns: Sequence[Sequence[Any]],
) -> list[IndexedSlices]:
    """The rows of all processes, of IndexedSlices of which there are the parts of this
    one."""
    mine = [reduce_slices(ReduceOp.SUM, parts) for parts in columns]
    fronts = [array for each in mine for array in (each.values, each.indices)]
    joined = iter(_joined(channel, fronts))
    found = []
    for parts, each in zip(columns, mine, strict=True):
        values, indices = next(joined), next(joined)
        if op is ReduceOp.MEAN:
            # Every process runs the same program, with as many replicas.
            values = values / (len(parts) * channel.size)
        found.append(IndexedSlices(values, indices, each.dense_shape))
    return found


def gather_across(team: Team, value: Any, axis: Any) -> Any:
    """The pytree with the parts of each leaf concatenated along ``axis``, those of rank
    0 first. Their lengths may differ, but in a step, where each process gives as many.

    Raises:
        TypeError: ``axis`` is no integer.
        NotImplementedError: A leaf is an IndexedSlices.
        ValueError: A part has rank 0, or other dimensions than the first one has.
    """
    channel, along = team.channel, as_axis(axis, "gather")
    assert channel is not None

    def leaf(node: Any) -> Any:
        parts, inner = _flat_parts(node)
        return inner.unflatten([_gathered(channel, each, along) for each in parts])

    return jax.tree.map(leaf, value, is_leaf=is_whole)


def _gathered(channel: Channel, parts: Sequence[Any], axis: int) -> Any:
    require_gatherable(list(parts))
    mine = concatenate(parts, axis)
    (axis,) = require_axes((axis,), mine.shape)
    of = jnp if _is_traced() else np
    (whole,) = _joined(channel, [of.moveaxis(of.asarray(mine), axis, 0)])
    return of.moveaxis(whole, 0, axis)


def _joined(channel: Channel, fronts: Sequence[Any]) -> list[Any]:
    """The rows that all processes have of these arrays, those of rank 0 first."""
    if not fronts:
        return []
    if _is_traced():
        return gather_from(channel, [jnp.asarray(x) for x in fronts])
    mine = [np.ascontiguousarray(x) for x in fronts]
    return channel.carry_out(CrossKind.GATHER, mine)


def _over(channel: Channel, arrays: Sequence[Any]) -> list[Any]:
    if not arrays:
        return []
    if _is_traced():
        return list(sum_over(channel, arrays))
    return channel.carry_out(CrossKind.SUM, arrays)


def _mean(total: Any, count: Any, mine: Any) -> Any:
    """In the dtype that the mean of one process has; ``mine`` is its sum."""
    if isinstance(total, jax.core.Tracer):
        return total / count
    if isinstance(mine, jax.Array):
        dtype = jnp.result_type(total.dtype, float)
    else:
        dtype = (np.zeros(1, total.dtype) / 1).dtype
    # Rounded last: numpy divides narrow floats by an int32 as wide ones.
    return (total / count).astype(dtype)


def _is_traced() -> bool:
    """Whether what is done here becomes part of a program."""
    return recorder.get() is not None or is_staging()


def _flat_parts(leaf: Any) -> tuple[list[list[Any]], Any]:
    """Per array, or IndexedSlices, in a value the parts of this process's replicas."""
    values = leaf.values if is_distributed(leaf) else (leaf,)
    flat = [jax.tree.flatten(value, is_leaf=_is_slices) for value in values]
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return [list(parts) for parts in columns], flat[0][1]


def _is_slices(node: object) -> bool:
    return isinstance(node, IndexedSlices)


def _summed(arrays: Sequence[Any], axes: tuple[int, ...] | None) -> tuple[Any, int]:
    """The sum over parts, and axes, and of how many values it is one."""
    count = len(arrays)
    if axes is not None:
        count = sum(
            math.prod(a.shape[i] for i in require_axes(axes, a.shape)) for a in arrays
        )
        arrays = [a.sum(axis=axes) for a in arrays]
    if len({a.shape for a in arrays}) > 1:
        raise ValueError(
            f"reduce: the replicas have values of the shapes "
            f"{sorted({a.shape for a in arrays})}; give an axis to reduce over, or use "
            "gather"
        )
    first, *others = computable(arrays)
    return sum(others, start=first), count
