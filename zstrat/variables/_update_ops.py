"""What each update does to an array, and what several copies of one are together.

The meaning of `UpdateOp` is said once, in numpy (`apply`): for variables of this
process; a parameter server has its own, faster engine and is tested against these
words. The array given is never written to.

Means of integers are exact, and their sums may not fit: a value is cut into a quotient
and a rest by the number of copies, and the two are added up in place of the values. Law
of copies: pure functions, of arrays of numpy and of jax, traced or not; the result has
the dtype of the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.rows import divided, runs
from zstrat.wire import UpdateOp

from ._spec import VariableAggregation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_AT: Final[dict[UpdateOp, Callable[..., Any]]] = {
    UpdateOp.SCATTER_ADD: np.add.at,
    UpdateOp.SCATTER_SUB: np.subtract.at,
    UpdateOp.SCATTER_MUL: np.multiply.at,
    UpdateOp.SCATTER_DIV: np.divide.at,
    UpdateOp.SCATTER_MIN: np.minimum.at,
    UpdateOp.SCATTER_MAX: np.maximum.at,
}


def apply(
    op: UpdateOp, value: np.ndarray, operands: tuple[np.ndarray, ...]
) -> np.ndarray:
    """The array after a dense or a scatter update. Duplicate indices accumulate; of
    duplicates in SCATTER_UPDATE the last one wins.

    A floating-point exception is a value (inf, NaN), and integers go around.

    Raises:
        IndexError: An index is outside the first axis.
        TypeError: The update needs an optimizer.
    """
    with np.errstate(all="ignore"):
        return _applied(op, value, operands)


def _applied(
    op: UpdateOp, value: np.ndarray, operands: tuple[np.ndarray, ...]
) -> np.ndarray:
    match op:
        case UpdateOp.ASSIGN:
            return np.array(operands[0], value.dtype, order="C")
        case UpdateOp.ADD:
            return np.asarray(value + operands[0], value.dtype)
        case UpdateOp.SUB:
            return np.asarray(value - operands[0], value.dtype)
        case UpdateOp.SCATTER_UPDATE:
            changed = value.copy()
            changed[operands[0]] = operands[1]
            return changed
        case UpdateOp.SCATTER_DIV if value.dtype.kind in "iu":
            changed, found = value.copy(), runs(operands[0])
            changed[found.unique] = divided(value[found.unique], found, operands[1])
            return changed
        case _ if op in _AT:
            changed = value.copy()
            _AT[op](changed, operands[0], operands[1])
            return changed
    raise TypeError(f"{op.name} needs an optimizer")


def shares_of(value: Any, count: int) -> Any:
    """Equal shares ``[count, ...]`` that add up to an array. Of integers the first ones
    are larger by one where there is a remainder: none of what was counted is lost."""
    dtype = value.dtype
    numbers = np.arange(count).reshape(count, *[1] * value.ndim)
    if dtype.kind in "iu":
        # There may be more copies than a byte counts.
        wide = value.astype(np.int32) if dtype.itemsize < 4 else value
        return (wide // count + (numbers < wide % count)).astype(dtype)
    return (value / count + np.zeros_like(numbers, dtype)).astype(dtype)


def cut_for_mean(value: Any, count: int) -> list[Any]:
    """Two arrays of integers, whose sums over ``count`` values `mean_of_cut` takes. A
    sum of the values may not fit their dtype, and no float has all their digits."""
    wide = value.astype(np.int32) if value.dtype.itemsize < 4 else value
    return [wide // count, wide % count]


def summed_for_mean(copies: Any, count: int) -> list[Any]:
    """What copies ``[n, ...]`` add to the two sums over ``count`` values: ``[1, ...]``,
    because numpy warns of single numbers that go around, and may do so here."""
    cut = cut_for_mean(copies, count)
    return [x.sum(0, dtype=x.dtype, keepdims=True) for x in cut]


def mean_of_cut(sums: Sequence[Any], count: int) -> Any:
    """The mean of integers, exactly; what is behind the point is left out."""
    quotients, rests = sums
    floor = quotients + rests // count
    return floor + ((floor < 0) & (rests % count != 0))


def aggregated(copies: Any, aggregation: VariableAggregation) -> Any:
    """What copies ``[count, ...]`` are together, in their dtype; NONE: the first."""
    match aggregation:
        case VariableAggregation.SUM:
            return copies.sum(0, dtype=copies.dtype)
        case VariableAggregation.MEAN if copies.dtype.kind in "iu":
            count = copies.shape[0]
            sums = summed_for_mean(copies, count)
            return mean_of_cut(sums, count)[0].astype(copies.dtype)
        case VariableAggregation.MEAN:
            return copies.mean(0).astype(copies.dtype)
        case _:
            return copies[0]
