"""New tables of any id: validated, and tried before they are there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import AlreadyExistsError, InvalidArgumentError
from zstrat.initializers import Initializer
from zstrat.ps.engine._slots import HeldVariable
from zstrat.ps.tables._growing_cell import GrowingCell
from zstrat.ps.tables._id_table import IdTable
from zstrat.wire import TABLE_ROW_BYTES, VariableEntry, dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.wire import TableEntry

    from ._variables import HeldVariables

_AXES: Final = 8
"""Axes of a row."""


@dataclass(frozen=True, slots=True)
class TablesPlan:
    """Validated new tables, whose rows begin as a shipped initializer makes them."""

    generation: int
    entries: Sequence[TableEntry]
    code: bytes
    load_code: Callable[[bytes], object]
    variables: HeldVariables
    session: int
    made: list[HeldVariable] = field(default_factory=list)

    def compute(self) -> None:
        """Loads the initializer, and has it make a row of each table.

        Raises:
            InvalidArgumentError: It is not an initializer, or makes no such rows.
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
    """Plans new tables without rows; those that are there already are left out.

    Raises:
        AlreadyExistsError: A key is taken by something else.
        InvalidArgumentError: Keys repeat, or a row is too large or empty.
        ProtocolError: No such dtype travels.
    """
    if len({entry.key for entry in entries}) != len(entries):
        raise InvalidArgumentError(f"{variables.task}: a key of new variables repeats")
    for entry in entries:
        nbytes = dtype_named(entry.dtype).itemsize
        for size in entry.row[:_AXES]:
            nbytes *= max(0, size)
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
    new = [entry for entry in entries if _is_new(entry, variables)]
    return TablesPlan(variables.generation, new, code, load_code, variables, session)


def _is_new(entry: TableEntry, variables: HeldVariables) -> bool:
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
