"""Updates of variables that live on this process's devices: part of the program.

A parameter server applies an update after the step. The value of such a variable is
here, so the step computes the next one itself: values and slots go in, and what becomes
of them comes out. What was updated can be read in the same step, after an optimizer,
too.

Law of the file: an update of rows moves these rows and what the optimizer keeps beside
them; what is shared (a count) moves with each update.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from zstrat.variables import (
    ABSENT,
    DeviceHome,
    optimized,
    require_by_rows,
    row_leaves,
)
from zstrat.wire._messages import UpdateOp

from ._copies import is_apart
from ._narrow import marked
from ._writes import after, reaching, rows_of_component

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.variables import Optimizer, Table, Variable

    from ._feeds import Feed
    from ._writes import Recorded

SlotsKey = tuple[int, int]
"""The key of a variable and the number of an optimizer."""

# jax's stubs leave it untyped.
_Abstract: Final[Any] = jax.ShapeDtypeStruct


def is_here(variable: Variable) -> bool:
    """Whether the step computes the next value of this variable itself."""
    return isinstance(variable.home, DeviceHome)


class Moves:
    """What one trace of a step makes of such variables.

    ``values`` are the last ones of those that were updated; ``slots`` those that
    optimizers were given, in the order of their first use; ``notes`` what was done, in
    the order of the body.
    """

    def __init__(self, feed: Feed) -> None:
        self.values: dict[int, tuple[Variable, jax.Array]] = {}
        self.slots: dict[SlotsKey, tuple[Variable, Optimizer, Any]] = {}
        self.notes: list[tuple[tuple[Any, ...], UpdateOp]] = []
        self._feed = feed

    def note(self, update: Recorded, current: Callable[[Variable], jax.Array]) -> None:
        """Makes the next values. ``current`` tells those of now; where that are copies
        of several replicas, ``[count, ...]``, the update is made on each."""
        if len(update.operands) > 1:
            index, rows = update.operands
            update = replace(update, operands=(marked(reaching(index)), rows))
        for number, variable in enumerate(update.variables):
            if update.op is UpdateOp.ASSIGN and not is_apart(variable):
                value = update.operands[0]  # whatever it was before
            elif update.optimizer is None:
                value = _plain(update, number, variable, current(variable))
            else:
                value = self._optimized(update, number, current(variable))
            self.values[variable.spec.key] = (variable, value)
        specs = tuple([variable.spec for variable in update.variables])
        self.notes.append((specs, update.op))

    def put(self, variable: Variable, copies: jax.Array) -> None:
        """The copies of several replicas, each of which has made its own."""
        self.values[variable.spec.key] = (variable, copies)
        self.notes.append(((variable.spec,), UpdateOp.ASSIGN))

    def _optimized(self, update: Recorded, number: int, value: jax.Array) -> jax.Array:
        variable, optimizer = update.variables[number], update.optimizer
        assert optimizer is not None
        key = variable.spec.key, optimizer.id
        if key not in self.slots:
            slots = self._feed.slots(variable, optimizer)
        else:
            slots = self.slots[key][2]

        def one(value: jax.Array) -> tuple[jax.Array, Any]:
            if update.op is UpdateOp.OPTIMIZE:
                rule = optimizer.transformation
                return optimized(rule, update.operands[0], slots, value)
            indices, rows = update.operands
            assert update.table is not None
            indices = rows_of_component(update.table, number, indices)
            return _rows_moved(optimizer, value, slots, indices, rows)

        if value.ndim > len(variable.shape):
            # The optimizer keeps one state for all copies, as they get one gradient.
            value, several = jax.vmap(one)(value)
            kept = jax.tree.map(lambda leaf: leaf[0], several)
        else:
            value, kept = one(value)
        _require_same_structure(variable, slots, kept)
        self.slots[key] = variable, optimizer, kept
        return value


def rows_of(
    table: Table, ids: jax.Array, read: Callable[[Variable], jax.Array]
) -> jax.Array:
    """The rows of a table of such variables, ``ids.shape + row``: zeros for `ABSENT`,
    and NaN for a row that is not there, as the step cannot fail for it."""
    flat = ids.reshape(-1)
    rows = None
    for number, component in enumerate(table.components):
        here = rows_of_component(table, number, flat)
        found = read(component).at[here].get(mode="fill")
        mine = (here < component.shape[0]).reshape(-1, *[1] * (found.ndim - 1))
        rows = found if rows is None else jnp.where(mine, found, rows)
    assert rows is not None
    left_out = (flat == ABSENT).reshape(-1, *[1] * (rows.ndim - 1))
    rows = jnp.where(left_out, jnp.zeros_like(rows), rows)
    shaped: jax.Array = rows.reshape(*ids.shape, *rows.shape[1:])
    return shaped


def _require_same_structure(variable: Variable, before: Any, after: Any) -> None:
    had: Any = jax.tree.structure(before)
    made: Any = jax.tree.structure(after)
    if had != made:
        raise TypeError(
            f"the optimizer of variable {variable.name!r} keeps {had}, and its update "
            f"returns {made}: a transformation returns a state of the structure that "
            "it was given"
        )


def slots_like(variable: Variable, optimizer: Optimizer) -> Any:
    """Shapes and dtypes of what the optimizer keeps beside the variable."""
    dtype: Any = jax.dtypes.canonicalize_dtype(variable.dtype)
    return jax.eval_shape(
        optimizer.transformation.init, _Abstract(variable.shape, dtype)
    )


def moved(op: UpdateOp, operands: tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
    """A whole variable's value after one update without an optimizer."""
    if op is UpdateOp.ASSIGN:
        return operands[0]
    if len(operands) > 1:  # negative indices do not count from the end
        height, indices = value.shape[0], reaching(operands[0])
        operands = (jnp.where(indices < 0, height, indices), *operands[1:])
    return after(value, op, operands)


def _plain(
    update: Recorded, number: int, variable: Variable, value: jax.Array
) -> jax.Array:
    operands = update.operands
    if update.table is not None and len(update.variables) > 1:
        operands = rows_of_component(update.table, number, operands[0]), operands[1]
    if value.ndim == len(variable.shape):
        return moved(update.op, operands, value)
    each: jax.Array = jax.vmap(lambda row: moved(update.op, operands, row))(value)
    return each


def _rows_moved(
    optimizer: Optimizer,
    value: jax.Array,
    slots: Any,
    indices: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, Any]:
    """Value and slots after a step on these rows; those behind the last one are left
    out. Gradients of the same row are summed first."""
    transformation = optimizer.transformation
    require_by_rows(optimizer)
    height, count = value.shape[0], indices.shape[0]
    follows = row_leaves(transformation, value.shape, value.dtype)
    unique, inverse = jnp.unique(
        indices, size=count, fill_value=height, return_inverse=True
    )
    summed = jax.ops.segment_sum(rows, inverse.reshape(-1), num_segments=count)
    at = functools.partial(_at, unique)
    here = jax.tree.map(lambda leaf, f: at(leaf) if f else leaf, slots, follows)
    moved, kept = optimized(transformation, summed, here, at(value))
    slots = jax.tree.map(
        lambda leaf, new, f: leaf.at[unique].set(new, mode="drop") if f else new,
        slots,
        kept,
        follows,
    )
    return value.at[unique].set(moved, mode="drop"), slots


def _at(indices: jax.Array, array: jax.Array) -> jax.Array:
    rows: jax.Array = array.at[indices].get(mode="clip")
    return rows
