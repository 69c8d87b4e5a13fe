"""The results of a step: arrays for the caller, and updates of variables.

Updates of rows are split over the components of a table (`outgoing`). Gradients and
sums of equal indices are added up here: each row is sent once, and the optimizer takes
one step per row. Other updates keep their duplicates, in order; of rows that replace
others only the last one is sent.

A step of an optimizer counts for all components, also for those without a row in it:
their count of steps grows, so that training does not depend on the partitioning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.rows import sums
from zstrat.variables import present
from zstrat.wire import UpdateOp

from .trace._plan import UpdateSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import jax

    from zstrat.variables import GradientCall, VariableSpec

    from .lookup._lookups import Part
    from .trace._plan import PlannedUpdate
    from .trace._structure import ResultLayout


class StepUpdate(NamedTuple):
    """One update that a step makes. ``optimizer`` is 0 for none; ``arrays`` are the
    operands of the `UpdateOp`, in the dtype and shapes of the plan."""

    spec: VariableSpec
    op: UpdateOp
    optimizer: int
    arrays: tuple[np.ndarray, ...]
    call: GradientCall | None = None
    """The call, for gradients of a tree of variables of this process."""


class StepResult(NamedTuple):
    """The result of a step; ``leaves`` are its arrays, ready and read-only."""

    leaves: list[np.ndarray]
    layout: ResultLayout
    updates: list[StepUpdate]


class Computed(NamedTuple):
    """A step whose program runs: results and operands, which may not be ready;
    ``updates`` waits for the operands and makes the updates."""

    results: list[jax.Array]
    operands: Sequence[Sequence[jax.Array]]
    updates: Callable[[], list[StepUpdate]]

    def to_host(self) -> None:
        """Starts all transfers from an accelerator."""
        all_arrays = [
            array for arrays in (self.results, *self.operands) for array in arrays
        ]
        # Not on a CPU, where a read is faster than the call. All outputs of one program
        # are on devices of one kind.
        if len(all_arrays) < 2 or next(iter(all_arrays[0].devices())).platform == "cpu":
            return
        for array in all_arrays:
            array.copy_to_host_async()


SUMMED: Final = frozenset(
    {UpdateOp.OPTIMIZE_ROWS, UpdateOp.SCATTER_ADD, UpdateOp.SCATTER_SUB}
)
"""Updates that add up the rows of equal indices."""


def outgoing(
    update: PlannedUpdate | UpdateSet, operands: Iterable[jax.Array]
) -> list[StepUpdate]:
    """Makes the updates for one that the step sends; waits for its operands.

    Raises:
        IndexError: An index is outside of the table; names it and the user's line.
    """
    arrays = tuple([np.asarray(array) for array in operands])
    if isinstance(update, UpdateSet):
        op, pair = UpdateOp.OPTIMIZE_SET, (update.keys, *arrays)
        return [StepUpdate(update.spec, op, update.optimizer, pair)]
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
    """Makes the update with operands that the updates of an optimizer share, once for
    each parameter server."""
    firsts = {spec.ps: spec for spec in reversed(update.specs)}
    return [
        StepUpdate(spec, update.op, update.optimizer, arrays)
        for spec in firsts.values()
    ]


def parted(
    update: PlannedUpdate, rows: np.ndarray, parts: Iterable[Part]
) -> list[StepUpdate]:
    """Makes the updates of components from rows that are summed and split already."""
    updates = [
        StepUpdate(spec, update.op, update.optimizer, (indices, rows[where]))
        for spec, where, indices in parts
    ]
    return _counted(update, updates, rows)


def split(
    update: PlannedUpdate, indices: np.ndarray, rows: np.ndarray
) -> list[StepUpdate]:
    """Splits indices ``[n]`` of a table, and rows, over the components.

    Raises:
        IndexError: An index is outside of the table; names it and the user's line.
    """
    table = update.table
    assert table is not None
    try:
        table.require_inside(indices)
    except IndexError as error:
        raise IndexError(f"{update.where}: {error}") from None
    indices, rows = present(indices, rows)
    index_runs = table.runs(indices)
    if update.op in SUMMED:
        ordered, rows = index_runs.unique, sums(index_runs, rows)
    elif update.op is UpdateOp.SCATTER_UPDATE:
        last = index_runs.order[index_runs.starts + index_runs.counts - 1]
        ordered, rows = index_runs.unique, rows[last]
    else:
        ordered, rows = (
            indices[index_runs.order].astype(np.int64),
            rows[index_runs.order],
        )
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
    update: PlannedUpdate, updates: list[StepUpdate], rows: np.ndarray
) -> list[StepUpdate]:
    """Adds updates without rows for the other components of an optimizer's step."""
    specs = update.specs
    if update.op is not UpdateOp.OPTIMIZE_ROWS or len(updates) == len(specs):
        return updates
    there = {each.spec.key: each for each in updates}
    nothing = np.empty(0, np.int64), rows[:0]
    return [
        there.get(spec.key) or StepUpdate(spec, update.op, update.optimizer, nothing)
        for spec in specs
    ]
