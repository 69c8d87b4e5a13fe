"""Many values as a few flat arrays, so that few large arrays travel in place of many
small ones.

Law of the file: the replicas' values go into packs alike, and come out as they went in.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ._values import concatenate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jax


class Packed:
    """Values of several replicas as a few flat arrays: all of them one after the other,
    cut into equal packs, the last of which has the remainder."""

    def __init__(self, packs: list[list[jax.Array]], shapes: list[Any]) -> None:
        self.packs = packs
        self._shapes = shapes

    @classmethod
    def of(cls, values: Sequence[Sequence[Any]], count: int) -> Packed:
        shapes = [np.shape(parts[0]) for parts in values]
        flat = [
            concatenate([x.reshape(-1) for x in mine], 0)
            for mine in zip(*values, strict=True)
        ]
        size = flat[0].size // count
        cuts = [size * n for n in range(count)]
        pieces = [_cut(array, cuts) for array in flat]
        return cls([list(pack) for pack in zip(*pieces, strict=True)], shapes)

    def unpacked(self, packs: Sequence[jax.Array]) -> list[jax.Array]:
        """The values, of what became of the packs."""
        flat = concatenate([pack.reshape(-1) for pack in packs], 0)
        sizes = [math.prod(shape) for shape in self._shapes]
        pieces = _cut(flat, [0, *itertools.accumulate(sizes[:-1])])
        return [
            piece.reshape(shape)
            for piece, shape in zip(pieces, self._shapes, strict=True)
        ]


def in_packs(
    values: Sequence[Sequence[Any]],
    count: int,
    total: Callable[[Sequence[jax.Array]], jax.Array],
) -> list[jax.Array]:
    """What ``total`` makes of the replicas' parts of each value; of ``count`` packs of
    all values of one dtype, if it is not 0."""
    if not values or count == 0:
        return [total(parts) for parts in values]
    found: dict[int, jax.Array] = {}
    for numbers in alike(values):
        packed = Packed.of([values[n] for n in numbers], count)
        reduced = [total(pack) for pack in packed.packs]
        found.update(zip(numbers, packed.unpacked(reduced), strict=True))
    return [found[n] for n in range(len(values))]


def alike(values: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Numbers of values that may share an array: of one dtype, and of as many replicas,
    because what is not distributed is that of one."""
    groups: dict[Any, list[int]] = {}
    for number, parts in enumerate(values):
        groups.setdefault((parts[0].dtype, len(parts)), []).append(number)
    return list(groups.values())


def _cut(array: Any, starts: Sequence[int]) -> list[Any]:
    """Its pieces, that begin there."""
    ends = [*starts[1:], array.size]
    return [array[start:end] for start, end in zip(starts, ends, strict=True)]
