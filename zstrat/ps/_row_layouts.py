"""What the rows of a variable and of its slots look like, and the update of some rows.

All that XLA is told of a kind (`zstrat.ps._row_kinds`) is made here: the shapes of what
an update takes and gives, and the function that is compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.extend.core
import numpy as np

from ._layouts import Shape, SlotLayout, operands_of, shape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.optimizers import LeafRule


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What a row of a variable and of its slots looks like, and the other slots.

    ``leaves`` are in the order of the state: one row of those that have ``rows``, all
    of the others.
    """

    value: Shape
    rule: LeafRule
    leaves: tuple[Shape, ...]
    rows: tuple[bool, ...]
    gradient: Shape

    @property
    def gathered(self) -> list[Shape]:
        """A row of all that is gathered: value, slots with rows, gradient."""
        return [self.value, *self.split(self.leaves)[0], self.gradient]

    @property
    def shared(self) -> list[Shape]:
        return [
            leaf for leaf, has in zip(self.leaves, self.rows, strict=True) if not has
        ]

    @property
    def is_wide(self) -> bool:
        """Whether it is traced and run with 64 bits."""
        return self.rule.tree.wide

    def merge(self, rows: Iterable[Any], shared: Iterable[Any]) -> list[Any]:
        """The leaves in the order of the state."""
        rows, shared = iter(rows), iter(shared)
        return [next(rows if has else shared) for has in self.rows]

    def split(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Inverse of `merge`."""
        pairs = list(zip(leaves, self.rows, strict=True))
        return [x for x, has in pairs if has], [x for x, has in pairs if not has]


def update_of(layout: RowLayout) -> Any:
    """``(value, rows, shared, operands, gradient, scratch) -> ([value, *rows],
    shared)``."""

    def update(
        value: Any, rows: Any, shared: Any, operands: Any, gradient: Any, scratch: Any
    ) -> tuple[Any, Any]:
        del scratch  # nothing but memory
        new, leaves = layout.rule.step(
            value, layout.merge(rows, shared), gradient, operands
        )
        rows, shared = layout.split(leaves)
        return [new, *rows], shared

    return update


def flat(update: Any, layout: RowLayout, size: int) -> Any:
    """The update of vectors of elements: in rows of 16 floats XLA computes row by row,
    in one long row half as long."""

    def flattened(
        value: Any, rows: Any, shared: Any, operands: Any, gradient: Any, scratch: Any
    ) -> Any:
        vectors = [value, *rows, gradient]
        shapes = [(size, *row.shape) for row in layout.gathered]
        value, *rows, gradient = [
            vector.reshape(dims) for vector, dims in zip(vectors, shapes, strict=True)
        ]
        moved, others = update(value, rows, shared, operands, gradient, scratch)
        return [each.reshape(-1) for each in moved], others

    return flattened


def vector(rows: Shape) -> Shape:
    """The same elements in one row."""
    return shape((math.prod(rows.shape),), rows.dtype)


def arguments_of(layout: RowLayout, size: int) -> tuple[Any, ...]:
    """What `update_of` takes, for ``size`` rows."""
    value, *rows, gradient = (rows_of(size, row) for row in layout.gathered)
    operands = list(operands_of(layout.rule))
    return value, rows, layout.shared, operands, gradient, [value, *rows]


def row_layout(layout: SlotLayout, gradient: np.dtype) -> RowLayout:
    """
    Raises:
        TypeError: Rows are not moved one by one.
    """
    if not layout.by_rows:
        raise TypeError(layout.rule.row_dependence)
    row = layout.value.shape[1:]
    return RowLayout(
        shape(row, layout.value.dtype),
        layout.rule,
        tuple(
            shape(leaf.shape[1:] if about.rows else leaf.shape, leaf.dtype)
            for leaf, about in zip(layout.leaves, layout.about, strict=True)
        ),
        tuple(about.rows for about in layout.about),
        shape(row, gradient),
    )


def is_apart(jaxpr: jax.extend.core.Jaxpr, layout: RowLayout) -> bool:
    """Whether no slot without rows is computed from any row; operands are not. Errs on
    the safe side: what an inner function returns is taken to depend on all that it is
    given."""
    shared = len(layout.shared) + len(layout.rule.uses)
    first = len(layout.gathered) - 1  # value and slots come before, gradient behind
    tainted = {*jaxpr.invars[:first], *jaxpr.invars[first + shared :]}
    for equation in jaxpr.eqns:
        variables = [v for v in equation.invars if isinstance(v, jax.extend.core.Var)]
        if not tainted.isdisjoint(variables):
            tainted.update(equation.outvars)
    outputs = jaxpr.outvars[len(jaxpr.outvars) - len(layout.shared) :]
    return not any(isinstance(v, jax.extend.core.Var) and v in tainted for v in outputs)


def rows_of(size: int, row: Shape) -> Shape:
    """So many of these rows."""
    return shape((size, *row.shape), row.dtype)


def nbytes_of(row: Shape) -> int:
    return int(math.prod(row.shape) * np.dtype(row.dtype).itemsize)
