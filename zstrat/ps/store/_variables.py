"""The variables that one server holds for one session, by key.

Law of the file: a version never returns for a key within a session, not even when the
variable is deleted and created again. A reader may remember a value for long, and would
take the new variable for the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from zstrat.errors import NotFoundError
from zstrat.ps.engine._slots import HeldVariable

from ._sets import HeldSets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from zstrat.wire import VariableEntry

    from ._cell import Cell


@final
class HeldVariables(dict[int, HeldVariable]):
    """A dict, as each pull and push looks several variables up. A key that is not there
    raises `NotFoundError`; the owner of the store alone changes what is there.

    ``task`` names the parameter server in errors. ``spill`` is a folder in which rows
    of tables of any id are kept; None: they stay in memory.
    """

    def __init__(self, task: str, spill: Path | None = None) -> None:
        super().__init__()
        self.task, self.spill = task, spill
        self.generation = 0
        """Grows with each `clear`: a plan of an earlier one cannot be committed."""
        self.first_version = 0
        """Of a new variable: above all of those that were deleted."""
        self.changes = 0
        """How often variables came or went."""
        self.sets = HeldSets()

    def __missing__(self, key: int) -> HeldVariable:
        raise NotFoundError(
            f"{self.task} holds no variable with key {key} (but {len(self)} "
            "others): it was deleted, or created in another session"
        )

    def __setitem__(self, key: int, held: HeldVariable) -> None:
        self._change()
        super().__setitem__(key, held)

    def __delitem__(self, key: int) -> None:
        self._change()
        super().__delitem__(key)

    def find(self, keys: Iterable[int]) -> list[HeldVariable]:
        """Returns the variables, in order.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        return [self[key] for key in keys]

    def nbytes(self, keys: Iterable[int]) -> int:
        """Returns bytes of the values of those that exist."""
        return sum(held.cell.nbytes for key in keys if (held := self.get(key)))

    def versions(self, keys: Iterable[int]) -> list[int]:
        """Returns the versions of these variables; -1 for one that is gone."""
        found = map(self.get, keys)
        return [-1 if held is None else held.version for held in found]

    def hold(self, entries: Sequence[VariableEntry], cells: Sequence[Cell]) -> None:
        """Takes new variables with these values."""
        for entry, cell in zip(entries, cells, strict=True):
            cell.who = f"{self.task}: variable {entry.name!r}"
            self[entry.key] = HeldVariable(entry, cell, self.first_version)

    def hold_tables(self, tables: Sequence[HeldVariable]) -> None:
        """Takes new tables of any id."""
        for table in tables:
            table.version = self.first_version
            self[table.entry.key] = table

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes all or none.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        for held in self.find(keys):
            self.first_version = max(self.first_version, held.version + 1)
        for key in set(keys):
            del self[key]

    def jump(self, by: int) -> None:
        """Raises the versions of all variables, and of variables that are created
        later, by ``by``."""
        self.first_version += by
        for held in self.values():
            held.version += by

    def clear(self) -> None:
        """Drops all variables, as another session begins: its versions are not compared
        with those of this one."""
        super().clear()
        self.generation += 1
        self._change()
        self.first_version = 0

    def _change(self) -> None:
        self.changes += 1
        self.sets.forget()
