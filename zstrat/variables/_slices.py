"""Rows of a larger array: the sparse gradient and the operand of scatter updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


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
