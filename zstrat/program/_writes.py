"""The updates of a step, and what they do to a value: for reads after writes.

The parameter server does the same to the stored value; of duplicate indices in
SCATTER_UPDATE the last one wins, on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from zstrat.variables import reaching, rows_of_component
from zstrat.wire._messages import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.variables import GradientCall, Optimizer, Table, Variable


@dataclass(frozen=True, slots=True)
class Recorded:
    """One update: what the step did, and the user's line that did it.

    ``variables`` is the one that is updated or, with a ``table``, its components; with
    a ``call``, all that the gradients are of, whose operands are in a row.
    """

    variables: tuple[Variable, ...]
    op: UpdateOp
    operands: tuple[jax.Array, ...]
    optimizer: Optimizer | None
    where: str
    table: Table | None = None
    call: GradientCall | None = None

    @property
    def variable(self) -> Variable:
        """The variable, or the first component."""
        return self.variables[0]

    @property
    def target(self) -> str:
        """What is updated, in words."""
        return str(self.variables[0].spec if self.table is None else self.table)


Write = tuple[Recorded, int]
"""An update, and which of its variables is meant."""


def written(value: jax.Array, writes: Sequence[Write]) -> jax.Array:
    """``value`` after the updates, in order. Shape and dtype stay as they are."""
    for update, number in writes:
        operands = update.operands
        if update.table is not None and len(update.variables) > 1:
            operands = (
                rows_of_component(update.table, number, operands[0]),
                operands[1],
            )
        value = after(value, update.op, operands)
    return value


def after(value: jax.Array, op: UpdateOp, operands: tuple[jax.Array, ...]) -> jax.Array:
    """A value after one update."""
    match op:
        case UpdateOp.ASSIGN:
            return operands[0]
        case UpdateOp.ADD:
            return value + operands[0]
        case UpdateOp.SUB:
            return value - operands[0]
    indices, rows = reaching(operands[0]), operands[1]
    match op:
        case UpdateOp.SCATTER_ADD:
            return value.at[indices].add(rows)
        case UpdateOp.SCATTER_SUB:
            return value.at[indices].add(-rows)
        case UpdateOp.SCATTER_MUL:
            return value.at[indices].multiply(rows)
        case UpdateOp.SCATTER_DIV:
            if jnp.issubdtype(value.dtype, jnp.integer):
                return _divided(value, indices, rows)
            return value.at[indices].divide(rows)
        case UpdateOp.SCATTER_MIN:
            return value.at[indices].min(rows)
        case UpdateOp.SCATTER_MAX:
            return value.at[indices].max(rows)
        case UpdateOp.SCATTER_UPDATE:
            return value.at[_last(indices, value.shape[0])].set(rows, mode="drop")
    raise AssertionError(f"{op.name} has no local meaning")


def _divided(value: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Integers divided and cut off towards zero. Round k divides by the k-th row of
    every index: the product of the divisors of one row may not fit their dtype."""
    order = jnp.argsort(indices, stable=True)
    indices, rows = indices[order], rows[order]
    firsts = jnp.searchsorted(indices, indices, side="left")
    turns = jnp.arange(indices.shape[0], dtype=firsts.dtype) - firsts
    rounds = jnp.max(turns, initial=-1) + 1

    def one(turn: jax.Array, value: jax.Array) -> jax.Array:
        quotients = jax.lax.div(value.at[indices].get(mode="clip"), rows)
        mine = jnp.where(turns == turn, indices, value.shape[0])
        return value.at[mine].set(quotients, mode="drop")

    divided: jax.Array = jax.lax.fori_loop(0, rounds, one, value)
    return divided


def _last(indices: jax.Array, size: int) -> jax.Array:
    """The indices with all but the last of equal ones moved out of bounds: XLA leaves
    open which of several wins."""
    order = jnp.arange(indices.shape[0], dtype=jnp.int32)
    winner = jnp.full(size, -1, jnp.int32).at[indices].max(order)
    return jnp.where(winner[indices] == order, indices, size)
