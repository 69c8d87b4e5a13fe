"""Plans that create variables and tables: they validate the request, make the initial
values, and check the memory.

As all plans (`_plans`), these can be computed on any thread, and fail as a whole. A
variable that exists already with the same key, name, shape and dtype stays as it is.

A shipped initializer may make the initial value on the server. A table may be as large
as this machine's memory, so the array that the initializer returns becomes the value
without a copy, if nobody else can refer to it. The kernel estimates how much memory is
left.

The initializer of a new table of any id is tried on one row before the table exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from zstrat.initializers import Initializer
from zstrat.ps.engine._slots import HeldVariable
from zstrat.ps.tables._growing_cell import GrowingCell
from zstrat.ps.tables._id_table import IdTable
from zstrat.wire import TABLE_ROW_BYTES, VariableEntry, dtype_named

from ._cell import Cell
from ._plan import StorePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.wire import InitialEntry, TableEntry

    from ._variables import HeldVariables


SMALL: Final = 2**26
"""The largest size in bytes of values that are copied, so that they are aligned, and in
huge pages; nearly all pages of larger values are huge anyway."""


def made(initialize: object, entry: InitialEntry) -> Cell:
    """Returns a cell with the value of a new variable, which the shipped initializer
    makes.

    Raises:
        InvalidArgumentError: The initializer is not callable, raises, or returns
            another shape or dtype.
    """
    who = f"the initializer of variable {entry.name!r}"
    dtype, shape = dtype_named(entry.dtype), tuple(entry.shape)
    if not callable(initialize):
        raise InvalidArgumentError(f"{who} is {initialize!r:.80}: not a callable")
    try:
        value = initialize(
            tuple(entry.whole),
            dtype,
            partition_shape=shape,
            partition_offset=tuple(entry.offset),
        )
    except MemoryError:  # is not its fault
        raise
    except Exception as error:  # goes to the caller, with what was being made
        raise InvalidArgumentError(
            f"{who} failed for rows of {dtype.name}{list(shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, np.ndarray):
        value = np.asarray(value)  # initializers of jax return its arrays
    if value.dtype != dtype or value.shape != shape:
        raise InvalidArgumentError(
            f"{who} was asked for {dtype.name}{list(shape)} and returned "
            f"{value.dtype.name}{list(value.shape)}"
        )
    # Two: the name here, and the argument of the question.
    if value.nbytes > SMALL and _is_ours(value) and sys.getrefcount(value) <= 2:
        return Cell.around(value)
    return Cell(value)


def _is_ours(value: np.ndarray) -> bool:
    """Returns whether an array owns its memory, and is writable, in C order and in
    native byte order, as the array of a cell has to be."""
    flags = value.flags
    return (
        type(value) is np.ndarray
        and flags.owndata
        and flags.writeable
        and flags.c_contiguous
        and value.dtype.isnative
    )


@dataclass(frozen=True, slots=True)
class CreatePlan(StorePlan):
    """The plan to create validated variables with given values. ``work`` is the bytes
    of the values."""

    generation: int
    entries: Sequence[VariableEntry]
    arrays: Sequence[np.ndarray]
    work: int
    task: str
    cells: list[Cell] = field(default_factory=list)

    def compute(self) -> None:
        """Copies the values into cells.

        Raises:
            ResourceExhaustedError: Memory is exhausted.
        """
        for entry, array in zip(self.entries, self.arrays, strict=True):
            try:
                self.cells.append(Cell(array))
            except MemoryError:
                raise ResourceExhaustedError(
                    f"{self.task}: variable {entry.name!r}: not enough memory for its "
                    f"{array.nbytes} bytes"
                ) from None


@dataclass(frozen=True, slots=True)
class InitializePlan(StorePlan):
    """The plan to create validated variables whose values a shipped initializer
    makes."""

    generation: int
    entries: Sequence[InitialEntry]
    code: bytes
    load_code: Callable[[bytes], object]
    task: str
    cells: list[Cell] = field(default_factory=list)

    def compute(self) -> None:
        """Makes the values with the shipped initializer.

        Raises:
            InvalidArgumentError: The initializer fails, or makes a value of another
                shape or dtype than announced.
            ResourceExhaustedError: Memory is exhausted.
        """
        # Once for all entries, and not at all if they are there: loading runs shipped
        # code.
        initialize = self.load_code(self.code) if self.entries else None
        for entry in self.entries:
            try:
                self.cells.append(made(initialize, entry))
            except MemoryError:
                raise ResourceExhaustedError(
                    f"{self.task}: variable {entry.name!r}: not enough memory to make "
                    f"{entry.dtype}{list(entry.shape)}"
                ) from None


def create_plan(
    entries: Sequence[VariableEntry],
    arrays: Sequence[np.ndarray],
    variables: HeldVariables,
) -> CreatePlan:
    """Returns the plan to create variables with these values; existing variables are
    left out.

    Raises:
        AlreadyExistsError: A variable of another name, shape or dtype has one of the
            keys.
        InvalidArgumentError: There is not one array per entry, or keys repeat.
    """
    task = variables.task
    if len(entries) != len(arrays):
        raise InvalidArgumentError(
            f"{task}: {len(entries)} variables came with {len(arrays)} values"
        )
    _check_distinct(entries, task)
    new = [
        (entry, array)
        for entry, array in zip(entries, arrays, strict=True)
        if _is_new(entry, array.shape, array.dtype, variables)
    ]
    values = [array for _, array in new]
    work = sum(array.nbytes for array in values)
    generation, entries = variables.generation, [entry for entry, _ in new]
    return CreatePlan(generation, entries, values, work, task)


def initialize_plan(
    entries: Sequence[InitialEntry],
    code: bytes,
    load_code: Callable[[bytes], object],
    variables: HeldVariables,
) -> InitializePlan:
    """Returns the plan to create variables whose values shipped code makes; else as
    `create_plan`.

    Raises:
        AlreadyExistsError: A variable of another name, shape or dtype has one of the
            keys.
        InvalidArgumentError: Keys repeat.
        ProtocolError: A dtype cannot be encoded.
    """
    task, generation = variables.task, variables.generation
    _check_distinct(entries, task)
    new = [
        entry
        for entry in entries
        if _is_new(entry, tuple(entry.shape), dtype_named(entry.dtype), variables)
    ]
    return InitializePlan(generation, new, code, load_code, task)


def _check_distinct(
    entries: Sequence[VariableEntry] | Sequence[InitialEntry] | Sequence[TableEntry],
    task: str,
) -> None:
    if len({entry.key for entry in entries}) != len(entries):
        raise InvalidArgumentError(f"{task}: a key of new variables repeats")


def _is_new(
    entry: VariableEntry | InitialEntry,
    shape: tuple[int, ...],
    dtype: np.dtype,
    variables: HeldVariables,
) -> bool:
    held = variables.get(entry.key)
    if held is None:
        return True
    cell = held.cell
    # A retried creation finds its variables, and what they have learned since stays.
    is_same = (cell.shape, cell.dtype, held.entry.name) == (shape, dtype, entry.name)
    if is_same and held.table is None:
        return False
    raise AlreadyExistsError(
        f"{variables.task} holds key {entry.key} as {held.entry.name!r}, "
        f"{cell.dtype.name}{list(cell.shape)}; {entry.name!r}, "
        f"{dtype.name}{list(shape)}, cannot be created under it"
    )


_AXES: Final = 8
"""The most axes of a row of a table."""


@dataclass(frozen=True, slots=True)
class TablesPlan(StorePlan):
    """The plan to create validated tables, whose new rows a shipped initializer
    makes."""

    generation: int
    entries: Sequence[TableEntry]
    code: bytes
    load_code: Callable[[bytes], object]
    variables: HeldVariables
    session: int
    made: list[HeldVariable] = field(default_factory=list)

    def compute(self) -> None:
        """Loads the shipped initializer, and tries it on one row of each table.

        Raises:
            InvalidArgumentError: The code is not an initializer, or makes rows of
                another shape or dtype.
        """
        task = self.variables.task
        initializer = self.load_code(self.code) if self.entries else None
        for entry in self.entries:
            who = f"{task}: variable {entry.name!r}"
            if not isinstance(initializer, Initializer):
                raise InvalidArgumentError(
                    f"{who}: expected an initializer of zs.initializers, got "
                    f"{initializer!r:.80}"
                )
            table = IdTable(entry, self.code, initializer, who)
            table.begin_cuts(self.session)
            row, dtype = tuple(entry.row), dtype_named(entry.dtype)
            try:
                # One row, thrown away: an initializer that cannot draw it would fail in
                # a push.
                table.first_rows(np.zeros(1, np.int64), np.empty((1, *row), dtype))
            except ValueError as error:
                raise InvalidArgumentError(f"{who}: {error}") from error
            cell = GrowingCell(row, dtype, folder=self.variables.spill)
            cell.who = who
            said = VariableEntry(entry.key, entry.name, entry.trainable, sharded=True)
            self.made.append(HeldVariable(said, cell, 0, table=table))


def tables_plan(
    entries: Sequence[TableEntry],
    code: bytes,
    load_code: Callable[[bytes], object],
    variables: HeldVariables,
    session: int,
) -> TablesPlan:
    """Returns the plan to create tables without rows; existing tables are left out.

    Raises:
        AlreadyExistsError: Something else has one of the keys.
        InvalidArgumentError: Keys repeat, or a row is too large or empty.
        ProtocolError: A dtype cannot be encoded.
    """
    _check_distinct(entries, variables.task)
    for entry in entries:
        # A hostile shape must not become a huge number, so few axes are multiplied.
        nbytes = dtype_named(entry.dtype).itemsize
        for size in entry.row[:_AXES]:
            nbytes *= max(0, size)
        # False is 0, which is refused as an empty row is.
        nbytes *= len(entry.row) <= _AXES
        if not 0 < nbytes <= TABLE_ROW_BYTES:
            raise InvalidArgumentError(
                f"{variables.task}: variable {entry.name!r}: a row of a table of any "
                f"id has 1 to {TABLE_ROW_BYTES} bytes, got "
                f"{entry.dtype}{list(entry.row)}"
            )
        if entry.gradients < 1 or not entry.chance > 0:
            raise InvalidArgumentError(
                f"{variables.task}: variable {entry.name!r} admits ids by push "
                f"{entry.gradients}, a share of {entry.chance}: expected 1 or more, "
                "and more than 0"
            )
        if entry.sketch and not (
            entry.sketch in range(64, 2**19 + 1, 4) and 1 < entry.gradients < 256
        ):
            raise InvalidArgumentError(
                f"{variables.task}: variable {entry.name!r} counts {entry.gradients} "
                f"gradients in {entry.sketch} bytes a bucket: expected 2 to 255, and "
                f"64 to {2**19}, a multiple of 4"
            )
    new = [entry for entry in entries if _is_new_table(entry, variables)]
    return TablesPlan(variables.generation, new, code, load_code, variables, session)


def _is_new_table(entry: TableEntry, variables: HeldVariables) -> bool:
    held = variables.get(entry.key)
    if held is None:
        return True
    if held.table is not None and held.table.entry == entry:
        return False
    raise AlreadyExistsError(
        f"{variables.task} holds key {entry.key} as {held.entry.name!r}, "
        f"{held.cell.dtype.name}{list(held.cell.shape)}; table {entry.name!r}, rows of "
        f"{entry.dtype}{list(entry.row)}, cannot be created under it"
    )
