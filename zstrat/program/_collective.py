"""What replicas do together: collectives over the named axis of `_replicas`.

Law of the file: everything here runs inside a replica function while it is traced, and
gives every replica the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from zstrat.variables import IndexedSlices, Variable, VariableAggregation
from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Sequence

AXIS: Final = "replica"
"""Name of the mapped axis."""

# jax's stubs leave these untyped.
_psum: Final[Any] = jax.lax.psum
_pmean: Final[Any] = jax.lax.pmean


def replica_id() -> jax.Array:
    """The number of the replica that is being traced, int32, from 0."""
    return jax.lax.axis_index(AXIS)


def all_reduce(tree: Any, *, mean: bool) -> Any:
    """Sums (or averages) the pytree over the replicas; every replica gets the result.

    `IndexedSlices` are concatenated in replica order, duplicates kept; for the mean
    their values are divided by the number of replicas.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_slices)
    # One collective for all the dense leaves: XLA makes one all-reduce of it.
    dense = iter(_summed([x for x in leaves if not _is_slices(x)], mean))
    return jax.tree.unflatten(
        treedef,
        [_concatenated(x, mean) if _is_slices(x) else next(dense) for x in leaves],
    )


def aggregate(
    variable: Variable, op: UpdateOp, operands: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Operands of one update for all the replicas that make it.

    Raises:
        ValueError: The variable's aggregation is NONE.
        NotImplementedError: Rows that are not added cannot be summed.
    """
    rows = len(operands) > 1
    if op in (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS):
        return _rows(operands, mean=False) if rows else (_sum(operands[0]),)
    match variable.aggregation:
        case VariableAggregation.NONE:
            raise ValueError(
                f"You must specify an aggregation method to update {variable.spec} in "
                "replica context: its replicas would disagree. Create it with, for "
                "example, zs.Variable(..., aggregation=zs.VariableAggregation.SUM)"
            )
        case VariableAggregation.ONLY_FIRST_REPLICA:
            return tuple(_first(operand) for operand in operands)
        case aggregation:
            mean = aggregation is VariableAggregation.MEAN
            if not rows:
                return (_summed(operands, mean)[0].astype(operands[0].dtype),)
            if op in _NOT_ADDITIVE:
                raise NotImplementedError(
                    f"{op.name.lower()} of {variable.spec} in replica context is only "
                    "supported with VariableAggregation.ONLY_FIRST_REPLICA, not with "
                    f"{aggregation.name}"
                )
            return _rows(operands, mean)


_NOT_ADDITIVE: Final = (
    UpdateOp.SCATTER_MIN,
    UpdateOp.SCATTER_MAX,
    UpdateOp.SCATTER_UPDATE,
)


def _sum(x: jax.Array) -> jax.Array:
    summed: jax.Array = _psum(x, AXIS)
    return summed


def _first(x: jax.Array) -> jax.Array:
    """Replica 0's value; a select, because 0 * nan of another replica is nan."""
    mine = jnp.where(replica_id() == 0, x, jnp.zeros_like(x))
    return _sum(mine).astype(x.dtype)


def _rows(operands: tuple[jax.Array, ...], mean: bool) -> tuple[jax.Array, ...]:
    indices, values = operands
    joined = _concatenated(IndexedSlices(values, indices), mean)
    return joined.indices, joined.values


def _summed(leaves: Sequence[Any], mean: bool) -> list[jax.Array]:
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    reduced: list[jax.Array] = (_pmean if mean else _psum)(arrays, AXIS)
    return reduced


def _concatenated(slices: IndexedSlices, mean: bool) -> IndexedSlices:
    values = jax.lax.all_gather(jnp.asarray(slices.values), AXIS, tiled=True)
    indices = jax.lax.all_gather(jnp.asarray(slices.indices), AXIS, tiled=True)
    if mean:
        values = values / jax.lax.axis_size(AXIS)
    return IndexedSlices(values, indices, slices.dense_shape)


def _is_slices(node: Any) -> bool:
    return isinstance(node, IndexedSlices)
