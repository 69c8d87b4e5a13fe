"""Slots that were loaded before anybody told which tree their optimizer moves.

A program may restore a checkpoint and then train: what the optimizer keeps beside a
variable is known here when its tree is (`zstrat.ps._bindings`), and until then slots
are what was stored, by name. The first update takes them, if they are what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.rows import lasting

from ._arithmetic import is_floating
from ._cell import Cell
from ._slots import SlotArray, Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

_LAYOUT: Final = -1
"""The number of no layout: no program takes them."""

Kind = tuple[SlotArray, tuple[int, ...], "np.dtype"]
"""A leaf with its shape and dtype."""


@dataclass(slots=True)
class Unbound(Slots):
    """``filled``: for each leaf the rows that were loaded; one for a leaf without."""

    filled: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @staticmethod
    def like(other: Slots | None) -> Unbound:
        """A copy, or none of any leaf."""
        if isinstance(other, Unbound):
            filled = {name: list(rows) for name, rows in other.filled.items()}
            return Unbound(other.cells, other.leaves, _LAYOUT, filled)
        return Unbound((), (), _LAYOUT)

    def make_room(
        self, leaf: SlotArray, shape: tuple[int, ...], dtype: np.dtype, who: str
    ) -> None:
        """A place for a leaf that looks like this, if it is not there."""
        kept = [
            (cell, each)
            for cell, each in zip(self.cells, self.leaves, strict=True)
            if each.name != leaf.name
            or (each, cell.shape, cell.dtype) == (leaf, shape, dtype)
        ]
        if not any(each == leaf for _, each in kept):
            try:
                cell = Cell.around(lasting(shape, dtype))
            except MemoryError:
                raise ResourceExhaustedError(
                    f"{who}: there is no memory for {leaf.name!r}"
                ) from None
            cell.who = who
            kept.append((cell, leaf))
            self.filled[leaf.name] = []
        self.leaves = tuple([each for _, each in kept])
        self.become(tuple([cell for cell, _ in kept]), _LAYOUT)

    def fill(self, name: str, start: int, stop: int) -> None:
        """Rows of a leaf were loaded."""
        self.filled[name].append((start, stop))

    def require_filled(self, who: str) -> None:
        """
        Raises:
            InvalidArgumentError: Some rows were not loaded.
        """
        for cell, leaf in zip(self.cells, self.leaves, strict=True):
            end = 0
            for start, stop in sorted(self.filled[leaf.name]):
                if start > end:
                    break
                end = max(end, stop)
            if end < (cell.shape[0] if leaf.rows else 1):
                raise InvalidArgumentError(
                    f"{cell.who}, {who}: {leaf.name!r} was restored up to row {end} of "
                    f"{cell.shape[0] if leaf.rows else 1}, and how the others begin "
                    "was not known when it was: give the optimizer its tree before "
                    "the checkpoint is restored, zs.Optimizer(transformation, "
                    "params=params)"
                )

    def taken(self, wanted: Sequence[Kind], who: str) -> tuple[Cell, ...]:
        """The cells, in the order of what an optimizer wants.

        Raises:
            InvalidArgumentError: They look otherwise; says how, and what was wanted.
        """
        self.require_filled(who)
        by_name = {
            leaf.name: (cell, leaf)
            for cell, leaf in zip(self.cells, self.leaves, strict=True)
        }
        found = [by_name.get(leaf.name) for leaf, _, _ in wanted]
        fits = len(wanted) == len(by_name) and all(
            each is not None and _fits(each[0], each[1], kind)
            for each, kind in zip(found, wanted, strict=True)
        )
        if not fits:
            there = [(leaf, cell.shape, cell.dtype) for cell, leaf in by_name.values()]
            where = self.cells[0].who if self.cells else "a variable"
            raise InvalidArgumentError(
                f"{where}, {who}: restored were {_words(there)}, and it keeps "
                f"{_words(wanted)}: restore a checkpoint of the same optimizer on the "
                "same tree, or values alone"
            )
        return tuple([each[0] for each in found if each is not None])


def _fits(cell: Cell, leaf: SlotArray, kind: Kind) -> bool:
    wanted, shape, dtype = kind
    alike = is_floating(cell.dtype) and is_floating(dtype)
    return (leaf, cell.shape) == (wanted, shape) and (cell.dtype == dtype or alike)


def _words(kinds: Sequence[Kind]) -> str:
    each = [
        f"{leaf.name!r} ({dtype.name}{list(shape)}{', by rows' if leaf.rows else ''})"
        for leaf, shape, dtype in kinds
    ]
    return ", ".join(each) or "nothing"
