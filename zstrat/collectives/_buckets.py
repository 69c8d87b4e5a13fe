"""Many small arrays travel as few large ones.

Which arrays share a bucket follows TensorFlow's rule: they are taken from the last to
the first, because a backward pass is ready with the last layers first; a pack is begun
when the one before is *larger* than ``bytes_per_pack``; dtypes never share a buffer.

The law that ranks agree on buckets: they depend on dtypes and sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np


@dataclass(frozen=True, slots=True)
class Bucket:
    """Arrays of one dtype that travel together: which ones, and their elements."""

    dtype: np.dtype
    members: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.counts) * self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """Several members share it, and have to be copied."""
        return len(self.members) > 1

    def flat(
        self,
        arrays: Sequence[np.ndarray],
        allocate: Callable[[int, np.dtype], np.ndarray],
    ) -> np.ndarray:
        """The elements of the members one after the other, ``[sum(counts)]`` in C
        order; ``arrays`` are all that were packed.

        A single member in C order is not copied: the result is a view of it. Else
        ``allocate(elements, dtype)`` gives the memory.
        """
        mine = [arrays[member] for member in self.members]
        if not self.is_packed:
            return mine[0].reshape(-1)
        whole = allocate(sum(self.counts), self.dtype)
        for array, part in zip(mine, self.split(whole), strict=True):
            part.reshape(array.shape)[...] = array
        return whole

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Views of ``flat``, one per member: ``[count]`` each."""
        return split(flat, self.counts)


def split(flat: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Neighbouring views of ``flat`` ``[sum(sizes)]``."""
    ends = accumulate(sizes, initial=0)
    return [flat[start:end] for start, end in pairwise(ends)]


def buckets(
    arrays: Iterable[tuple[np.dtype, int]],
    bytes_per_pack: int = 0,
    alone: int | None = None,
) -> list[Bucket]:
    """Which arrays travel together, in the order in which they should start.

    Args:
        arrays: Dtype and number of elements of each.
        bytes_per_pack: A pack that is larger than this takes no more; 0: all go into
            one pack. As large packs exceed it, it is no upper bound.
        alone: Arrays of so many bytes travel by themselves and need not be copied;
            None: none does, as in TensorFlow.

    Raises:
        ValueError: ``bytes_per_pack`` is negative.
    """
    if bytes_per_pack < 0:
        raise ValueError(f"bytes_per_pack={bytes_per_pack}: expected 0 or more")
    packs: list[dict[np.dtype, list[tuple[int, int]]]] = []
    pack: dict[np.dtype, list[tuple[int, int]]] | None = None
    filled = 0
    for member, (dtype, count) in reversed(list(enumerate(arrays))):
        size = count * dtype.itemsize
        if alone is not None and size >= alone:
            packs.append({dtype: [(member, count)]})
            continue
        if pack is None or (bytes_per_pack and filled > bytes_per_pack):
            packs.append(pack := {})
            filled = 0
        pack.setdefault(dtype, []).append((member, count))
        filled += size
    return [
        Bucket(dtype, *zip(*entries, strict=True))
        for pack in packs
        for dtype, entries in pack.items()
    ]
