"""How blocks of cores are laid into a mesh of cores, and in which order.

A computation takes a block of ``shape`` cores, ``stride`` apart in each dimension; its
footprint is their product. Blocks that are strided interlock: in each dimension there
are as many replicas in one footprint as its stride.

In the order of a block of chips each chip is next to the one before it. Of a block with
even sides the order is a ring: the last chip is next to the first one, too. Collectives
between neighbours then never share a line.

Law of the file: plain integers, and arrays of them with four entries, x, y, z and core;
no devices.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


Cores = tuple[int, int, int, int]
"""A place, or extents: x, y, z, core."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Blocks in a mesh. Made by `packing`, which checks that they fit."""

    mesh: Cores
    shape: Cores
    stride: Cores
    replicas: int

    @property
    def footprint(self) -> Cores:
        """Extents of what one computation covers, with what lies between its cores."""
        return _each(a * b for a, b in zip(self.shape, self.stride, strict=True))

    @property
    def counts(self) -> Cores:
        """How many replicas there is room for, in each dimension."""
        blocks = [m // f for m, f in zip(self.mesh, self.footprint, strict=True)]
        return _each(b * s for b, s in zip(blocks, self.stride, strict=True))

    @property
    def can_ring(self) -> bool:
        """Whether a ring leads through the chips of a block, and one through all
        blocks: whole chips, side by side, and all of them."""
        return (
            self.shape[3] == self.mesh[3]
            and math.prod(self.stride) == 1
            and self.replicas == math.prod(self.counts)
        )

    def in_rings(self) -> np.ndarray:
        """Cores ``[replicas, cores, 4]``: the replicas one after the other in a ring of
        blocks, the chips of each in a ring, the cores of a chip together."""
        chips = np.array(ring(self.shape[:3]), np.int32)
        blocks = np.array(ring(self.grid()[:3]), np.int32) * self.shape[:3]
        found = np.empty((len(blocks), len(chips), self.mesh[3], 4), np.int32)
        found[..., :3] = (blocks[:, None] + chips)[:, :, None]
        found[..., 3] = np.arange(self.mesh[3])
        return found.reshape(len(blocks), -1, 4)

    def in_rows(self) -> np.ndarray:
        """Cores ``[replicas, cores, 4]``: those of a replica row by row, the core of a
        chip fastest and x slowest; replicas side by side by core, x, y, z."""
        spans = zip(self.footprint, self.stride, strict=True)
        offsets = list(itertools.product(*(range(0, f, s) for f, s in spans)))
        x, y, z, core = (range(extent) for extent in self.grid())
        # The last dimension of a product runs fastest.
        places = itertools.islice(itertools.product(z, y, x, core), self.replicas)
        starts = [self._start((a, b, c, d)) for c, b, a, d in places]
        return np.array(starts, np.int32)[:, None] + np.array(offsets, np.int32)

    def _start(self, place: Cores) -> Cores:
        """The first core of the replica at that place of the grid."""
        spans = zip(place, self.footprint, self.stride, strict=True)
        return _each(p // s * f + p % s for p, f, s in spans)

    def grid(self) -> Cores:
        """How many replicas are side by side in each dimension: near a cube.

        The dimension with the least room is filled first, so that no choice leaves too
        little for the others; of equal ones the cores of a chip, then x, y, z.
        """
        counts, left = self.counts, self.replicas
        found = [1] * 4
        tightest = sorted(range(4), key=lambda axis: (counts[axis], (axis + 1) % 4))
        for n, axis in enumerate(tightest):
            found[axis] = min(counts[axis], _root(left, 4 - n))
            left = -(-left // found[axis])
        return _each(found)


def packing(
    mesh: Sequence[int], shape: Sequence[int], stride: Sequence[int], replicas: int
) -> Packing:
    """Blocks of ``shape`` cores, ``stride`` apart, in a mesh.

    Raises:
        ValueError: One of them does not fit, or not as many as there are to be.
    """
    found = Packing(_each(mesh), _each(shape), _each(stride), replicas)
    if any(f > m for f, m in zip(found.footprint, found.mesh, strict=True)):
        raise ValueError(
            f"computation footprint {list(found.footprint)} does not fit in TPU "
            f"topology shape {list(found.mesh)}"
        )
    room = math.prod(found.counts)
    if replicas > room:
        raise ValueError(
            f"requested {replicas} replicas but only {room} replicas with shape "
            f"{list(found.shape)} and computation_stride {list(found.stride)} fit in a "
            f"TPU mesh of shape {list(found.mesh)}"
        )
    return found


def _each(values: Iterable[int]) -> Cores:
    x, y, z, core = (int(value) for value in values)
    return x, y, z, core


def _root(number: int, degree: int) -> int:
    """The least integer whose power is at least ``number``."""
    return next(n for n in itertools.count(1) if n**degree >= number)
