"""Reads and updates of rows of a table, outside of steps and in traced code.

Outside of steps, each component is asked for its rows, and the answers are put in
order. Law: each row that is read is transferred once, however often its id occurs, and
no other row is. The functions plan and join without I/O; the storages do the I/O.

In traced code shapes are fixed. Law: an index that is not a row of a component is
replaced by the index after its last row, where jax drops writes, with a gradient of
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.rows import Runs, sums
from zstrat.wire import UpdateOp

from ._storage import read_parts, read_parts_async
from ._table import TableLayout, absent, reaching

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._storage import StorageRows, StorageUpdate, VariableHandle
    from ._table import Table, TablePiece
    from .gradients._slots import OptimizerHandle


def read_rows(table: Table, ids: Any) -> np.ndarray:
    """Reads rows of a table from their storages, ``ids.shape + row``.

    Cost: one request to each storage that has some of the rows, each row once.

    Raises:
        ValueError: The ids are not integers.
        IndexError: An id is outside of the table.
        PSUnavailableError: A parameter server that has some of the rows is gone.
    """
    return Gathering.of(table, ids).read(read_parts)


async def read_rows_async(table: Table, ids: Any) -> np.ndarray:
    """Reads rows like `read_rows`, without blocking the running loop.

    Cancellation: nothing is lost, a read has no effect.
    """
    gathering = Gathering.of(table, ids)
    values = [await variable._read_now_async() for variable in gathering.whole]
    return gathering.assembled(await read_parts_async(gathering.parts), values)


@dataclass(frozen=True, slots=True)
class Gathering:
    """The plan of one read of rows: what to request from the storages, and how to join
    the answers."""

    table: Table
    shape: tuple[int, ...]
    found: Runs
    pieces: Sequence[TablePiece]
    absent_mask: np.ndarray | None = None
    """The mask of ids that are `ABSENT`; None if none is."""

    @classmethod
    def of(cls, table: Table, ids: Any) -> Gathering:
        """Plans the read of ids of any shape.

        Raises:
            ValueError: The ids are not integers.
            IndexError: An id is outside of the table.
        """
        index = integers(ids, f"ids of {table}")
        table.require_inside(index)
        flat = index.reshape(-1)
        absent_mask = absent(flat)
        # Padding is left out here, and filled with zeros in `assembled`.
        found = table.runs(flat if absent_mask is None else flat[~absent_mask])
        return cls(table, index.shape, found, table.pieces(found.unique), absent_mask)

    @property
    def whole(self) -> list[VariableHandle]:
        """Components whose copies are aggregated on read. Their whole values are read,
        whichever rows are wanted: all processes take part in the aggregation, and
        others may want other rows."""
        return [v for v in self.table.components if v.is_aggregated_on_read]

    @property
    def parts(self) -> list[StorageRows]:
        """The rows to request from the storages, of all components that are not in
        `whole`."""
        components = self.table.components
        asked = [(components[piece.component], piece.local) for piece in self.pieces]
        return [part for part in asked if not part[0].is_aggregated_on_read]

    def read(
        self, read: Callable[[Sequence[StorageRows]], Sequence[np.ndarray]]
    ) -> np.ndarray:
        """Reads the rows; ``read`` is the function that fetches `parts` from the
        storages."""
        values = [variable._read_now() for variable in self.whole]
        return self.assembled(read(self.parts), values)

    def assembled(
        self, answers: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Joins the rows of `parts` and the values of `whole` to the result, a
        read-only array."""
        row = self.table.shape[1:]
        unique = np.empty((len(self.found.unique), *row), self.table.dtype)
        rest = iter(answers)
        keys = [variable.spec.key for variable in self.whole]
        brought = dict(zip(keys, values, strict=True))
        # Those that are aggregated on read came as a whole.
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
    """Splits an update of rows of a table into one update for each component.

    Gradients of the same row are summed, as an optimizer makes one step for a row. An
    optimizer update is sent to every component, even without rows, so that all count
    the same steps. Scatter updates keep the order of duplicates.
    """
    indices, rows = present(*operands)
    index_runs = table.runs(indices)
    if op is UpdateOp.OPTIMIZE_ROWS:
        indices, rows = index_runs.unique, sums(index_runs, rows)
    else:
        # uint64 minus int64 is a float in numpy.
        indices = indices.astype(np.int64, copy=False)[index_runs.order]
        # Sorted as the components are; the sort is stable, so duplicates keep their
        # order.
        rows = rows[index_runs.order]
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
    """Drops indices that are `ABSENT` (padding), and their rows."""
    absent_mask = absent(indices)
    if absent_mask is None:
        return indices, rows
    return indices[~absent_mask], rows[~absent_mask]


def integers(ids: Any, what: str) -> np.ndarray:
    """Converts ids to a numpy array of integers.

    Args:
        what: Describes the ids, for errors.

    Raises:
        ValueError: The ids are not integers.
    """
    try:
        index = np.asarray(ids)
    except ValueError as error:
        raise ValueError(
            f"{what} are lists of different lengths: pad them, or give "
            f"zs.RaggedIds to zs.embedding_lookup_sparse ({error})"
        ) from None
    if not index.size and not isinstance(ids, np.ndarray):
        index = index.astype(np.intp)  # numpy makes an empty list an array of floats
    if index.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, got {index.dtype}")
    return index


def rows_of_component(table: Table, component: int, indices: jax.Array) -> jax.Array:
    """Converts row indices of a table to row indices of one of its components.

    Indices of rows of other components become the index after the component's last row.
    """
    height = table.components[component].shape[0]
    indices = reaching(indices)
    if table.layout is TableLayout.MOD:
        count = len(table.components)
        is_own = (indices % count == component) & (indices >= 0)
        return jnp.where(is_own, indices // count, height)
    first = int(table.offsets[component])
    inside = (indices >= first) & (indices < first + height)
    return jnp.where(inside, indices - first, height)


def summed(
    indices: jax.Array, rows: jax.Array, height: int
) -> tuple[jax.Array, jax.Array]:
    """Sums the rows of each index, in traced code. Returns each index once, sorted, and
    the sum of its rows.

    Both results have the length of the arguments; unused entries have the index
    ``height`` and sums of zero.

    Args:
        indices: ``[n]``; indices outside of ``[0, height)`` are ignored.
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
