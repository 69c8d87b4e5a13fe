"""Rows of several ids brought together: ``zs.embedding_lookup_sparse``.

jax computes with fixed shapes, so a row of ids that is as long as it happens to be is
written either as a padded array with a mask, or as pairs of an id and the row that it
belongs to.

Law of the file: no row is fetched, or touched by an optimizer, for the sake of an id
that does not count.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from ._embedding import lookup

_COMBINERS: Final = ("sum", "mean", "sqrtn")


@dataclass(frozen=True, slots=True)
class RaggedIds:
    """Rows of ids of different lengths; a pytree. Made by `padded` or `pairs`."""

    ids: Any
    mask: Any = None
    row_ids: Any = None
    nrows: int | None = None

    @staticmethod
    def padded(ids: Any, mask: Any) -> RaggedIds:
        """Ids ``[..., n]``; those count where ``mask`` of the same shape is true."""
        return RaggedIds(ids, mask)

    @staticmethod
    def pairs(values: Any, row_ids: Any, nrows: int) -> RaggedIds:
        """Ids ``[m]``; that at i belongs to row ``row_ids[i]`` of ``[0, nrows)``."""
        return RaggedIds(values, None, row_ids, operator.index(nrows))


def _flatten(ragged: RaggedIds) -> tuple[tuple[Any, ...], int | None]:
    return (ragged.ids, ragged.mask, ragged.row_ids), ragged.nrows


def _unflatten(nrows: int | None, leaves: tuple[Any, ...]) -> RaggedIds:
    ids, mask, row_ids = leaves
    return RaggedIds(ids, mask, row_ids, nrows)


jax.tree_util.register_pytree_node(RaggedIds, _flatten, _unflatten)


def embedding_lookup_sparse(
    params: Any,
    ids: Any,
    weights: Any = None,
    combiner: str = "mean",
    max_norm: float | None = None,
    *,
    partition_strategy: str = "div",
) -> jax.Array:
    """One row for each row of ids: the weighted sum, mean, or sum by root of squares.

    A row of no ids gives zeros.

    Args:
        params: As of `embedding_lookup`, and so are ``max_norm`` (of each row that is
            looked up) and ``partition_strategy``.
        ids: `RaggedIds`, or a tuple ``(ids, mask)`` or ``(values, row_ids, nrows)``.
        weights: One for each id, of a floating dtype; None: all one.
        combiner: ``"sum"``, ``"mean"`` (by the sum of the weights) or ``"sqrtn"`` (by
            the root of the sum of their squares).

    Returns:
        ``[..., row]`` for ids ``[..., n]``, or ``[nrows, row]``.

    Raises:
        ValueError: Shapes do not fit, ids are no integers, weights no floats, or an
            unknown combiner. Otherwise as `embedding_lookup`.
    """
    bag = _Bag.of(ids, weights)
    return bag.combined(params, combiner, max_norm, partition_strategy)


def safe_embedding_lookup_sparse(
    params: Any,
    ids: Any,
    weights: Any = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    *,
    partition_strategy: str = "div",
) -> jax.Array:
    """`embedding_lookup_sparse` without ids below 0 and without weights that are not
    positive. A row of which nothing is left gives that of ``default_id``, or zeros."""
    bag = _Bag.of(ids, weights).pruned()
    if default_id is not None:
        bag = bag.filled(operator.index(default_id))
    return bag.combined(params, combiner, max_norm, partition_strategy)


@dataclass(frozen=True, slots=True)
class _Bag:
    """Ids, which of them count, and their weights, all of one shape. With ``row_ids``
    they are pairs, else the last axis is combined."""

    ids: jax.Array
    valid: jax.Array
    weights: jax.Array | None
    row_ids: jax.Array | None
    nrows: int

    @staticmethod
    def of(given: Any, weights: Any) -> _Bag:
        ragged = _ragged(given)
        ids = jnp.asarray(ragged.ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"ids must be integers, not {ids.dtype}")
        row_ids, nrows = None, ragged.nrows or 0
        if ragged.row_ids is None:
            valid = jnp.asarray(ragged.mask)
            if ids.ndim < 1 or valid.shape != ids.shape or valid.dtype != jnp.bool_:
                raise ValueError(
                    f"padded ids [..., n] have a mask of booleans of the same shape; "
                    f"got ids {list(ids.shape)} and mask {valid.dtype}"
                    f"{list(valid.shape)}"
                )
        else:
            row_ids = jnp.asarray(ragged.row_ids)
            integers = jnp.issubdtype(row_ids.dtype, jnp.integer)
            if ids.ndim != 1 or row_ids.shape != ids.shape or not integers:
                raise ValueError(
                    f"pairs are values [m] and integer row_ids [m]; got values "
                    f"{list(ids.shape)} and row_ids {row_ids.dtype}"
                    f"{list(row_ids.shape)}"
                )
            valid = (row_ids >= 0) & (row_ids < nrows)
        if weights is not None:
            weights = jnp.asarray(weights)
            floats = jnp.issubdtype(weights.dtype, jnp.floating)
            if weights.shape != ids.shape or not floats:
                raise ValueError(
                    f"weights are floats, one for each id {list(ids.shape)}; got "
                    f"{weights.dtype}{list(weights.shape)}"
                )
        return _Bag(ids, valid, weights, row_ids, nrows)

    def pruned(self) -> _Bag:
        valid = self.valid & (self.ids >= 0)
        if self.weights is not None:
            valid &= self.weights > 0
        return _Bag(self.ids, valid, self.weights, self.row_ids, self.nrows)

    def filled(self, default: int) -> _Bag:
        """With one more place for each row, which counts if nothing else does."""
        empty = self._summed(self.valid.astype(jnp.int32)) == 0
        row_ids = self.row_ids
        if row_ids is not None:
            every = jnp.arange(self.nrows, dtype=row_ids.dtype)
            row_ids = jnp.concatenate([row_ids, every])
        else:
            empty = empty[..., None]
        ids = jnp.full(empty.shape, default, self.ids.dtype)
        weights = self.weights
        if weights is not None:
            ones = jnp.ones(empty.shape, weights.dtype)
            weights = jnp.concatenate([weights, ones], axis=-1)
        return _Bag(
            jnp.concatenate([self.ids, ids], axis=-1),
            jnp.concatenate([self.valid, empty], axis=-1),
            weights,
            row_ids,
            self.nrows,
        )

    def combined(
        self, params: Any, combiner: str, max_norm: float | None, strategy: str
    ) -> jax.Array:
        if combiner not in _COMBINERS:
            raise ValueError(f"combiner is one of {_COMBINERS}, got {combiner!r}")
        rows = lookup(params, self.ids, self.valid, max_norm, strategy)
        dtype = rows.dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"rows of {dtype} cannot be combined: they are no floats")
        wide: Any = dtype if dtype.itemsize > 4 else jnp.float32
        weights = self.valid.astype(wide)
        if self.weights is not None:
            # Not multiplied: what is padded may be nan.
            weights = jnp.where(self.valid, self.weights.astype(wide), weights)
        trailing = (1,) * (rows.ndim - weights.ndim)
        valid = self.valid.reshape(*self.valid.shape, *trailing)
        rows = jnp.where(valid, rows.astype(wide), jnp.zeros((), wide))
        total = self._summed(rows * weights.reshape(valid.shape))
        if combiner != "sum":
            by = self._summed(weights if combiner == "mean" else weights**2)
            by = jnp.where(by == 0, jnp.ones_like(by), by)
            by = by if combiner == "mean" else jnp.sqrt(by)
            total = total / by.reshape(*by.shape, *trailing)
        return total.astype(dtype)

    def _summed(self, x: jax.Array) -> jax.Array:
        if self.row_ids is None:
            return jnp.sum(x, axis=self.ids.ndim - 1)
        return jax.ops.segment_sum(x, self.row_ids, self.nrows)


def _ragged(given: Any) -> RaggedIds:
    match given:
        case RaggedIds():
            return given
        case (ids, mask):
            return RaggedIds.padded(ids, mask)
        case (values, row_ids, nrows):
            return RaggedIds.pairs(values, row_ids, nrows)
    raise ValueError(
        "ids are zs.RaggedIds, a tuple (ids, mask) of padded ids, or a tuple (values, "
        f"row_ids, nrows); got {type(given).__name__}"
    )
