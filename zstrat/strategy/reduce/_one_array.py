"""What is done to the values of all replicas that are one array over the devices.

Law of the file: one program each; along axis 0 the array itself is what is gathered.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from zstrat.collectives import ReduceOp
from zstrat.program.stages import settled
from zstrat.strategy.replica._columns import no_rank, require_axes, summable
from zstrat.strategy.replica._per_replica import DistributedValues


def is_one_array(node: Any) -> TypeGuard[DistributedValues]:
    """Whether the values of all replicas are rows of one array of jax."""
    return isinstance(node, DistributedValues) and isinstance(node.whole, jax.Array)


def _part_shape(value: DistributedValues) -> tuple[int, ...]:
    """The shape of each replica's value."""
    rows, *rest = value.whole.shape
    return tuple(rest) if value.is_stacked else (rows // value.replicas, *rest)


def reduce_whole(
    op: ReduceOp, value: DistributedValues, axes: tuple[int, ...] | None
) -> jax.Array:
    """The sum or mean over the replicas, and over ``axes`` of each replica's value.

    Raises:
        ValueError: The values have no such axis.
    """
    shape = _part_shape(value)
    count = value.replicas
    if axes is not None:
        axes = tuple(axis % len(shape) for axis in require_axes(axes, shape))
        count *= math.prod(shape[axis] for axis in axes)
    divisor = count if op is ReduceOp.MEAN else None
    reduce = _summed if _is_traced(value.whole) else _summed_at_once
    found: jax.Array = reduce(value.whole, (value.replicas, *shape), axes, divisor)
    return settled(found, (found,))


def _summed(
    whole: jax.Array,
    shape: tuple[int, ...],
    axes: tuple[int, ...] | None,
    divisor: int | None,
) -> jax.Array:
    parts: jax.Array = summable(whole, mean=divisor is not None).reshape(shape)
    if axes is None:
        total = parts.sum(0, dtype=parts.dtype)
    else:
        total = parts.sum((0, *[axis + 1 for axis in axes]))
    return total if divisor is None else total / divisor


_summed_at_once: Any = functools.partial(jax.jit, static_argnums=(1, 2, 3))(_summed)


def gather_whole(value: DistributedValues, axis: int) -> jax.Array:
    """The replicas' values one after the other along ``axis``.

    Raises:
        ValueError: The values are scalars, or have no such axis.
    """
    shape = _part_shape(value)
    if not shape:
        raise no_rank()
    axis = require_axes((axis,), shape)[0] % len(shape)
    whole: jax.Array = value.whole
    if axis == 0 and not value.is_stacked:
        return whole
    gather = _gathered if _is_traced(whole) else _gathered_at_once
    found: jax.Array = gather(whole, (value.replicas, *shape), axis)
    return settled(found, (found,))


def _gathered(whole: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    count, *part = shape
    part[axis] *= count
    return jnp.moveaxis(whole.reshape(shape), 0, axis).reshape(part)


_gathered_at_once: Any = functools.partial(jax.jit, static_argnums=(1, 2))(_gathered)


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)
