"""What the copies of one variable, one for each replica, are together, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._spec import VariableAggregation


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


def aggregated(copies: Any, aggregation: VariableAggregation) -> Any:
    """What copies ``[count, ...]`` are together, in their dtype; NONE: the first."""
    match aggregation:
        case VariableAggregation.SUM:
            return copies.sum(0, dtype=copies.dtype)
        case VariableAggregation.MEAN:
            return copies.mean(0).astype(copies.dtype)
        case _:
            return copies[0]
