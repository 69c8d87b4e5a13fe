"""Converts arguments (numpy, jax, scalars, pytrees) to flat arrays, and results back.

A jax array on a CPU is read in place. A result is of the same kind as the argument;
large results are aligned to 64 bytes, so that jax uses them without a copy.

Many small arrays are sent as few large ones, in *buckets*, by TensorFlow's rule: arrays
are taken from the last to the first, because a backward pass finishes the last layers
first; a new pack begins when the one before is *larger* than ``bytes_per_pack``; arrays
of different dtypes never share a pack. Ranks agree on buckets because these depend only
on dtypes and sizes.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import zlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Protocol,
    TypeGuard,
    runtime_checkable,
)
from weakref import WeakKeyDictionary

import numpy as np

from zstrat.rows import runs, sums
from zstrat.wire import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_SPELT: Final = 3
"""Most arrays that a description names one by one."""

_NUMPY: Final = (np.ndarray, np.generic, bool, int, float, complex)
"""Types that numpy converts without jax."""


@runtime_checkable
class SlicesLike(Protocol):
    """The interface of `zs.IndexedSlices`, which this package cannot import."""

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None

    def to_dense(self) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class ArrayLeaf:
    """One array of the user's argument (``origin``). ``flat`` is ``[n]`` in C order and
    the machine's byte order: a view of the user's memory if possible."""

    flat: np.ndarray
    shape: tuple[int, ...]
    origin: Any
    is_jax: bool

    @property
    def is_view(self) -> bool:
        """Whether writing to ``flat`` writes to the user's array."""
        origin = self.origin
        return (
            isinstance(origin, np.ndarray)
            # Empty arrays have no memory by which to compare.
            and self.flat.size > 0
            and self.flat.ctypes.data == origin.ctypes.data
        )

    def moved(self, axis: int) -> ArrayLeaf:
        """Returns the leaf with ``axis`` moved to the front."""
        array = np.moveaxis(self.flat.reshape(self.shape), axis, 0)
        flat = np.ascontiguousarray(array).reshape(-1)
        return ArrayLeaf(flat, array.shape, self.origin, self.is_jax)

    @property
    def row(self) -> int:
        """Number of elements at one index of the first axis."""
        return math.prod(self.shape[1:])

    def back(self, values: np.ndarray) -> Any:
        """Converts a result to the kind of array that the user gave (numpy or jax)."""
        if not self.is_jax:
            return values
        from ._jax_leaves import put

        return put(values, self.origin)


_ARE_SLICES: Final[WeakKeyDictionary[type, bool]] = WeakKeyDictionary()


def is_slices(node: object) -> TypeGuard[SlicesLike]:
    """Returns whether the node is `zs.IndexedSlices`. Remembers the answer for each
    class, as checking the protocol takes ten microseconds."""
    kind = type(node)
    are_slices = _ARE_SLICES.get(kind)
    if are_slices is None:
        are_slices = _ARE_SLICES[kind] = isinstance(node, SlicesLike)
    return are_slices


def dense(slices: SlicesLike) -> Any:
    """Returns the slices as a dense array: by numpy if they are numpy arrays, because
    jax would truncate 64 bits."""
    values, indices, shape = slices.values, slices.indices, slices.dense_shape
    are_numpy = isinstance(values, np.ndarray) and isinstance(indices, np.ndarray)
    if shape is None or not are_numpy:
        return slices.to_dense()
    inside = (indices >= 0) & (indices < shape[0])
    found = runs(indices[inside])
    whole = np.zeros(shape, values.dtype)
    whole[found.unique] = sums(found, values[inside])
    return whole


def with_rows(slices: Any, divisor: int | None, values: Any, indices: Any) -> Any:
    """Returns slices with the gathered ``values`` and ``indices`` of all ranks. Divides
    the values by ``divisor`` (the number of ranks) for a mean, because rows of equal
    index are summed later."""
    if divisor is not None:
        values = values / divisor
    return dataclasses.replace(slices, values=values, indices=indices)


def leaf_of(origin: Any) -> ArrayLeaf:
    """Converts an array or number of the user to a leaf.

    Raises:
        TypeError: ``origin`` is not an array, or its dtype is not supported.
    """
    is_jax = _is_jax(origin)
    if not is_jax and not isinstance(origin, _NUMPY):
        raise TypeError(
            f"expected numpy or jax arrays, numbers, or pytrees of them, got "
            f"{type(origin).__name__}"
        )
    if isinstance(origin, np.ma.MaskedArray):
        raise TypeError("got a masked array, whose mask would be lost: fill it first")
    # Of a jax array on a CPU: a view, without a copy.
    array = np.asarray(origin)
    if name_of(array.dtype) is None:
        raise TypeError(f"arrays of dtype {array.dtype} cannot be sent to other ranks")
    # Engines compute in the machine's byte order, and their results are in it.
    dtype = array.dtype.newbyteorder("=")
    flat = np.asarray(array, dtype, order="C").reshape(-1)
    return ArrayLeaf(flat, array.shape, origin, is_jax)


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any], str]:
    """Flattens a pytree with IndexedSlices as leaves. Returns the leaves, a function
    that rebuilds the tree of other leaves, and the paths of the leaves as text, which
    must be equal on all ranks."""
    if isinstance(tree, _NUMPY):
        return [tree], lambda leaves: leaves[0], ""
    # Only here: programs of numpy alone never load jax.
    from ._jax_leaves import flatten as flatten_by_jax

    return flatten_by_jax(tree, is_slices)


def described(leaves: Sequence[ArrayLeaf], free: Sequence[ArrayLeaf] = ()) -> str:
    """Describes the dtypes and shapes of arrays, which must be equal on all ranks:
    ``float32[10, 3]``. Describes many arrays by their number and a digest.

    Args:
        free: Leaves whose length along the first axis may differ.
    """
    # By identity: looking each leaf up in a list took milliseconds for a thousand.
    are_free = set(map(id, free))
    names = [_named(leaf, id(leaf) in are_free) for leaf in leaves]
    if len(names) <= _SPELT:
        return ", ".join(names)
    digest = zlib.crc32(";".join(names).encode())
    return f"{len(names)} arrays such as {names[0]}, digest {digest:08x}"


def _named(leaf: ArrayLeaf, is_free: bool) -> str:
    dims = [str(dim) for dim in leaf.shape]
    if is_free:
        dims[0] = "?"
    return f"{name_of(leaf.flat.dtype)}[{', '.join(dims)}]"


def _is_jax(origin: Any) -> bool:
    if isinstance(origin, _NUMPY) or "jax" not in sys.modules:
        return False
    from ._jax_leaves import is_array

    return is_array(origin)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Arrays of one dtype that are sent as one: their indices in the call, and their
    numbers of elements."""

    dtype: np.dtype
    members: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.counts) * self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """Whether several arrays share the bucket, so that they have to be copied."""
        return len(self.members) > 1

    def flat(
        self,
        arrays: Sequence[np.ndarray],
        allocate: Callable[[int, np.dtype], np.ndarray],
    ) -> np.ndarray:
        """Concatenates the elements of the bucket's arrays: ``[sum(counts)]`` in C
        order; ``arrays`` are all arrays that were packed.

        A single array in C order is not copied: the result is a view. Otherwise
        ``allocate(elements, dtype)`` provides the memory.
        """
        members = [arrays[member] for member in self.members]
        if not self.is_packed:
            return members[0].reshape(-1)
        whole = allocate(sum(self.counts), self.dtype)
        for array, part in zip(members, self.split(whole), strict=True):
            part.reshape(array.shape)[...] = array
        return whole

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Splits ``flat`` into a view ``[count]`` for each array of the bucket."""
        return split(flat, self.counts)


def split(flat: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Splits ``flat`` ``[sum(sizes)]`` into views of these sizes."""
    ends = accumulate(sizes, initial=0)
    return [flat[start:end] for start, end in pairwise(ends)]


def buckets(
    arrays: Iterable[tuple[np.dtype, int]],
    bytes_per_pack: int = 0,
    alone: int | None = None,
) -> list[Bucket]:
    """Divides arrays into buckets that are sent as one, in the order in which to send
    them.

    Args:
        arrays: Dtype and number of elements of each array.
        bytes_per_pack: A pack larger than this is full; 0: one pack for all. Not an
            upper bound, as packs exceed it.
        alone: Arrays of this many bytes or more are sent separately, without a copy;
            None: no array, as in TensorFlow.

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
        # Looked at before an array is added, so a pack ends above the limit, as in
        # TensorFlow.
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
