"""Rows of arrays: `IndexedSlices` (a value), and `Table` (where rows are stored).

A `Table` consists of one or several variables, its components. Two of its layouts are
TF's: *div* gives each component a range of neighbouring rows, and the first components
one row more than the rest (as partitioners do); *mod* distributes the rows round-robin
(only for lists in an `embedding_lookup` of the v1 API). In the third, *hash*, of a
`HashTable`, rows have arbitrary 64-bit ids instead of indices; each component has a
range of the hashes of ids, and ids are sorted by hash. The methods do no I/O: they
convert ids to `TablePiece` objects.
"""

from __future__ import annotations

import enum
import itertools
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.ids import PADDING, buckets_of, hashes_of
from zstrat.rows import hashed_runs, runs

from ._downcast import DowncastWarning, downcast_loss, user_stacklevel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.rows import Runs

    from ._storage import VariableHandle


@dataclass(frozen=True, slots=True)
class IndexedSlices:
    """Rows of an array of ``dense_shape``: ``values[i]`` belongs to row ``indices[i]``.

    A pytree node whose leaves are ``values`` [n, ...] and ``indices`` [n] (integers).
    ``jax.tree.map`` also computes with the indices: to scale a gradient (a mean over
    micro-batches), scale the loss, or only ``values``, or `to_dense()`. An index may
    occur several times: its values accumulate. Gradients of padded lookups have
    negative indices, whose values are ignored. ``dense_shape`` may be None if the
    receiver knows the shape, as a variable does.
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the array whose rows these are."""
        return self.dense_shape

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    def to_dense(self) -> jax.Array:
        """Returns the whole array, with zeros in all rows that are not given.

        Raises:
            ValueError: ``dense_shape`` is None.

        Warns:
            DowncastWarning: The values lose bits, as jax computes with 32 bits.
        """
        if self.dense_shape is None:
            raise ValueError(
                "to_dense() needs the dense_shape of IndexedSlices, got None: give it "
                "when they are made"
            )
        if (lost := downcast_loss(self.values)) is not None:
            warnings.warn(
                f"IndexedSlices.to_dense() gives an array of jax, which computes with "
                f"32 bits, and the values have dtype {self.dtype}: {lost}. Convert "
                "them before, or switch on jax_enable_x64 (JAX_ENABLE_X64=1)",
                DowncastWarning,
                stacklevel=user_stacklevel(),
            )
        values = jnp.asarray(self.values)
        zeros = jnp.zeros(self.dense_shape, values.dtype)
        height, indices = self.dense_shape[0], self.indices
        if isinstance(indices, np.ndarray):  # before jax casts them to 32 bits
            is_outside = (indices < 0) | (indices >= height)
            indices = np.where(is_outside, 0, indices).astype(np.int32)
            indices[is_outside] = height  # which few bits may not hold
        indices = reaching(jnp.asarray(indices))
        # A negative index would count from the end; jax drops one after the last row.
        return zeros.at[jnp.where(indices < 0, height, indices)].add(values)


def reaching(indices: jax.Array) -> jax.Array:
    """Casts indices to a dtype that can represent numbers above the last row."""
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


jax.tree_util.register_pytree_node(
    IndexedSlices,
    lambda slices: ((slices.values, slices.indices), slices.dense_shape),
    lambda dense_shape, leaves: IndexedSlices(leaves[0], leaves[1], dense_shape),
)


ABSENT: Final = PADDING
"""The id of padding: its row reads as zeros, and updates skip it. Shapes are fixed in
steps, so padding cannot be removed. An id computed by mistake is unlikely to be this
one."""


def absent(ids: np.ndarray) -> np.ndarray | None:
    """Returns the mask of ids that are `ABSENT` (padding); None if there are none.
    Cost: one pass."""
    # Fewer than 32 bits cannot be padding.
    if not ids.size or ids.dtype.itemsize < 4 or int(ids.min()) >= 0:
        return None
    mask: np.ndarray = ids == ABSENT
    return mask if mask.any() else None


class TableLayout(enum.StrEnum):
    """How the rows of a table are distributed over its components."""

    DIV = "div"
    MOD = "mod"
    HASH = "hash"


class TablePiece(NamedTuple):
    """The ids of a batch that belong to one component: the ids at ``positions`` of the
    batch are the rows ``local`` of ``component``."""

    component: int
    positions: slice | np.ndarray
    local: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of one or several variables, which may differ only in their first axis.

    ``shape`` is that of all rows together; in a hash table its first axis is nominal.
    ``is_hashed``: rows have 64-bit ids instead of indices. Two tables are equal if they
    have the same variables in the same layout; values are never compared.
    """

    name: str
    components: tuple[VariableHandle, ...]
    layout: TableLayout = TableLayout.DIV
    offsets: np.ndarray = field(init=False, repr=False)
    """First row of each component, followed by the number of all rows."""

    def __post_init__(self) -> None:
        rows = [component.shape[0] for component in self.components]
        object.__setattr__(self, "offsets", np.cumsum([0, *rows]))

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.offsets[-1]), *self.components[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.components[0].dtype

    @property
    def is_hashed(self) -> bool:
        return self.layout is TableLayout.HASH

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys of the components, which identify the table in its session."""
        return tuple(component.spec.key for component in self.components)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return (self.keys, self.layout) == (other.keys, other.layout)

    def __hash__(self) -> int:
        return hash((self.keys, self.layout))

    def __str__(self) -> str:
        if self.is_hashed:
            row = list(self.shape[1:])
            return f"table {self.name!r} (any id, rows {self.dtype.name}{row})"
        return f"table {self.name!r} ({self.dtype.name}{list(self.shape)})"

    def require_inside(self, ids: np.ndarray) -> None:
        """Refuses ids outside of the table, except `ABSENT` (padding). Cost: one pass.

        Raises:
            IndexError: An id is outside; the error names the table and the first such
                id.
        """
        if not ids.size or self.is_hashed:
            return
        rows = self.shape[0]
        # Two numbers first: masks are made only if an id is outside.
        if int(ids.min()) < 0 or int(ids.max()) >= rows:
            wrong = ids[((ids < 0) & (ids != ABSENT)) | (ids >= rows)]
            if not wrong.size:
                return
            raise IndexError(
                f"{self} has no row {int(wrong.flat[0])}: ids are in [0, {rows}). "
                "Negative ids do not count from the end; mask padding "
                "(zs.embedding_lookup_sparse), or look it up as row 0"
            )

    def runs(self, ids: np.ndarray) -> Runs:
        """Groups equal ids of an array ``[n]``, all inside of the table. The groups are
        sorted as the rows of the table are: ascending, or by hash."""
        if self.is_hashed:
            # An id of uint64 is the one of int64 that has the same bits.
            ids = ids.astype(np.int64, copy=False)
            return hashed_runs(ids, hashes_of(ids))
        return runs(ids)

    def cuts(self, ids: np.ndarray) -> list[int]:
        """Returns at which positions the ids of each component begin in ``ids`` and,
        last, where all end. For hash tables; ``ids`` are int64 ``[n]``, sorted by
        hash."""
        firsts = [self._buckets(component)[0] for component in self.components]
        buckets = buckets_of(hashes_of(ids))
        return [*np.searchsorted(buckets, firsts).tolist(), len(ids)]

    def pieces(self, ids: np.ndarray) -> Sequence[TablePiece]:
        """Splits ids ``[n]`` into pieces, one for each component that has some.

        The ids are inside of the table, and sorted as its rows are: ascending, or by
        hash.
        """
        if len(self.components) == 1:
            return [TablePiece(0, slice(0, len(ids)), ids)] if len(ids) else []
        # Ids are in the order of the components, so a piece is a slice; only
        # round-robin needs positions.
        if self.is_hashed:
            return [
                TablePiece(n, slice(start, stop), ids[start:stop])
                for n, (start, stop) in enumerate(itertools.pairwise(self.cuts(ids)))
                if start < stop
            ]
        if self.layout is TableLayout.DIV:
            return self._ranges(ids)
        count = len(self.components)
        owners = ids % count
        positions = [np.flatnonzero(owners == n) for n in range(count)]
        return [
            TablePiece(n, at, ids[at] // count)
            for n, at in enumerate(positions)
            if len(at)
        ]

    @staticmethod
    def _buckets(component: VariableHandle) -> tuple[int, int]:
        assert component.spec.buckets is not None, component
        return component.spec.buckets

    def _ranges(self, ids: np.ndarray) -> list[TablePiece]:
        cuts = np.searchsorted(ids, self.offsets)
        return [
            TablePiece(n, slice(start, stop), ids[start:stop] - self.offsets[n])
            for n, (start, stop) in enumerate(itertools.pairwise(cuts))
            if start < stop
        ]
