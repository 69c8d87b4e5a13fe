"""What several copies of a value are together, and shares that add up to a value.

Means of integers are exact, and their sums may not fit: a value is cut into a quotient
and a rest by the number of copies, and the two are added up in place of the values.

Law of the file: pure functions, of arrays of numpy and of jax, traced or not; the
result has the dtype of the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._spec import VariableAggregation

if TYPE_CHECKING:
    from collections.abc import Sequence


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
