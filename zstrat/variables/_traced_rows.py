"""Rows of a table inside of what jax traces, where shapes are fixed.

Law of the file: what is no row of a component has an index behind its last row, where
jax drops what is written, and a gradient of zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ._table import TableLayout

if TYPE_CHECKING:
    from ._table import Table


def reaching(indices: jax.Array) -> jax.Array:
    """Indices of a dtype that reaches beyond the last row."""
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


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
