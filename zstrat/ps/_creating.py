"""New variables that are about to be there: validated, not yet made.

As all plans (`zstrat.ps._plans`), they are computed on any thread, and fail as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zstrat.errors import ResourceExhaustedError

from ._cell import Cell
from ._initial import made

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from zstrat.wire import InitialEntry, VariableEntry


@dataclass(frozen=True, slots=True)
class CreatePlan:
    """Validated new variables. ``work`` is their bytes."""

    generation: int
    entries: Sequence[VariableEntry]
    arrays: Sequence[np.ndarray]
    work: int
    task: str
    cells: list[Cell] = field(default_factory=list)

    def compute(self) -> None:
        """Raises ResourceExhaustedError if there is no memory."""
        for entry, array in zip(self.entries, self.arrays, strict=True):
            try:
                self.cells.append(Cell(array))
            except MemoryError:
                raise ResourceExhaustedError(
                    f"{self.task}: variable {entry.name!r}: there is no memory for its "
                    f"{array.nbytes} bytes"
                ) from None


@dataclass(frozen=True, slots=True)
class InitializePlan:
    """Validated new variables, whose values a shipped initializer will make."""

    generation: int
    entries: Sequence[InitialEntry]
    code: bytes
    load_code: Callable[[bytes], object]
    task: str
    cells: list[Cell] = field(default_factory=list)

    def compute(self) -> None:
        """Raises InvalidArgumentError for values that are not what was announced, and
        ResourceExhaustedError if there is no memory."""
        initialize = self.load_code(self.code) if self.entries else None
        for entry in self.entries:
            try:
                self.cells.append(made(initialize, entry))
            except MemoryError:
                raise ResourceExhaustedError(
                    f"{self.task}: variable {entry.name!r}: there is no memory to make "
                    f"{entry.dtype}{list(entry.shape)}"
                ) from None
