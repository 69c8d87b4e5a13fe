"""Reduces and gathers the values of all replicas.

Law of the file: pure functions of values; the strategies check the context. They take
traced arrays inside a step, numpy arrays, and values of all replicas that are one array
over the devices: such an array is reduced by one program, and gathering along axis 0
returns the array itself.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import errors as jax_errors

from zstrat.collectives import ReduceOp
from zstrat.program.stages import settled
from zstrat.program.trace import is_integer_downcast
from zstrat.strategy.replica._columns import (
    is_slices,
    is_sparse,
    no_rank,
    require_alike,
    require_axes,
    require_joinable,
    summable,
)
from zstrat.strategy.replica._per_replica import (
    DistributedValues,
    Mirrored,
    on_one_device,
)
from zstrat.variables import AbstractVariable, IndexedSlices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.strategy.replica._columns import Column


def is_one_array(node: Any) -> TypeGuard[DistributedValues]:
    """Returns whether the values of all replicas are rows of one array of jax."""
    return isinstance(node, DistributedValues) and isinstance(node.whole, jax.Array)


def _part_shape(value: DistributedValues) -> tuple[int, ...]:
    """Returns the shape of each replica's value."""
    rows, *rest = value.whole.shape
    return tuple(rest) if value.is_stacked else (rows // value.replicas, *rest)


def reduce_whole(
    op: ReduceOp, value: DistributedValues, axes: tuple[int, ...] | None
) -> jax.Array:
    """Sums or averages values of replicas that are one array, over the replicas and
    over ``axes`` of each value.

    Raises:
        ValueError: The values have no such axis.
    """
    shape = _part_shape(value)
    count = value.replicas
    if axes is not None:
        axes = tuple(axis % len(shape) for axis in require_axes(axes, shape))
        count *= math.prod(shape[axis] for axis in axes)
    divisor = count if op is ReduceOp.MEAN else None
    # A program by itself, unless this is a part of one that is traced.
    reduce = _summed if _is_traced(value.whole) else _summed_at_once
    total: jax.Array = reduce(value.whole, (value.replicas, *shape), axes, divisor)
    # With several such programs under way, XLA's threads on a CPU can wait for each
    # other in their collectives without an end.
    return settled(total, (total,))


def _summed(
    whole: jax.Array,
    shape: tuple[int, ...],
    axes: tuple[int, ...] | None,
    divisor: int | None,
) -> jax.Array:
    parts: jax.Array = summable(whole, mean=divisor is not None).reshape(shape)
    # Over the replicas alone the dtype stays, as where arrays are added; over axes it
    # widens, as in a sum of numpy.
    if axes is None:
        total = parts.sum(0, dtype=parts.dtype)
    else:
        total = parts.sum((0, *[axis + 1 for axis in axes]))
    return total if divisor is None else total / divisor


_summed_at_once: Any = functools.partial(jax.jit, static_argnums=(1, 2, 3))(_summed)


def gather_whole(value: DistributedValues, axis: int) -> jax.Array:
    """Concatenates, along ``axis``, values of replicas that are one array.

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
    gathered: jax.Array = gather(whole, (value.replicas, *shape), axis)
    # As in `reduce_whole`.
    return settled(gathered, (gathered,))


def _gathered(whole: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    count, *part = shape
    part[axis] *= count
    return jnp.moveaxis(whole.reshape(shape), 0, axis).reshape(part)


_gathered_at_once: Any = functools.partial(jax.jit, static_argnums=(1, 2))(_gathered)


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)


def reduction(op: ReduceOp | str) -> ReduceOp:
    """Returns the reduction of values of replicas by its name in any case: SUM or MEAN.

    Raises:
        ValueError: ``op`` is something else; the error lists the reductions.
    """
    result = ReduceOp.of(op)
    if result not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"reduce_op {op!r}: replicas are reduced with 'SUM' or 'MEAN'; "
            "zs.collectives computes minima and maxima"
        )
    return result


@dataclass(frozen=True, slots=True)
class ValueContext:
    """The context that ``experimental_distribute_values_from_function`` passes to the
    function, for each replica."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def reduce_values(op: ReduceOp, value: Any, axis: Any, replicas: int) -> Any:
    """Reduces every leaf of a pytree over the replicas, and before that over ``axis``.

    A mean over ``axis`` divides the sum of all sums by the number of all elements, so
    that uneven replicas weigh correctly. Means of integers are floats.

    Raises:
        ValueError: A value that is not distributed is to be summed over several
            replicas; ``axis`` is outside the rank; replicas differ in structure.
        TypeError: ``axis`` is not an integer or a sequence of integers.
    """
    axes = as_axes(axis)

    def leaf(node: Any) -> Any:
        # Equal values: their mean is any of them.
        if isinstance(node, Mirrored) and op is ReduceOp.MEAN:
            return _reduce(op, [node.values[0]], axes)
        if is_one_array(node):
            return reduce_whole(op, node, axes)
        if isinstance(node, DistributedValues):
            return _joined(lambda parts: _reduce(op, parts, axes), node)
        if replicas == 1:
            return _reduce(op, [node], axes)
        return _reduce_same(op, node, axes)

    return jax.tree.map(leaf, value, is_leaf=is_whole)


def gather_values(value: Any, axis: Any, replicas: int) -> Any:
    """Concatenates the parts of each leaf of a pytree along ``axis``.

    If the parts are one array over the devices, the result along axis 0 is that array.

    Raises:
        TypeError: ``axis`` is not an integer.
        NotImplementedError: A leaf is an IndexedSlices.
        ValueError: A part has rank 0 or other dimensions than the first part, or a
            value that is not distributed is gathered over several replicas.
    """
    along = as_axis(axis, "gather")

    def leaf(node: Any) -> Any:
        if is_one_array(node):
            return gather_whole(node, along)
        if isinstance(node, DistributedValues):
            return _joined(lambda parts: concatenate(parts, along), node)
        if is_slices(node):
            raise _no_gather_of_slices()
        if replicas > 1:
            raise ValueError(
                f"gather: a value that is not distributed ({node!r:.80}) has no parts "
                f"on the {replicas} replicas; gather what strategy.run returned"
            )
        return concatenate([node], along)

    return jax.tree.map(leaf, value, is_leaf=is_whole)


def require_gatherable(value: Any) -> None:
    """Refuses a pytree that has a leaf without a first axis.

    Raises:
        NotImplementedError: A leaf is an IndexedSlices.
        ValueError: A leaf has rank 0.
    """
    for leaf in jax.tree.leaves(value, is_leaf=is_whole):
        if is_slices(leaf):
            raise _no_gather_of_slices()
        if not np.ndim(leaf):
            raise no_rank()


def is_whole(node: object) -> bool:
    """Returns whether this is a value that functions here treat as one leaf, not as a
    pytree of its members."""
    return isinstance(node, DistributedValues | IndexedSlices)


def _joined(join: Callable[[Sequence[Any]], Any], value: DistributedValues) -> Any:
    """Calls ``join`` with the parts of all replicas, for each leaf if they are
    pytrees."""
    return jax.tree.map(lambda *parts: join(parts), *value.values, is_leaf=is_whole)


def as_array(value: Any) -> Any:
    """Returns a jax array if the value is traced or on a device, else a numpy array, so
    that nothing is downcast."""
    if isinstance(value, AbstractVariable):
        value = value.value()
    return value if isinstance(value, jax.Array | np.ndarray) else np.asarray(value)


def computable(arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays so that one operation can use all of them: on one device, or
    all as numpy arrays if one has integers that jax would truncate."""
    is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    # A trace has no values for numpy.
    if any(map(is_integer_downcast, arrays)) and not is_traced:
        return [np.asarray(x) for x in arrays]
    return on_one_device(arrays)


def as_axes(axis: Any) -> tuple[int, ...] | None:
    """Returns the axes of a reduction (one, several or None) as a tuple of integers, or
    None.

    Raises:
        TypeError: ``axis`` is not an integer or a sequence of integers.
    """
    if axis is None:
        return None
    if isinstance(axis, list | tuple):
        return tuple(as_axis(one, "reduce") for one in axis)
    return (as_axis(axis, "reduce"),)


def as_axis(axis: Any, operation: str) -> int:
    """Returns the axis as an integer; ``axis`` may be an integer array without
    dimensions.

    Raises:
        TypeError: ``axis`` is not an integer. The error is that of jax if the axis is
            known only when a step runs, so that replicas run sequentially if they can.
    """
    if not isinstance(axis, bool):  # which Python takes for an index
        try:
            return operator.index(axis)
        except jax_errors.TracerIntegerConversionError:
            raise
        except TypeError:
            pass  # it is not an integer
    raise TypeError(f"{operation}: axis must be an integer, got {axis!r:.80}")


def _reduce(op: ReduceOp, parts: Column, axes: tuple[int, ...] | None) -> Any:
    if is_sparse(parts):
        require_no_axes(axes)
        return reduce_slices(op, parts)
    # Nothing is added, so the array itself is the result.
    if axes is None and len(parts) == 1 and not _widens(op, parts[0]):
        return parts[0]
    total, count = total_of(parts, axes, mean=op is ReduceOp.MEAN)
    return total if op is ReduceOp.SUM else total / count


def require_no_axes(axes: tuple[int, ...] | None) -> None:
    """Refuses axes for a reduction of `IndexedSlices`, whose rows belong to a larger
    array.

    Raises:
        ValueError: There are axes.
    """
    if axes is not None:
        raise ValueError(
            f"IndexedSlices are reduced with axis=None, got {list(axes)}: their rows "
            "are joined, not added; to_dense() has axes"
        )


def total_of(
    parts: Column, axes: tuple[int, ...] | None, *, mean: bool
) -> tuple[Any, int]:
    """Sums the parts, each over ``axes`` first. Returns the sum, and how many numbers
    were summed for each of its elements. For a mean the sum has a dtype that can
    represent it.

    Raises:
        ValueError: A part has no such axis; sums of parts differ in shape.
        TypeError: A part is text, which numpy would join, or a random key.
    """
    arrays = [summable(as_array(part), mean=mean) for part in parts]
    # numpy would join them.
    for array in arrays:
        if array.dtype.kind in "SU":
            raise TypeError(f"reduce: numbers are added up, got {array.tolist()!r:.80}")
    count = len(arrays)
    if axes is not None:
        count = sum(
            math.prod(a.shape[i] for i in require_axes(axes, a.shape)) for a in arrays
        )
        arrays = [a.sum(axis=axes) for a in arrays]
    require_alike("reduce", arrays, "give an axis to reduce over, or use gather")
    first, *others = computable(arrays)
    return sum(others, start=first), count


def _widens(op: ReduceOp, value: Any) -> bool:
    """Returns whether the reduction changes the dtype even of a single array; Python
    numbers have no dtype."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | AbstractVariable):
        return False
    kind = getattr(value.dtype, "kind", "b")  # keys have none, and are refused then
    return kind == "b" or (op is ReduceOp.MEAN and kind in "iu")


def _reduce_same(op: ReduceOp, value: Any, axes: tuple[int, ...] | None) -> Any:
    """Reduces a value that is the same on several replicas, by TF's rules.

    Raises:
        ValueError: The value is to be summed, and is not zero.
    """
    # Zeros have the same sum on any number of replicas. Nothing has no mean.
    if isinstance(value, int | float | np.ndarray | np.generic) and not np.any(value):
        return _reduce(op if np.size(value) else ReduceOp.SUM, [value], axes)
    if op is ReduceOp.MEAN:
        return _reduce(op, [value], axes)
    raise ValueError(
        f"A non-DistributedValues value {value!r:.80} cannot be reduced with SUM: it "
        "is the same on every replica; reduce what strategy.run returned, or use MEAN"
    )


def reduce_slices(op: ReduceOp, parts: Sequence[Any]) -> IndexedSlices:
    """Concatenates IndexedSlices in replica order; duplicates are kept.

    Raises:
        ValueError: Not all of them are IndexedSlices.
    """
    if not all(map(is_slices, parts)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            f"IndexedSlices are reduced among themselves, got {kinds}: make it the "
            "same kind on all replicas"
        )
    indices = concatenate([part.indices for part in parts], 0)
    values = concatenate([part.values for part in parts], 0)
    if op is ReduceOp.MEAN:
        values = values / len(parts)
    return IndexedSlices(values, indices, parts[0].dense_shape)


def concatenate(parts: Sequence[Any], axis: int) -> Any:
    """Concatenates parts along ``axis``, which may count from the end: on a device if
    one of the parts is on a device, otherwise by numpy.

    Raises:
        NotImplementedError: A part is an IndexedSlices.
        ValueError: A part is a scalar or has no such axis, or the parts differ in
            another dimension.
    """
    if is_sparse(parts):
        raise _no_gather_of_slices()
    arrays = [as_array(part) for part in parts]
    require_joinable("gather", [array.shape for array in arrays], axis)
    arrays = computable(arrays)
    on_device = any(isinstance(a, jax.Array) for a in arrays)
    return (jnp if on_device else np).concatenate(arrays, axis)


def _no_gather_of_slices() -> NotImplementedError:
    return NotImplementedError("gather does not support IndexedSlices")
