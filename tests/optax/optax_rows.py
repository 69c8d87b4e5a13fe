"""The reference for gradients of some rows of a table: plain optax on a smaller tree.

At each step the table is its rows that have a gradient, each once, duplicates summed;
so is all that the optimizer keeps for rows. What it keeps beside rows (counts,
hyperparameters) is there once, and advances. Rows without a gradient rest, and what is
kept for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_model as model
from optax_trajectory import Moment, Trajectory, plain


def trained_by_rows(
    transformation: optax.GradientTransformation, dtype: str, start: Any
) -> Trajectory:
    values = jax.tree.map(jnp.asarray, start)
    state = transformation.init(values)
    is_of_rows = _leaves_of_rows(transformation, start)
    update = jax.jit(transformation.update)
    moments = []
    for step in range(model.STEPS):
        gradients = model.rows(step, dtype)
        given = gradients["embed"]["table"]
        indices = np.unique(given.indices)
        updates, less = update(
            _with_table(gradients, _summed(given, indices)),
            _gathered(state, is_of_rows, indices),
            _with_table(values, values["embed"]["table"][indices]),
        )
        table = values["embed"]["table"]
        moved = optax.apply_updates(_with_table(values, table[indices]), updates)
        values = _with_table(moved, table.at[indices].set(moved["embed"]["table"]))
        state = _scattered(state, less, is_of_rows, indices)
        moments.append(Moment(gradients, {}, jax.tree.map(np.asarray, values)))
    return Trajectory(start, moments, jax.tree.map(plain, state))


def _with_table(tree: Any, table: Any) -> Any:
    return {**tree, "embed": {"table": table}}


def _summed(given: model.Rows, indices: Any) -> Any:
    """One row for each index, in wide numbers as `np.add.at` adds."""
    dtype = given.values.dtype
    sums = np.zeros((len(indices), given.values.shape[1]), np.float64)
    np.add.at(sums, np.searchsorted(indices, given.indices), given.values)
    return jnp.asarray(sums.astype(dtype))


def _leaves_of_rows(transformation: Any, start: Any) -> list[bool]:
    """Which leaves of the state have a row for each row of the table: those that grow
    with it."""
    table = start["embed"]["table"]
    taller = np.zeros((len(table) + 1, table.shape[1]), table.dtype)
    shapes = [
        [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(transformation.init, t))]
        for t in (start, _with_table(start, taller))
    ]
    return [one != other for one, other in zip(*shapes, strict=True)]


def _gathered(state: Any, is_of_rows: list[bool], indices: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    pairs = zip(leaves, is_of_rows, strict=True)
    return structure.unflatten(
        [leaf[indices] if of_rows else leaf for leaf, of_rows in pairs]
    )


def _scattered(state: Any, less: Any, is_of_rows: list[bool], indices: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    new = jax.tree.leaves(less)
    return structure.unflatten(
        [
            leaf.at[indices].set(part) if of_rows else part
            for leaf, part, of_rows in zip(leaves, new, is_of_rows, strict=True)
        ]
    )
