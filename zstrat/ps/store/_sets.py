"""Sets of small variables that are read, and updated, as one array (`zstrat.wire`).

A set is what a message names, nothing that the store has: which variables it has is
looked up once, and again when variables have come or gone. Its value is the array in
which the last update has left them side by side (`_flat`), without a copy, or else one
that is put together.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.wire import SET_BYTES, SET_KEYS, SetPart, is_keys, parts_of

from ._flat import Flat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.ps.engine._slots import HeldVariable

    from ._cell import Cell

KEPT: Final = 2**16
"""Variables of all sets that are remembered, about 10 MB: each program of a worker has
some sets, and a model may have more variables than there are in one."""


class Variables(Protocol):
    """`HeldVariables`, as far as it matters here."""

    task: str

    def find(self, keys: Iterable[int]) -> list[HeldVariable]: ...


@dataclass(slots=True, eq=False)
class HeldSet:
    """The variables of a set."""

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
        version, copied = self.version, self._copied
        together = copied[1]() if copied and copied[0] == version else None
        if together is None:
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

    def find(self, keys: np.ndarray, variables: Variables) -> HeldSet:
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
        found = self._known.pop(name, None)
        if found is None:
            found = _held_set(keys.tolist(), variables)
            kept = sum([len(each.keys) for each in self._known.values()])
            while self._known and kept + len(found.keys) > KEPT:
                kept -= len(self._known.pop(next(iter(self._known))).keys)
        self._known[name] = found  # as the last to be dropped
        return found


def _held_set(keys: list[int], variables: Variables) -> HeldSet:
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
