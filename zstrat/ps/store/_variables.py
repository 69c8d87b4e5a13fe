"""The variables that one server holds, and which of them are one array.

Law: a version never returns for a key within a session, not even when the variable is
deleted and created again. A reader may remember a value for long, and would take the
new variable for the old one.

Sets of small variables are read, and updated, as one array (`zstrat.wire`). A set is
what a message names, nothing that the store has: which variables it has is looked up
once, and again when variables have come or gone. Its value is the array in which the
last update has left them side by side (`_flat`), without a copy, or else one that is
put together.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import numpy as np

from zstrat.errors import InvalidArgumentError, NotFoundError
from zstrat.ps.engine._slots import HeldVariable
from zstrat.wire import SET_BYTES, SET_KEYS, SetPart, is_keys, parts_of

from ._flat import Flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from zstrat.wire import VariableEntry

    from ._cell import Cell


KEPT: Final = 2**16
"""Variables of all sets that are remembered, about 10 MB: each program of a worker has
some sets, and a model may have more variables than there are in one."""


@dataclass(slots=True, eq=False)
class HeldSet:
    """The variables of a set, which messages read and update as one array."""

    keys: list[int]
    held: list[HeldVariable]
    cells: list[Cell]
    parts: tuple[SetPart, ...]
    _copied: tuple[int, weakref.ref[np.ndarray]] | None = None
    """The value that was put together last, as long as a reader has it, and its
    version."""

    @property
    def version(self) -> int:
        """The sum of the versions, of which none falls."""
        return sum([held.version for held in self.held])

    def value(self) -> np.ndarray:
        """Returns the values side by side, ``[elements]``, read-only; they never change
        afterwards.

        Raises:
            UnavailableError: A value was lost.
        """
        flat = Flat.of(self.cells)
        if flat is not None and flat.array.ndim:
            return flat.array
        # Small variables were changed one by one: put together once for all readers of
        # a version.
        version, copied = self.version, self._copied
        together = copied[1]() if copied and copied[0] == version else None
        # A value that is lost has the version that it had.
        if together is None or any([cell.lost for cell in self.cells]):  # noqa: C419 (a generator is slower)
            together = np.concatenate([cell.look().reshape(-1) for cell in self.cells])
            together.setflags(write=False)
            self._copied = version, weakref.ref(together)
        return together

    def require_fit(self, array: np.ndarray) -> None:
        """Refuses gradients that are not ``[elements]``, side by side."""
        elements = self.parts[-1].stop
        if array.shape != (elements,):
            raise InvalidArgumentError(
                f"{self.cells[0].who}: the gradients of its set, of {len(self.keys)} "
                f"variables, are {elements} elements side by side, got an array of "
                f"shape {array.shape}"
            )


@dataclass(slots=True)
class HeldSets:
    """The sets of one store that were named lately, by their keys."""

    _known: dict[bytes, HeldSet] = field(default_factory=dict)

    def forget(self) -> None:
        """Drops what is remembered: variables have come or gone. A set holds the
        memory of its variables, also of those that were deleted."""
        self._known.clear()

    def find(self, keys: np.ndarray, variables: HeldVariables) -> HeldSet:
        """Returns the set with these keys.

        Raises:
            NotFoundError: No variable has one of the keys.
            InvalidArgumentError: They are not the distinct keys of variables of one
                dtype, or too many.
        """
        if not is_keys(keys):
            raise InvalidArgumentError(
                f"{variables.task}: the keys of a set are 1 to {SET_KEYS} int64, got "
                f"{keys.dtype.name}{list(keys.shape)}"
            )
        name = keys.tobytes()
        # Taken out and put back at the end: the order of the dict is that of use.
        found = self._known.pop(name, None)
        if found is None:
            found = _held_set(keys.tolist(), variables)
            kept = sum([len(each.keys) for each in self._known.values()])
            while self._known and kept + len(found.keys) > KEPT:
                kept -= len(self._known.pop(next(iter(self._known))).keys)
        self._known[name] = found  # as the last to be dropped
        return found


def _held_set(keys: list[int], variables: HeldVariables) -> HeldSet:
    held = variables.find(keys)
    if len({*keys}) < len(keys):
        raise InvalidArgumentError(f"{variables.task}: a set names a key twice")
    cells = [each.cell for each in held]
    for each in held:
        if each.table is not None:
            raise InvalidArgumentError(
                f"{each.cell.who} is a table of any id, which is in no set"
            )
        if each.cell.dtype != cells[0].dtype:
            raise InvalidArgumentError(
                f"{each.cell.who} is in a set of {cells[0].dtype.name}, got "
                f"{each.cell.dtype.name}"
            )
    nbytes = sum([cell.nbytes for cell in cells])
    if nbytes > SET_BYTES:
        raise InvalidArgumentError(
            f"{variables.task}: a set of {len(cells)} variables has {nbytes} bytes, "
            f"the limit is {SET_BYTES}: name fewer, or each by itself"
        )
    parts = parts_of([cell.shape for cell in cells])
    return HeldSet(keys, held, cells, parts)


@final
class HeldVariables(dict[int, HeldVariable]):
    """The variables of one store, by key: a dict, as each pull and push looks several
    up. A key that is not there raises `NotFoundError`; the owner of the store alone
    changes what is there.

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
        # All are looked up before one is deleted, which raises for a key that is not
        # there.
        for held in self.find(keys):
            self.first_version = max(self.first_version, held.version + 1)
        # A message may name a key twice.
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
