"""Rows of a table: which component has which, outside of steps and in what jax traces.

Outside of steps rows are asked of the components, and put back in order. Law: rows that
are read travel once, however often they were asked for, and nothing but them does.
Decides without I/O; the storages carry it out.

Inside of what jax traces shapes are fixed. Law: what is no row of a component has an
index behind its last row, where jax drops what is written, and a gradient of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.rows import Runs, runs, sums
from zstrat.wire import UpdateOp

from ._storage import read_parts, read_parts_async
from ._table import TableLayout, absent, reaching

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._storage import StorageRows, StorageUpdate, VariableHandle
    from ._table import Table, TablePiece
    from .gradients._slots import OptimizerHandle


def read_rows(table: Table, ids: Any) -> np.ndarray:
    """Rows of a table from their storages, ``ids.shape + row``, in the order of
    ``ids``.

    Cost: one request to each storage that has some, each row once.

    Raises:
        ValueError: Ids are no integers.
        IndexError: There is no such row.
        PSUnavailableError: A parameter server that has some is gone.
    """
    return Gathering.of(table, ids).read(read_parts)


async def read_rows_async(table: Table, ids: Any) -> np.ndarray:
    """`read_rows`, without blocking the running loop.

    Cancellation: nothing is lost, a read has no effect.
    """
    gathering = Gathering.of(table, ids)
    values = [await variable._read_now_async() for variable in gathering.whole]
    return gathering.assembled(await read_parts_async(gathering.parts), values)


@dataclass(frozen=True, slots=True)
class Gathering:
    """Which rows to ask the components for, and how the answers make up what was
    wanted."""

    table: Table
    shape: tuple[int, ...]
    found: Runs
    pieces: Sequence[TablePiece]
    absent_mask: np.ndarray | None = None
    """Which of the ids are `ABSENT`, if any."""

    @classmethod
    def of(cls, table: Table, ids: Any) -> Gathering:
        """The gathering for ids of any shape.

        Raises:
            ValueError: They are no integers.
            IndexError: There is no such row.
        """
        index = integers(ids, f"ids of {table}")
        table.require_inside(index)
        flat = index.reshape(-1)
        absent_mask = absent(flat)
        found = runs(flat if absent_mask is None else flat[~absent_mask])
        return cls(table, index.shape, found, table.pieces(found.unique), absent_mask)

    @property
    def whole(self) -> list[VariableHandle]:
        """The components whose values are brought together, whatever rows are wanted:
        all processes take part in that, and others may want other rows."""
        return [v for v in self.table.components if v.is_brought_together]

    @property
    def parts(self) -> list[StorageRows]:
        """What the storages of the others are asked for."""
        components = self.table.components
        asked = [(components[piece.component], piece.local) for piece in self.pieces]
        return [part for part in asked if not part[0].is_brought_together]

    def read(
        self, read: Callable[[Sequence[StorageRows]], Sequence[np.ndarray]]
    ) -> np.ndarray:
        """The rows that were wanted. ``read`` gives those of `parts`."""
        values = [variable._read_now() for variable in self.whole]
        return self.assembled(read(self.parts), values)

    def assembled(
        self, answers: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> np.ndarray:
        """The rows that were wanted, from those of `parts` and the values of `whole`,
        in order; read-only."""
        row = self.table.shape[1:]
        unique = np.empty((len(self.found.unique), *row), self.table.dtype)
        rest = iter(answers)
        keys = [variable.spec.key for variable in self.whole]
        brought = dict(zip(keys, values, strict=True))
        for piece in self.pieces:
            value = brought.get(self.table.components[piece.component].spec.key)
            unique[piece.positions] = (
                next(rest) if value is None else value[piece.local]
            )
        rows: np.ndarray = unique[self.found.inverse()]
        if self.absent_mask is not None:
            full = np.zeros((len(self.absent_mask), *row), self.table.dtype)
            full[~self.absent_mask] = rows
            rows = full
        rows = rows.reshape(*self.shape, *row)
        rows.flags.writeable = False
        return rows


def row_updates(
    table: Table,
    op: UpdateOp,
    operands: tuple[np.ndarray, np.ndarray],
    optimizer: OptimizerHandle | None,
) -> list[StorageUpdate]:
    """What each component has of an update of rows of the table.

    Gradients of one row are summed, as an optimizer takes one step a row; and it takes
    one with every component, be it of no rows, so that all count the same steps. What
    is scattered keeps the order of duplicates.
    """
    indices, rows = present(*operands)
    found = runs(indices)
    if op is UpdateOp.OPTIMIZE_ROWS:
        indices, rows = found.unique, sums(found, rows)
    else:
        # Numpy makes floats of uint64 less the first row of a component.
        indices = indices.astype(np.intp, copy=False)[found.order]
        rows = rows[found.order]
    parts = {
        piece.component: (piece.local, rows[piece.positions])
        for piece in table.pieces(indices)
    }
    if op is UpdateOp.OPTIMIZE_ROWS:
        nothing = indices[:0], rows[:0]
        parts = {n: parts.get(n, nothing) for n in range(len(table.components))}
    return [
        (table.components[n], op, operands, optimizer) for n, operands in parts.items()
    ]


def present(indices: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids without those that are `ABSENT`."""
    absent_mask = absent(indices)
    return (
        (indices, rows)
        if absent_mask is None
        else (indices[~absent_mask], rows[~absent_mask])
    )


def integers(ids: Any, what: str) -> np.ndarray:
    """Ids as an array.

    Raises:
        ValueError: They are no integers.
    """
    try:
        index = np.asarray(ids)
    except ValueError as error:
        raise ValueError(
            f"{what} are a list of lists of different lengths: pad them, or give "
            f"zs.RaggedIds to zs.embedding_lookup_sparse ({error})"
        ) from None
    if not index.size and not isinstance(ids, np.ndarray):
        index = index.astype(np.intp)  # numpy takes an empty list for floats
    if index.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, not {index.dtype}")
    return index


def rows_of_component(table: Table, component: int, indices: jax.Array) -> jax.Array:
    """Indices of the table as rows of one component; those of others are behind its
    last row."""
    height = table.components[component].shape[0]
    indices = reaching(indices)
    if table.layout is TableLayout.MOD:
        count = len(table.components)
        mine = (indices % count == component) & (indices >= 0)
        return jnp.where(mine, indices // count, height)
    first = int(table.offsets[component])
    inside = (indices >= first) & (indices < first + height)
    return jnp.where(inside, indices - first, height)


def summed(
    indices: jax.Array, rows: jax.Array, height: int
) -> tuple[jax.Array, jax.Array]:
    """Each index once, sorted, with the sum of its rows: as many as there were, those
    in excess behind the last row, and zero.

    Args:
        indices: ``[n]``; what is not in ``[0, height)`` counts as no row.
        rows: ``[n, ...]``.
    """
    indices = reaching(indices)
    inside = (indices >= 0) & (indices < height)
    count = indices.shape[0]
    unique, inverse = jnp.unique(
        jnp.where(inside, indices, height),
        size=count,
        fill_value=height,
        return_inverse=True,
    )
    sums = jax.ops.segment_sum(rows, inverse.reshape(-1), num_segments=count)
    is_row = (unique < height).reshape(-1, *[1] * (rows.ndim - 1))
    return unique, jnp.where(is_row, sums, jnp.zeros_like(sums))
