"""The variables that one server holds, and sets of small variables that are read as one
array.

Law: a version of a key is never used twice within a session, not even when the variable
is deleted and created again. A reader may cache a value for long, and would take the
new variable for the old one.

Sets of small variables are read, and updated, as one array (`zstrat.wire`). Messages
define sets by their keys; the store looks their variables up once, and again when
variables were created or deleted. The value of a set is the array in which the last
update has left the variables concatenated (`_flat`), without a copy, or else a new
array into which their values are copied.
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
"""The most variables in all remembered sets, about 10 MB: each program of a worker has
some sets, and a model may have more variables than one set."""


@dataclass(slots=True, eq=False)
class HeldSet:
    """A set of variables, which messages read and update as one array."""

    keys: list[int]
    held: list[HeldVariable]
    cells: list[Cell]
    parts: tuple[SetPart, ...]
    _copied: tuple[int, weakref.ref[np.ndarray]] | None = None
    """The version and the value that was concatenated last, as long as a reader holds
    it."""

    @property
    def version(self) -> int:
        """The version of the set: the sum of the versions of its variables, none of
        which ever falls."""
        return sum([held.version for held in self.held])

    def value(self) -> np.ndarray:
        """Returns the values of all variables concatenated, ``[elements]``, read-only.
        The returned array never changes.

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
        """Checks that concatenated gradients of the set are an array ``[elements]``."""
        elements = self.parts[-1].stop
        if array.shape != (elements,):
            raise InvalidArgumentError(
                f"{self.cells[0].who}: the gradients of its set, of {len(self.keys)} "
                f"variables, are {elements} elements side by side, got an array of "
                f"shape {array.shape}"
            )


@dataclass(slots=True)
class HeldSets:
    """The latest sets that messages have named, by their keys."""

    _known: dict[bytes, HeldSet] = field(default_factory=dict)

    def forget(self) -> None:
        """Drops all remembered sets, because variables were created or deleted. A set
        keeps alive the memory of its variables, even of deleted ones."""
        self._known.clear()

    def find(self, keys: np.ndarray, variables: HeldVariables) -> HeldSet:
        """Returns the set with these keys.

        Raises:
            NotFoundError: No variable has one of the keys.
            InvalidArgumentError: The keys are not distinct, too many, or of variables
                with different dtypes.
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
    """The variables of one store by key, as a dict because each pull and push looks
    several up. A missing key raises `NotFoundError`; only the owner of the store may
    change the content.

    ``task`` names the parameter server in errors. ``spill`` is a folder for files with
    the rows of tables of any id; None: these stay in memory.
    """

    def __init__(self, task: str, spill: Path | None = None) -> None:
        super().__init__()
        self.task, self.spill = task, spill
        self.generation = 0
        """Grows with each `clear`: a plan that was made before can no longer be
        committed."""
        self.first_version = 0
        """The version of a new variable, above those of all deleted variables."""
        self.changes = 0
        """How often variables were created or deleted."""
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
        """Returns the variables with these keys, in order.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        return [self[key] for key in keys]

    def nbytes(self, keys: Iterable[int]) -> int:
        """Returns the bytes of the values of those variables that exist."""
        return sum(held.cell.nbytes for key in keys if (held := self.get(key)))

    def versions(self, keys: Iterable[int]) -> list[int]:
        """Returns the versions of these variables; -1 for one that does not exist."""
        found = map(self.get, keys)
        return [-1 if held is None else held.version for held in found]

    def hold(self, entries: Sequence[VariableEntry], cells: Sequence[Cell]) -> None:
        """Adds new variables with the values in these cells."""
        for entry, cell in zip(entries, cells, strict=True):
            cell.who = f"{self.task}: variable {entry.name!r}"
            self[entry.key] = HeldVariable(entry, cell, self.first_version)

    def hold_tables(self, tables: Sequence[HeldVariable]) -> None:
        """Adds new tables of any id."""
        for table in tables:
            table.version = self.first_version
            self[table.entry.key] = table

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes all variables with these keys, or none.

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
        """Raises the versions of all variables, including those that are created later,
        by ``by``."""
        self.first_version += by
        for held in self.values():
            held.version += by

    def clear(self) -> None:
        """Drops all variables, because another session begins, whose versions are not
        compared with those of this one."""
        super().clear()
        self.generation += 1
        self._change()
        self.first_version = 0

    def _change(self) -> None:
        self.changes += 1
        self.sets.forget()
