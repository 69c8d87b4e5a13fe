"""Sets of small variables of one dtype, which travel side by side, as one array.

A frame of its own, an entry of its own and an array of its own cost ten times what the
elements of a small variable do. So a worker sends the gradients of a set as one array,
and reads its values as one. To a server it is all the same which variables a set has.
But both ends divide alike (`in_sets`), so that what a server keeps side by side
(`zstrat.ps.store._flat`) mostly is what travels, and nothing is copied together or
apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

SMALL_BYTES: Final = 64 * 1024
"""Bytes of a variable above which copying it costs what a message of its own does."""

SET_BYTES: Final = 2**20
"""Bytes of small variables side by side: a reader of one of them keeps the memory of
all, and larger arrays are in pages that are new each time, which cost more than the
update."""

SET_KEYS: Final = 1024
"""Variables of one set."""


def in_sets(nbytes: Iterable[int], fewest: int) -> list[list[int]]:
    """Divides values of one dtype, of these sizes, into sets that lie side by side.

    Both ends divide alike, so that what a server keeps side by side is what travels.

    Returns:
        The places of each set, in order; without values that are too large, and sets of
        less than ``fewest``.
    """
    sets: list[list[int]] = []
    room = 0
    for place, size in enumerate(nbytes):
        if size > SMALL_BYTES:
            continue
        if not sets or size > room or len(sets[-1]) == SET_KEYS:
            sets.append([])
            room = SET_BYTES
        sets[-1].append(place)
        room -= size
    return [each for each in sets if len(each) >= fewest]


class SetPart(NamedTuple):
    """The elements of a variable, from ``start`` to before ``stop`` of its set."""

    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """Returns the part of an array ``[elements]`` of the set: a view."""
        return array[self.start : self.stop].reshape(self.shape)


def parts_of(shapes: Iterable[tuple[int, ...]]) -> tuple[SetPart, ...]:
    """Returns the part of each variable of a set, in order."""
    parts: list[SetPart] = []
    stop = 0
    for shape in shapes:
        start, stop = stop, stop + math.prod(shape)
        parts.append(SetPart(start, stop, shape))
    return tuple(parts)


def is_keys(array: np.ndarray) -> bool:
    """Returns whether an array of a message can be the keys of a set."""
    return array.dtype == np.int64 and array.ndim == 1 and 0 < array.size <= SET_KEYS
