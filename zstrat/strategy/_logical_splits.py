"""How an array is split over logical devices: which axes of a mesh take its dimensions.

A split ``[1, 2, 4]`` over 8 logical devices cuts the array into 8 tiles, which go to
the devices row by row: tile ``(0, i, j)`` to number ``4 i + j``. In a mesh the devices
have axes, and a dimension of an array is laid over some of them. So the devices of a
replica get one axis for each prime factor of their number, and a split takes axes in a
row.

Of a number with several primes one order of the axes does not serve all splits: of 6
devices ``[2, 3]`` needs axes of 2 and 3, and ``[3, 2]`` of 3 and 2. A split that finds
no row in a given mesh takes other axes: the same tiles in another order of devices,
which changes no value. Law of the file: integers; no devices, no arrays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def require_split(
    shape: Sequence[int], partition_dimensions: Any, count: int
) -> tuple[int, ...]:
    """The split of an array of that shape over so many logical devices, checked.

    Raises:
        ValueError: It is no list of positive integers, one for each dimension; does not
            divide one of them; or makes more or fewer tiles than there are devices.
            Checked in this order.
    """
    splits = _integers(partition_dimensions)
    if len(splits) != len(shape):
        raise ValueError(
            "Length of `partition_dimensions` must equal to the rank of `tensor.shape` "
            f"({len(shape)}). Got {len(splits)}: {list(splits)}"
        )
    for axis, (size, parts) in enumerate(zip(shape, splits, strict=True)):
        if size % parts:
            raise ValueError(
                f"Tensor shape at partition_dimensions[{axis}] must be divisible by "
                "corresponding value specified by `partition_dimensions` "
                f"({parts}). Got: {size} of the shape {list(shape)}"
            )
    if math.prod(splits) != count:
        raise ValueError(
            "The product of `partition_dimensions` should be the same as the number of "
            f"logical devices (={count}). Got `partition_dimensions`={list(splits)}, "
            f"and their product is {math.prod(splits)}"
        )
    return splits


def axes_for(count: int) -> tuple[int, ...]:
    """Extents of the axes of ``count`` logical devices, each a prime number."""
    return tuple(_primes(count))


def axes_of(extents: Sequence[int], split: Sequence[int]) -> list[tuple[int, ...]]:
    """For each dimension of the split the numbers of the axes that it is laid over."""
    in_row = _in_row(extents, split)
    return _anyhow(extents, split) if in_row is None else in_row


def _in_row(
    extents: Sequence[int], split: Sequence[int]
) -> list[tuple[int, ...]] | None:
    """Axes in their order, None if no axis ends where a dimension does."""
    found, axis = [], 0
    for parts in split:
        first, taken = axis, 1
        while taken < parts and axis < len(extents):
            taken *= extents[axis]
            axis += 1
        if taken != parts:
            return None
        found.append(tuple(range(first, axis)))
    return found


def _anyhow(extents: Sequence[int], split: Sequence[int]) -> list[tuple[int, ...]]:
    left, found = list(range(len(extents))), []
    for parts in split:
        mine = []
        for prime in _primes(parts):
            mine.append(next(axis for axis in left if extents[axis] == prime))
            left.remove(mine[-1])
        found.append(tuple(mine))
    return found


def _primes(number: int) -> list[int]:
    found, prime = [], 2
    while number > 1:
        while number % prime:
            prime += 1
        found.append(prime)
        number //= prime
    return found


def _integers(given: Any) -> tuple[int, ...]:
    is_list = isinstance(given, list | tuple)
    if not is_list or not all(_is_positive(n) for n in given):
        raise ValueError(
            "`partition_dimensions` must be an unnested list of positive integers, got "
            f"{given!r}"
        )
    return tuple(int(n) for n in given)


def _is_positive(number: Any) -> bool:
    is_integer = isinstance(number, int | np.integer) and number is not True
    return is_integer and bool(number > 0)
