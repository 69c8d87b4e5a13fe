"""What an optimizer keeps beside a variable, and what one step of it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ._rows import distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.optimizers import LeafRule

    from ._cell import Cell
    from ._writes import Write

LAYOUTS: Final = 4096
"""Distinct (shape, dtype, slots) that a session may have compiled programs for."""


@dataclass(frozen=True, slots=True)
class SlotArray:
    """One array of an optimizer's state beside a variable.

    ``name`` is its path in that state (".mu", "[0].count"). ``rows``: its first axis is
    the variable's own, so that a row of the variable has a row of it.
    """

    name: str
    rows: bool


@dataclass(slots=True)
class Slots:
    """What an optimizer keeps for one variable: a cell for each leaf of its state.

    Whole updates leave the cells on the device, updates of rows bring those that have
    rows back to the host. ``layout`` numbers (shape and dtype of the variable;
    structure, shapes and dtypes of the leaves): two variables of one layout share a
    program.
    """

    cells: tuple[Cell, ...]
    leaves: tuple[SlotArray, ...]
    layout: int
    with_rows: tuple[Cell, ...] = field(init=False)
    shared: tuple[Cell, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.become(self.cells, self.layout)

    def become(self, cells: tuple[Cell, ...], layout: int) -> None:
        """Takes other cells, after an update that changes dtypes."""
        pairs = list(zip(cells, self.leaves, strict=True))
        self.cells, self.layout = cells, layout
        self.with_rows = tuple(cell for cell, leaf in pairs if leaf.rows)
        self.shared = tuple(cell for cell, leaf in pairs if not leaf.rows)

    @property
    def nbytes(self) -> int:
        return sum(cell.nbytes for cell in self.cells)


class SlotStep(NamedTuple):
    """One gradient for one variable. ``slots`` is the variable's, by optimizer.
    ``rule`` stands for all that are moved alike (`zstrat.ps._bindings`), ``operands``
    are what it takes besides.

    ``late``: an earlier update of the same push changes the variable, so that its slots
    are made, and get their dtypes, when its turn comes.
    """

    cell: Cell
    slots: dict[int, Slots]
    rule: LeafRule
    gradient: np.ndarray
    operands: tuple[np.ndarray, ...] = ()
    late: bool = False


class RowStep(NamedTuple):
    """Gradients ``[n, ...]`` for the rows ``indices`` ([n] of intp) of one variable:
    sorted and distinct, unless ``mixed``."""

    cell: Cell
    slots: dict[int, Slots]
    rule: LeafRule
    indices: np.ndarray
    gradient: np.ndarray
    operands: tuple[np.ndarray, ...] = ()
    mixed: bool = False
    late: bool = False
    """As of `SlotStep`."""

    def distinct(self) -> RowStep:
        """The same sorted, the gradients of one row summed."""
        if not self.mixed:
            return self
        indices, gradient = distinct(self.indices, self.gradient)
        return self._replace(indices=indices, gradient=gradient, mixed=False)


@dataclass(slots=True)
class Ahead:
    """What the updates of one push, up to some place in it, leave in slots."""

    layouts: dict[tuple[int, int], int] = field(default_factory=dict)
    """By optimizer and `id` of the variable's cell."""
    rooms: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)
    """Memory for slots that will be made by rows."""
    writes: dict[int, list[Write]] = field(default_factory=dict)
    """To a slot, by the `id` of its cell."""


def lose(
    optimizer: int, steps: Sequence[SlotStep | RowStep], error: BaseException
) -> None:
    """Values and slots that were being written when something failed."""
    for step in steps:
        step.cell.lose(str(error))
        step.slots.pop(optimizer, None)


def is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize > (8 if dtype.kind == "c" else 4)
