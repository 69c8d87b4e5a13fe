"""Orders of a block of chips in which each is next to the one before it.

Of a block with even sides the order is a ring: the last chip is next to the first one,
too. Collectives between neighbours then never share a line.

Law of the file: plain integers.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_log: Final = logging.getLogger(__name__)

Chip = tuple[int, int, int]
"""Where a chip is: ``(x, y, z)``."""


def ring(extents: Sequence[int]) -> list[Chip]:
    """All chips of a block of these three extents, beginning at (0, 0, 0).

    One extent greater than 1: a line. Two: a ring of one plane. Three: rings of the
    planes, opened at their corners and strung along z. All extents greater than 1 must
    be even for that; with an odd one among several the order is row by row, x fastest,
    and a warning is logged.
    """
    long = [axis for axis in range(3) if extents[axis] > 1]
    if len(long) > 1 and any(extents[axis] % 2 for axis in long):
        _log.warning(
            "chips of a block of %s are numbered row by row: a ring through them "
            "needs even sides",
            tuple(extents),
        )
        return _rows(extents)
    match long:
        case [columns, rows]:
            plane = [(0, 0), *_opened(extents[columns], extents[rows])]
            return [_at({columns: i, rows: j}) for i, j in plane]
        case [_, _, _]:
            return _strung(extents)
        case _:
            return _rows(extents)


def _rows(extents: Sequence[int]) -> list[Chip]:
    width, height, depth = (range(extent) for extent in extents)
    return [(x, y, z) for z, y, x in itertools.product(depth, height, width)]


def _at(places: dict[int, int]) -> Chip:
    return places.get(0, 0), places.get(1, 0), places.get(2, 0)


def _opened(columns: int, rows: int) -> list[tuple[int, int]]:
    """The ring of a plane without its corner (0, 0): from the one neighbour of the
    corner to the other.

    Row by row to and fro, and back along column 0.
    """
    found: list[tuple[int, int]] = []
    for row in range(rows):
        there = [(column, row) for column in range(1, columns)]
        found += there[::-1] if row % 2 else there
    return found + [(0, row) for row in range(rows - 1, 0, -1)]


def _strung(extents: Sequence[int]) -> list[Chip]:
    columns, rows, planes = extents
    found: list[Chip] = [(0, 0, 0)]
    for z in range(planes):
        # Every other plane backwards: it begins where the one below it ended.
        plane = _opened(columns, rows)
        found += [(x, y, z) for x, y in (plane[::-1] if z % 2 else plane)]
    return found + [(0, 0, z) for z in range(planes - 1, 0, -1)]
