"""A variable, what an optimizer keeps beside it, and what one step of that takes.

A program may restore a checkpoint and then train: what the optimizer keeps beside a
variable is known here when its tree has come (`_bindings`), and until
then slots are what was stored, by name. The first update takes them, if they are what
it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.memory import lasting
from zstrat.ps.store._cell import Cell

from ._arithmetic import distinct, is_floating

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ref

    import numpy as np

    from zstrat.optimizers import LeafRule
    from zstrat.ps.store._cell import Write
    from zstrat.ps.tables._id_table import IdTable
    from zstrat.wire import SetPart, VariableEntry

LAYOUTS: Final = 4096
"""Distinct (shape, dtype, slots) that a session may have compiled programs for."""


@dataclass(frozen=True, slots=True)
class SlotArray:
    """One array of an optimizer's state beside a variable.

    ``name`` is its path in that state (".mu", "[0].count"). ``rows``: its first axis is
    the variable's own, so that a row of the variable has a row of it.
    """

    name: str
    rows: bool


@dataclass(slots=True)
class Slots:
    """The slots of one variable for one optimizer: a cell for each leaf of the state.

    Whole updates leave the cells on the device, updates of rows bring those that have
    rows back to the host. ``layout`` numbers (shape and dtype of the variable;
    structure, shapes and dtypes of the leaves): two variables of one layout share a
    program.
    """

    cells: tuple[Cell, ...]
    leaves: tuple[SlotArray, ...]
    layout: int
    with_rows: tuple[Cell, ...] = field(init=False)
    shared: tuple[Cell, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.become(self.cells, self.layout)

    def become(self, cells: tuple[Cell, ...], layout: int) -> None:
        """Takes other cells, after an update that changes dtypes."""
        pairs = list(zip(cells, self.leaves, strict=True))
        # Divided once: updates of rows ask for the two kinds in each push.
        self.cells, self.layout = cells, layout
        self.with_rows = tuple(cell for cell, leaf in pairs if leaf.rows)
        self.shared = tuple(cell for cell, leaf in pairs if not leaf.rows)

    @property
    def nbytes(self) -> int:
        return sum(cell.nbytes for cell in self.cells)


@dataclass(slots=True)
class HeldVariable:
    """One variable: its value, its version and, per optimizer, its slots."""

    entry: VariableEntry
    cell: Cell
    version: int
    slots: dict[int, Slots] = field(default_factory=dict)
    fold: ref[object] | None = None
    """The last one (`zstrat.ps.store._fold`), under way as long as it lives."""
    no_fold_until: int = 0
    """The version before which nothing is folded."""
    table: IdTable | None = None
    """Which ids its rows have, if it is a table of any id."""


class SlotStep(NamedTuple):
    """One gradient of ``dtype`` to apply to one variable. ``slots`` holds the
    variable's slots by optimizer. ``rule`` is shared by all variables that are updated
    by the same computation (`_bindings`); ``uses`` are the numbers of the operands
    that it takes here.

    ``late``: an earlier update of the same push changes this variable, so its slots are
    made, and get their dtypes, only when this update runs.
    """

    cell: Cell
    slots: dict[int, Slots]
    rule: LeafRule
    dtype: np.dtype
    uses: tuple[int, ...] = ()
    late: bool = False


@dataclass(slots=True)
class Gradients:
    """The gradients of some steps, by their places, as they came: each by itself, or
    those of several side by side in one array."""

    operands: Sequence[np.ndarray] = ()
    """What the rules of these steps take besides, of all their tree."""
    _arrays: list[tuple[int, list[SetPart], np.ndarray]] = field(default_factory=list)
    """With the place of the first one, and the parts of all in it; a gradient by itself
    has no part."""

    def add(self, array: np.ndarray, parts: Sequence[SetPart] = ()) -> None:
        """Adds a gradient, or those that are these parts of an array."""
        at = 0
        if self._arrays:
            # Parts of one array that follow each other stay one piece of it
            # (`together`).
            first, others, before = self._arrays[-1]
            at = first + (len(others) or 1)
            is_next = parts and others and parts[0].start == others[-1].stop
            if before is array and is_next:
                others.extend(parts)
                return
        self._arrays.append((at, list(parts), array))

    def __getitem__(self, place: int) -> np.ndarray:
        at = bisect_right(self._arrays, place, key=itemgetter(0)) - 1
        first, parts, array = self._arrays[at]
        return parts[place - first].of(array) if parts else array

    def together(self, places: Sequence[int]) -> np.ndarray | None:
        """Returns the gradients at these places, in order, as they came, if they came
        side by side."""
        at = bisect_right(self._arrays, places[0], key=itemgetter(0)) - 1
        first, parts, array = self._arrays[at]
        last = places[-1] - first
        # Without a gap, and of one array: then they are side by side already.
        if last - (places[0] - first) + 1 != len(places) or last >= len(parts):
            return None
        return array[parts[places[0] - first].start : parts[last].stop]

    def operands_for(self, uses: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Returns the operands with these numbers."""
        return tuple([self.operands[number] for number in uses])


class RowStep(NamedTuple):
    """Gradients ``[n, ...]`` for the rows ``indices`` ([n] of intp) of one variable:
    sorted and distinct, unless ``mixed``."""

    cell: Cell
    slots: dict[int, Slots]
    rule: LeafRule
    indices: np.ndarray
    gradient: np.ndarray
    operands: tuple[np.ndarray, ...] = ()
    mixed: bool = False
    late: bool = False
    """As in `SlotStep`."""

    def distinct(self) -> RowStep:
        """Returns this step with its rows sorted and each one once, gradients of the
        same row summed."""
        if not self.mixed:
            return self
        indices, gradient = distinct(self.indices, self.gradient)
        return self._replace(indices=indices, gradient=gradient, mixed=False)


@dataclass(slots=True)
class Ahead:
    """The state of slots after the updates of one push up to some place in it."""

    layouts: dict[tuple[int, int], int] = field(default_factory=dict)
    """The numbers of the layouts that slots will have, by optimizer and by the `id` of
    the variable's cell."""
    reserved: dict[tuple[int, int], list[Cell]] = field(default_factory=dict)
    """Memory for slots that will be made by rows."""
    writes: dict[int, list[Write]] = field(default_factory=dict)
    """What is written to a slot, by the `id` of its cell."""


def lose(
    optimizer: int, steps: Sequence[SlotStep | RowStep], error: BaseException
) -> None:
    """Drops values and slots that were being written when something failed."""
    for step in steps:
        step.cell.lose(str(error))
        step.slots.pop(optimizer, None)


def is_wide(dtype: np.dtype) -> bool:
    """Returns whether it has 64 bits, a complex number in each of its parts."""
    return dtype.itemsize > (8 if dtype.kind == "c" else 4)


_LAYOUT: Final = -1
"""The number of no layout: no program takes them."""

Kind = tuple[SlotArray, tuple[int, ...], "np.dtype"]
"""A leaf with its shape and dtype."""


@dataclass(slots=True)
class Unbound(Slots):
    """Slots that were loaded before their optimizer has its tree, by name alone.

    ``filled``: for each leaf the rows that were loaded; one for a leaf without rows.
    """

    filled: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @staticmethod
    def like(other: Slots | None) -> Unbound:
        """Returns unbound slots with the leaves of ``other``, or without leaves."""
        if isinstance(other, Unbound):
            filled = {name: list(rows) for name, rows in other.filled.items()}
            return Unbound(other.cells, other.leaves, _LAYOUT, filled)
        return Unbound((), (), _LAYOUT)

    @staticmethod
    def of(slots: Slots) -> Unbound:
        """Returns the leaves of slots, without their layout: another program takes them
        over, which sends again what the optimizer keeps."""
        if isinstance(slots, Unbound):
            return slots
        filled = {
            leaf.name: [(0, cell.shape[0] if leaf.rows else 1)]
            for cell, leaf in zip(slots.cells, slots.leaves, strict=True)
        }
        return Unbound(slots.cells, slots.leaves, _LAYOUT, filled)

    def make_room(
        self, leaf: SlotArray, shape: tuple[int, ...], dtype: np.dtype, value: Cell
    ) -> None:
        """Makes an empty leaf of this name, shape and dtype beside a value, unless
        there is one."""
        kept = [
            (cell, each)
            for cell, each in zip(self.cells, self.leaves, strict=True)
            # A leaf of the same name, shape and dtype stays, with what was loaded into
            # it.
            if each.name != leaf.name
            or (each, cell.shape, cell.dtype) == (leaf, shape, dtype)
        ]
        if not any(each == leaf for _, each in kept):
            try:
                if value.grows and leaf.rows:
                    cell = value.sibling(shape[1:], dtype, shape[0])
                else:
                    cell = Cell.around(lasting(shape, dtype))
            except MemoryError:
                raise ResourceExhaustedError(
                    f"{value.who}: not enough memory for {leaf.name!r}"
                ) from None
            cell.who = value.who
            kept.append((cell, leaf))
            self.filled[leaf.name] = []
        self.leaves = tuple([each for _, each in kept])
        self.become(tuple([cell for cell, _ in kept]), _LAYOUT)

    def fill(self, name: str, start: int, stop: int) -> None:
        """Notes that rows of a leaf were loaded."""
        self.filled[name].append((start, stop))

    def require_filled(self, who: str) -> None:
        """Refuses slots of which some rows have no value.

        Raises:
            InvalidArgumentError: Some rows were not loaded.
        """
        for cell, leaf in zip(self.cells, self.leaves, strict=True):
            end = 0
            # Sorted: parts come from several files, in any order.
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
        """Returns the loaded cells, in the order of the leaves that an optimizer
        expects.

        Raises:
            InvalidArgumentError: They look otherwise; says how, and what was wanted.
        """
        self.require_filled(who)
        by_name = {
            leaf.name: (cell, leaf)
            for cell, leaf in zip(self.cells, self.leaves, strict=True)
        }
        # By name: a checkpoint may have the leaves in another order.
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
    # A table has as many rows as ids, whatever the tree says.
    if leaf.rows and cell.grows:
        shape = (cell.shape[0], *shape[1:])
    return (leaf, cell.shape) == (wanted, shape) and (cell.dtype == dtype or alike)


def _words(kinds: Sequence[Kind]) -> str:
    each = [
        f"{leaf.name!r} ({dtype.name}{list(shape)}{', by rows' if leaf.rows else ''})"
        for leaf, shape, dtype in kinds
    ]
    return ", ".join(each) or "nothing"
