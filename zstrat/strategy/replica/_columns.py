"""Columns: a column is one leaf of the pytrees of all replicas of a process, with a
part for each replica.

All reductions of replicas take columns. `columns_of` converts pytrees to columns;
columns of arrays and of `IndexedSlices` are reduced separately (`by_kind`); and the
checks here refuse parts that do not fit each other, with the same errors for all
reductions.

Law of the file: it neither adds nor concatenates arrays, and imports no module that
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.variables import IndexedSlices, is_weak

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Column: TypeAlias = "Sequence[Any]"
"""The parts of one leaf in replica order. Replicas that are one program share one
trace, so their column has one part, which is traced for all of them."""

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def is_slices(node: object) -> TypeGuard[IndexedSlices]:
    """Returns whether a node is an `IndexedSlices`, whose rows are concatenated instead
    of added."""
    return isinstance(node, IndexedSlices)


def is_sparse(column: Column) -> bool:
    """Returns whether a column has `IndexedSlices` among its parts."""
    return any(map(is_slices, column))


def columns_of(values: Sequence[Any]) -> tuple[list[tuple[Any, ...]], Any]:
    """Returns the columns of the pytrees of the replicas, one for each leaf, and their
    common structure.

    Raises:
        ValueError: The replicas' pytrees have different structures.
    """
    flat = [jax.tree.flatten(value, is_leaf=is_slices) for value in values]
    treedefs = {treedef for _, treedef in flat}
    if len(treedefs) > 1:
        raise ValueError(
            f"the replicas have different structures: {treedefs}: expected one "
            "structure, the same on all of them"
        )
    return list(zip(*[leaves for leaves, _ in flat], strict=True)), flat[0][1]


def by_kind(
    items: Sequence[_Item],
    is_other: Callable[[_Item], bool],
    usual: Callable[[list[_Item]], Sequence[_Made]],
    other: Callable[[list[_Item]], Sequence[_Made]],
) -> list[_Made]:
    """Calls ``other`` with the items that ``is_other`` selects, and ``usual`` with the
    rest; returns the results in the order of the items. Each function is called once,
    with all of its items, so that it may reduce them in one collective."""
    flags = [is_other(item) for item in items]
    pairs = list(zip(items, flags, strict=True))
    # In this order in every process, so that their collectives match.
    first = iter(usual([item for item, flag in pairs if not flag]))
    second = iter(other([item for item, flag in pairs if flag]))
    return [next(second if flag else first) for flag in flags]


def require_alike(what: str, column: Column, remedy: str) -> None:
    """Refuses the parts of a column if they cannot be added without broadcasting.

    Args:
        what: The beginning of the message: whose values these are.
        remedy: The end of the message if shapes differ: what to do about it.

    Raises:
        ValueError: Replicas have arrays of different shapes, or some of them
            IndexedSlices and others arrays.
    """
    sparse = sum(map(is_slices, column))
    if sparse == len(column):
        return  # their rows need not be as many
    if sparse:
        raise ValueError(
            f"{what}: some replicas have IndexedSlices and others arrays: make it the "
            "same kind on all of them"
        )
    shapes = [np.shape(part) for part in column]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{what}: the replicas have arrays of different shapes {shapes}: expected "
            f"one shape for all; {remedy}"
        )


def require_joinable(what: str, shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Refuses shapes that cannot be concatenated: they differ in another dimension than
    ``axis``, which may count from the end.

    Raises:
        ValueError: They differ so, or a shape is a scalar's or has no such dimension.
    """
    rests = set()
    for shape in shapes:
        if not shape:
            raise no_rank()
        require_axes((axis,), shape)
        # Counted from the end, one axis is another dimension in shapes of another rank.
        at = axis % len(shape)
        rests.add((*shape[:at], *shape[at + 1 :]))
    if len(rests) > 1:
        at = axis % len(shapes[0])
        raise ValueError(
            f"{what} along axis {at}: the replicas have arrays of the shapes "
            f"{list(shapes)}, which must agree in every other dimension"
        )


def require_axes(axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns ``axes``, after checking that a value of this shape has all of them.

    Raises:
        ValueError: The value lacks one of the axes.
    """
    rank = len(shape)
    for axis in axes:
        if not -rank <= axis < rank:
            raise ValueError(
                f"axis {axis} is out of bounds for a value of shape {shape}: expected "
                f"{-rank} <= axis < {rank}"
                if rank
                else f"axis {axis} is out of bounds for a scalar: give axis=None"
            )
    return axes


def no_rank() -> ValueError:
    """Makes the error for gathering a scalar."""
    return ValueError(
        "gather: the values must have a rank of at least 1; give scalars an axis first "
        "(x[None])"
    )


def strong(array: jax.Array) -> jax.Array:
    """Returns the array with a strong type: unlike a Python number, the result of
    several replicas must not be converted to the dtype of the array that it is combined
    with."""
    if not is_weak(array):
        return array
    result: jax.Array = jax.lax.convert_element_type(array, array.dtype)
    return result


def as_of_several(leaf: Any) -> jax.Array:
    """Returns the value of a single replica in the form that results of several
    replicas have: a jax array that is `strong`."""
    return strong(jnp.asarray(leaf))


def summable(array: Any, *, mean: bool) -> Any:
    """Returns the array in a dtype that can represent the sum of several. Booleans are
    counted; integers whose mean (a float) is computed do not overflow: narrow ones are
    added as integers, which is exact, and those of 32 bits as floats, as in
    ``jnp.mean``.

    Raises:
        TypeError: The array has random keys.
    """
    if not isinstance(array.dtype, np.dtype):
        raise TypeError(
            "numbers are added up, got random keys: reduce what is drawn with them, or "
            "gather jax.random.key_data(key)"
        )
    bits = 8 * array.dtype.itemsize if mean and array.dtype.kind in "iu" else 0
    if array.dtype.kind == "b" or 0 < bits < 32:
        return array.astype(int)
    return array.astype(float) if bits == 32 else array
