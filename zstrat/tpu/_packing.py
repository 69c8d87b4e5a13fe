"""How many blocks of cores are laid into a mesh of cores, and in which order.

A computation takes a block of ``shape`` cores, ``stride`` apart in each dimension; its
footprint is their product. Blocks that are strided interlock: in each dimension there
are as many replicas in one footprint as its stride.

Law of the file: arrays of integers with four entries, x, y, z and core; no devices.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ._rings import ring

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
