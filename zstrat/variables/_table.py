"""Rows of a larger array: as a value (`IndexedSlices`), and which variable has them.

A `Table` is one or several variables, in one of two layouts, as in TF: *div* gives each
component a range of neighbouring rows, the first ones one more than the rest (what a
partitioner makes); *mod* deals the rows out in turn (only for lists that are given to
an `embedding_lookup` of the v1 API). Decides without I/O: ids in, pieces out.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._home import VariableHandle


@dataclass(frozen=True, slots=True)
class IndexedSlices:
    """``values[i]`` belongs to row ``indices[i]`` of an array of ``dense_shape``.

    A pytree node whose leaves are ``values`` [n, ...] and ``indices`` [n] (integers).
    ``jax.tree.map`` computes with the indices, too: what is to be done with a gradient
    (a mean over micro-batches) is done with the loss, with ``values`` alone, or with
    `to_dense()`. An index may occur several times: adding accumulates. In gradients of
    padded lookups some are of no row at all (a negative number): their values count
    nowhere. ``dense_shape`` is None if the receiver knows it (a variable does).
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the array that these are rows of."""
        return self.dense_shape

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    def to_dense(self) -> jax.Array:
        """The whole array, zero where there is no row.

        Raises:
            ValueError: ``dense_shape`` is not known.
        """
        if self.dense_shape is None:
            raise ValueError("these IndexedSlices do not say their dense_shape")
        values = jnp.asarray(self.values)
        zeros = jnp.zeros(self.dense_shape, values.dtype)
        return zeros.at[jnp.asarray(self.indices)].add(values)


def _flatten(slices: IndexedSlices) -> tuple[tuple[Any, Any], tuple[int, ...] | None]:
    return (slices.values, slices.indices), slices.dense_shape


def _unflatten(
    dense_shape: tuple[int, ...] | None, leaves: tuple[Any, Any]
) -> IndexedSlices:
    return IndexedSlices(leaves[0], leaves[1], dense_shape)


jax.tree_util.register_pytree_node(IndexedSlices, _flatten, _unflatten)


ABSENT: Final = 1 - 2**31
"""Among ids: no row. Shapes are fixed in a step, so what does not count stays where it
is, as this; nothing is fetched for it, it reads as zeros, and updates leave it out. No
id that was computed by mistake is likely to be this one."""


def absent(ids: np.ndarray) -> np.ndarray | None:
    """Where ids are `ABSENT`; None if none is. Cost: one pass, if none is."""
    if not ids.size or ids.dtype.itemsize < 4 or int(ids.min()) >= 0:
        return None
    found: np.ndarray = ids == ABSENT
    return found if found.any() else None


class TableLayout(enum.StrEnum):
    """How rows are laid over the components."""

    DIV = "div"
    MOD = "mod"


class TablePiece(NamedTuple):
    """What one component has of a batch of ids: the ids at ``positions`` are its rows
    ``local``."""

    component: int
    positions: slice | np.ndarray
    local: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows over variables of one dtype that differ in their first axis alone.

    ``shape`` is that of all rows together. Two tables are equal if they are over the
    same variables in the same layout: values are never compared.
    """

    name: str
    components: tuple[VariableHandle, ...]
    layout: TableLayout = TableLayout.DIV
    offsets: np.ndarray = field(init=False, repr=False)
    """First row of each component, and behind the last one the number of all rows."""

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
    def keys(self) -> tuple[int, ...]:
        """Names the table in its session."""
        return tuple(component.spec.key for component in self.components)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return (self.keys, self.layout) == (other.keys, other.layout)

    def __hash__(self) -> int:
        return hash((self.keys, self.layout))

    def __str__(self) -> str:
        return f"table {self.name!r} ({self.dtype.name}{list(self.shape)})"

    def require_inside(self, ids: np.ndarray) -> None:
        """Refuses ids of rows that are not there, but for `ABSENT`. Cost: one pass.

        Raises:
            IndexError: Names the table and the first such id.
        """
        if not ids.size:
            return
        rows = self.shape[0]
        if int(ids.min()) < 0 or int(ids.max()) >= rows:
            wrong = ids[((ids < 0) & (ids != ABSENT)) | (ids >= rows)]
            if not wrong.size:
                return
            raise IndexError(
                f"{self} has no row {int(wrong.flat[0])}: ids are in [0, {rows}). "
                "Negative ids do not count from the end; mask padding "
                "(zs.embedding_lookup_sparse), or look it up as row 0"
            )

    def pieces(self, ids: np.ndarray) -> Sequence[TablePiece]:
        """What each component has of ids ``[n]``, which never fall and are inside;
        components that have none are left out."""
        if len(self.components) == 1:
            return [TablePiece(0, slice(0, len(ids)), ids)] if len(ids) else []
        if self.layout is TableLayout.DIV:
            return self._ranges(ids)
        count = len(self.components)
        owners = ids % count
        found = [np.flatnonzero(owners == n) for n in range(count)]
        return [
            TablePiece(n, at, ids[at] // count) for n, at in enumerate(found) if len(at)
        ]

    def _ranges(self, ids: np.ndarray) -> list[TablePiece]:
        cuts = np.searchsorted(ids, self.offsets)
        return [
            TablePiece(n, slice(start, stop), ids[start:stop] - self.offsets[n])
            for n, (start, stop) in enumerate(itertools.pairwise(cuts))
            if start < stop
        ]
