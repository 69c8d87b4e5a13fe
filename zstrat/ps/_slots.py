"""What an optimizer keeps beside a variable, and what one step of it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ._rows import distinct

if TYPE_CHECKING:
    import numpy as np

    from ._cell import Cell

LAYOUTS: Final = 4096
"""Distinct (shape, dtype, slots) that a session may have compiled programs for."""


@dataclass(frozen=True, slots=True)
class Leaf:
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
    leaves: tuple[Leaf, ...]
    layout: int

    @property
    def nbytes(self) -> int:
        return sum(cell.nbytes for cell in self.cells)


class Step(NamedTuple):
    """One gradient for one variable. ``slots`` is the variable's, by optimizer."""

    cell: Cell
    slots: dict[int, Slots]
    gradient: np.ndarray


class RowStep(NamedTuple):
    """Gradients ``[n, ...]`` for the rows ``indices`` ([n] of intp) of one variable:
    sorted and distinct, unless ``mixed``."""

    cell: Cell
    slots: dict[int, Slots]
    indices: np.ndarray
    gradient: np.ndarray
    mixed: bool = False

    def distinct(self) -> RowStep:
        """The same sorted, the gradients of one row summed."""
        if not self.mixed:
            return self
        indices, gradient = distinct(self.indices, self.gradient)
        return self._replace(indices=indices, gradient=gradient, mixed=False)


def is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize > (8 if dtype.kind == "c" else 4)
