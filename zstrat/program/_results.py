"""What comes out of a step: arrays for the caller and arrays for the variables.

Of updates of rows each component of a table gets its own (`outgoing`). Gradients and
sums are added up here, one row per index: they travel once, and the optimizer takes one
step for each row. What is not additive keeps its duplicates, in their order, and of
rows that replace only the last one is sent.

A step of an optimizer is one for all components, those without a row in it included:
their count of steps goes on, so that training does not depend on the partitioning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.rows import runs, sums
from zstrat.variables import present
from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import jax

    from zstrat.variables import GradientCall, VariableSpec

    from .lookup._lookups import Part
    from .trace._plan import PlannedUpdate
    from .trace._structure import ResultLayout


class StepUpdate(NamedTuple):
    """What a step wants done to a variable. ``optimizer`` is 0 for none; ``arrays`` are
    the operands that `UpdateOp` names, in the dtype and shapes of the plan."""

    spec: VariableSpec
    op: UpdateOp
    optimizer: int
    arrays: tuple[np.ndarray, ...]
    call: GradientCall | None = None
    """Of gradients of a tree of variables of this process; ``arrays`` are its own."""


class StepResult(NamedTuple):
    """``leaves`` are the arrays of the result, as ``layout`` says: ready, read-only."""

    leaves: list[np.ndarray]
    layout: ResultLayout
    updates: list[StepUpdate]


class Computed(NamedTuple):
    """A step that computes: its results, and all other arrays that it makes.
    ``updates`` waits for these and makes of them what the step wants done."""

    results: list[jax.Array]
    operands: Sequence[Sequence[jax.Array]]
    updates: Callable[[], list[StepUpdate]]

    def to_host(self) -> None:
        """Starts all transfers from an accelerator before the first is waited for."""
        found = [array for arrays in (self.results, *self.operands) for array in arrays]
        # To ask an array of the CPU for it takes longer than to look at its memory, and
        # one program leaves all that it computes on devices of one kind.
        if len(found) < 2 or next(iter(found[0].devices())).platform == "cpu":
            return
        for array in found:
            array.copy_to_host_async()


SUMMED: Final = frozenset(
    {UpdateOp.OPTIMIZE_ROWS, UpdateOp.SCATTER_ADD, UpdateOp.SCATTER_SUB}
)
"""Updates in which the rows of one index are added."""


def outgoing(update: PlannedUpdate, operands: Iterable[jax.Array]) -> list[StepUpdate]:
    """What a step wants done for one update of its plan; waits for the operands.

    Raises:
        IndexError: The table has no such row. Names it and the user's line.
    """
    arrays = tuple([np.asarray(array) for array in operands])
    if update.op is UpdateOp.OPERANDS:
        return shared(update, arrays)
    if update.call is not None:
        made = update.spec, update.op, update.optimizer, arrays, update.call
        return [StepUpdate(*made)]
    if update.table is None:
        return [StepUpdate(update.spec, update.op, update.optimizer, arrays)]
    indices, rows = arrays
    return split(update, indices, rows)


def shared(update: PlannedUpdate, arrays: tuple[np.ndarray, ...]) -> list[StepUpdate]:
    """What the updates of an optimizer share: once for each parameter server."""
    firsts = {spec.ps: spec for spec in reversed(update.specs)}
    return [
        StepUpdate(spec, update.op, update.optimizer, arrays)
        for spec in firsts.values()
    ]


def parted(
    update: PlannedUpdate, rows: np.ndarray, parts: Iterable[Part]
) -> list[StepUpdate]:
    """The updates of components whose share of summed rows is known."""
    found = [
        StepUpdate(spec, update.op, update.optimizer, (indices, rows[where]))
        for spec, where, indices in parts
    ]
    return _counted(update, found, rows)


def split(
    update: PlannedUpdate, indices: np.ndarray, rows: np.ndarray
) -> list[StepUpdate]:
    """The updates of the components, from indices ``[n]`` of the table and rows.

    Raises:
        IndexError: The table has no such row. Names it and the user's line.
    """
    table = update.table
    assert table is not None
    try:
        table.require_inside(indices)
    except IndexError as error:
        raise IndexError(f"{update.where}: {error}") from None
    indices, rows = present(indices, rows)
    found = runs(indices)
    if update.op in SUMMED:
        ordered, rows = found.unique, sums(found, rows)
    elif update.op is UpdateOp.SCATTER_UPDATE:
        last = found.order[found.starts + found.counts - 1]
        ordered, rows = found.unique, rows[last]
    else:
        ordered, rows = indices[found.order].astype(np.int64), rows[found.order]
    parts = [
        StepUpdate(
            update.specs[piece.component],
            update.op,
            update.optimizer,
            (piece.local, rows[piece.positions]),
        )
        for piece in table.pieces(ordered)
    ]
    return _counted(update, parts, rows)


def _counted(
    update: PlannedUpdate, found: list[StepUpdate], rows: np.ndarray
) -> list[StepUpdate]:
    """Adds updates of no rows for the components that an optimizer's step lacks."""
    specs = update.specs
    if update.op is not UpdateOp.OPTIMIZE_ROWS or len(found) == len(specs):
        return found
    there = {each.spec.key: each for each in found}
    nothing = np.empty(0, np.int64), rows[:0]
    return [
        there.get(spec.key) or StepUpdate(spec, update.op, update.optimizer, nothing)
        for spec in specs
    ]
