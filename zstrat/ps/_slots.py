"""What an optimizer keeps beside a variable, and what one step of it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from ._cell import Cell

LAYOUTS: Final = 4096
"""Distinct (shape, dtype, slots) that a session may have compiled programs for."""


@dataclass(slots=True)
class Slots:
    """What an optimizer keeps for one variable: flat leaves, on the device of the ps.

    ``layout`` numbers (shape and dtype of the variable; structure, shapes and dtypes of
    the leaves): two variables of one layout share a program.
    """

    leaves: tuple[object, ...]
    layout: int
    nbytes: int


class Step(NamedTuple):
    """One gradient for one variable. ``slots`` is the variable's, by optimizer."""

    cell: Cell
    slots: dict[int, Slots]
    gradient: np.ndarray


def is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize > (8 if dtype.kind == "c" else 4)
