"""New variables that are about to be there: validated, not yet made.

As all plans (`zstrat.ps._plans`), they are computed on any thread, and fail as a whole.
One of a key, shape and dtype that is there already is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from zstrat.wire import dtype_named

from ._cell import Cell
from ._initial import made

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from zstrat.wire import InitialEntry, VariableEntry

    from ._plans import HeldVariable


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


def create_plan(
    entries: Sequence[VariableEntry],
    arrays: Sequence[np.ndarray],
    variables: Mapping[int, HeldVariable],
    task: str,
    generation: int,
) -> CreatePlan:
    """
    Raises:
        AlreadyExistsError: A key is taken by a variable of another shape or dtype.
        InvalidArgumentError: The message is not one array per entry, keys repeat.
    """
    if len(entries) != len(arrays):
        raise InvalidArgumentError(
            f"{task}: {len(entries)} variables came with {len(arrays)} values"
        )
    _check_distinct(entries, task)
    new = [
        (entry, array)
        for entry, array in zip(entries, arrays, strict=True)
        if _is_new(entry, array.shape, array.dtype, variables, task)
    ]
    values = [array for _, array in new]
    work = sum(array.nbytes for array in values)
    return CreatePlan(generation, [entry for entry, _ in new], values, work, task)


def initialize_plan(
    entries: Sequence[InitialEntry],
    code: bytes,
    load_code: Callable[[bytes], object],
    variables: Mapping[int, HeldVariable],
    task: str,
    generation: int,
) -> InitializePlan:
    """`create_plan` for values that shipped code will make.

    Raises:
        AlreadyExistsError: A key is taken by a variable of another shape or dtype.
        InvalidArgumentError: Keys repeat.
        ProtocolError: No such dtype travels.
    """
    _check_distinct(entries, task)
    new = [
        entry
        for entry in entries
        if _is_new(entry, tuple(entry.shape), dtype_named(entry.dtype), variables, task)
    ]
    return InitializePlan(generation, new, code, load_code, task)


def _check_distinct(
    entries: Sequence[VariableEntry] | Sequence[InitialEntry], task: str
) -> None:
    if len({entry.key for entry in entries}) != len(entries):
        raise InvalidArgumentError(f"{task}: a key of new variables repeats")


def _is_new(
    entry: VariableEntry | InitialEntry,
    shape: tuple[int, ...],
    dtype: np.dtype,
    variables: Mapping[int, HeldVariable],
    task: str,
) -> bool:
    held = variables.get(entry.key)
    if held is None:
        return True
    cell = held.cell
    if (cell.shape, cell.dtype) == (shape, dtype):
        return False
    raise AlreadyExistsError(
        f"{task} holds key {entry.key} as {held.entry.name!r}, "
        f"{cell.dtype.name}{list(cell.shape)}; {entry.name!r}, "
        f"{dtype.name}{list(shape)}, cannot be created under it"
    )
