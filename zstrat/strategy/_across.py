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
from zstrat.program._collective import summable
from zstrat.program._cross import Kind, gather_from, sum_over
from zstrat.variables import IndexedSlices, is_staging, recorder

from ._values import (
    DistributedValues,
    as_array,
    as_axes,
    as_axis,
    computable,
    concatenate,
    is_whole,
    require_axes,
    require_gatherable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program._collective import Team
    from zstrat.program._cross import Channel


def reduce_across(team: Team, op: ReduceOp, value: Any, axis: Any) -> Any:
    """The pytree with every leaf reduced over all replicas, and over ``axis`` first.

    Cost: one collective for all leaves.

    Raises:
        ValueError: ``axis`` is outside the rank; replicas differ in shape.
        TypeError: ``axis`` is no integer or sequence of integers.
    """
    assert team.channel is not None
    axes = as_axes(axis)
    leaves: list[Any]
    treedef: Any  # its stubs lack what we call
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_whole)
    if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
        raise NotImplementedError(
            "strategy.reduce of IndexedSlices over several processes: reduce them in "
            "the replica function, get_replica_context().all_reduce"
        )
    nested, sums, counts = [], [], []
    for leaf in leaves:
        parts, inner = _flat_parts(leaf)
        nested.append((inner, len(parts)))
        for each in parts:
            arrays = [
                summable(as_array(part), mean=op is ReduceOp.MEAN) for part in each
            ]
            total, count = _summed(arrays, axes)
            sums.append(total)
            counts.append(count)
    if op is ReduceOp.MEAN:
        weights = [np.asarray(count, np.int32) for count in counts]
        both = _over(team.channel, [*sums, *weights])
        ours = zip(both, both[len(sums) :], sums, strict=False)
        found = [_mean(total, count, mine) for total, count, mine in ours]
    else:
        found = _over(team.channel, sums)
    left = iter(found)
    return treedef.unflatten(
        [inner.unflatten([next(left) for _ in range(n)]) for inner, n in nested]
    )


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
    if _is_traced():
        moved = jnp.moveaxis(jnp.asarray(mine), axis, 0)
        return jnp.moveaxis(gather_from(channel, [moved])[0], 0, axis)
    front = np.moveaxis(np.asarray(mine), axis, 0)
    whole = channel.carry_out(Kind.GATHER, [np.ascontiguousarray(front)])[0]
    return np.moveaxis(np.asarray(whole), 0, axis)


def _over(channel: Channel, arrays: Sequence[Any]) -> list[Any]:
    if _is_traced():
        return list(sum_over(channel, arrays))
    return channel.carry_out(Kind.SUM, arrays)


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
    """Per array in a value the parts of this process's replicas."""
    values = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
    flat = [jax.tree.flatten(value) for value in values]
    return [list(parts) for parts in zip(*[f for f, _ in flat], strict=True)], flat[0][
        1
    ]


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
