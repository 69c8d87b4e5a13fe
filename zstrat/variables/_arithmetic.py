"""Updates and aggregation of arrays, as pure functions.

`apply` defines the effect of each `UpdateOp`, and executes it for variables of this
process. Parameter servers have their own engine, which is faster and is tested against
`apply`. No function writes to the array that it is given.

Means of integers are exact although the sum may not fit the dtype: each value is
divided by the number of copies, and quotients and remainders are summed separately. Law
of aggregation: pure functions of numpy or jax arrays, traced or not; the result has the
dtype of the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.rows import divided, runs
from zstrat.wire import UpdateOp

from ._storage import VariableAggregation

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
    """Returns the array ``value`` after a dense or a scatter update.

    Updates of equal indices accumulate; in SCATTER_UPDATE the last one wins.
    Floating-point exceptions give inf or NaN, integers wrap around.

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
            # A copy: the operand is the caller's.
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
            # `np.divide.at` has no integers, and each quotient is truncated before the
            # next division.
            changed, index_runs = value.copy(), runs(operands[0])
            changed[index_runs.unique] = divided(
                value[index_runs.unique], index_runs, operands[1]
            )
            return changed
        case _ if op in _AT:
            changed = value.copy()
            _AT[op](changed, operands[0], operands[1])
            return changed
    raise TypeError(f"{op.name} needs an optimizer")


def shares_of(value: Any, count: int) -> Any:
    """Splits an array into equal shares ``[count, ...]`` that sum to it.

    If integers leave a remainder, the first shares are larger by one, so that the sum
    is exact.
    """
    dtype = value.dtype
    numbers = np.arange(count).reshape(count, *[1] * value.ndim)
    if dtype.kind in "iu":
        # There may be more copies than 8 bits can count.
        wide = value.astype(np.int32) if dtype.itemsize < 4 else value
        return (wide // count + (numbers < wide % count)).astype(dtype)
    # The zeros repeat the share once for each copy.
    return (value / count + np.zeros_like(numbers, dtype)).astype(dtype)


def cut_for_mean(value: Any, count: int) -> list[Any]:
    """Splits integers into quotients and remainders by ``count``, from which
    `mean_of_cut` computes their mean.

    Their sum may not fit the dtype, and floats would lose digits.
    """
    # 8 bits may not hold the count.
    wide = value.astype(np.int32) if value.dtype.itemsize < 4 else value
    return [wide // count, wide % count]


def summed_for_mean(copies: Any, count: int) -> list[Any]:
    """Sums the quotients and the remainders (`cut_for_mean`) of copies ``[n, ...]``.
    Returns two arrays ``[1, ...]``."""
    cut = cut_for_mean(copies, count)
    # With an axis left: numpy warns of scalars that wrap around, as they may here.
    return [x.sum(0, dtype=x.dtype, keepdims=True) for x in cut]


def mean_of_cut(sums: Sequence[Any], count: int) -> Any:
    """Returns the exact mean of integers, rounded towards zero, from the sums of their
    quotients and remainders."""
    quotients, rests = sums
    floor = quotients + rests // count
    return floor + ((floor < 0) & (rests % count != 0))


def aggregated(copies: Any, aggregation: VariableAggregation) -> Any:
    """Combines copies ``[count, ...]`` into one array of their dtype; NONE returns the
    first copy."""
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
