"""Variables with their optimizer slots, and the steps that update them.

A program may restore a checkpoint and then train. The slots that an optimizer keeps for
a variable are known only when its tree has arrived (`_bindings`); until then loaded
slots are kept by name (`Unbound`). The first update uses them, if they are the slots
that it needs.
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
"""The most layouts (distinct shapes and dtypes of a variable and its slots) for which a
session may compile programs."""


@dataclass(frozen=True, slots=True)
class SlotArray:
    """One array of an optimizer's state that is kept for a variable.

    ``name`` is its path in that state (".mu", "[0].count"). ``rows``: its first axis is
    that of the variable, so that each row of the variable has a row in it.
    """

    name: str
    rows: bool


@dataclass(slots=True)
class Slots:
    """The slots of one variable for one optimizer: a cell for each array of the state.

    Updates of the whole variable leave the cells on the device; updates of rows bring
    cells with rows back to the host. ``layout`` is the number of the layout (shape and
    dtype of the variable; structure, shapes and dtypes of the slots): two variables
    with one layout share a program.
    """

    cells: tuple[Cell, ...]
    leaves: tuple[SlotArray, ...]
    layout: int
    with_rows: tuple[Cell, ...] = field(init=False)
    shared: tuple[Cell, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.become(self.cells, self.layout)

    def become(self, cells: tuple[Cell, ...], layout: int) -> None:
        """Replaces the cells, after an update that changes dtypes."""
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
    """One variable on its server: its value, its version and, per optimizer, its
    slots."""

    entry: VariableEntry
    cell: Cell
    version: int
    slots: dict[int, Slots] = field(default_factory=dict)
    fold: ref[object] | None = None
    """The latest fold (`zstrat.ps.store._fold`: an addition while the push arrives).
    The fold is under way as long as the reference is alive."""
    no_fold_until: int = 0
    """The version before which no push is added while it arrives."""
    table: IdTable | None = None
    """The ids of the rows, if the variable is a table of any id; else None."""


class SlotStep(NamedTuple):
    """One gradient of ``dtype`` to apply to one variable. ``slots`` holds the
    variable's slots by optimizer. ``rule`` is shared by all variables that are updated
    by the same computation (`_bindings`); ``uses`` are the numbers of the operands of
    its tree that it takes.

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
    """The gradients of some steps, by the index of the step, as they arrived: alone, or
    several concatenated in one array."""

    operands: Sequence[np.ndarray] = ()
    """Operands of the whole tree of these steps; each rule takes some of them."""
    _arrays: list[tuple[int, list[SetPart], np.ndarray]] = field(default_factory=list)
    """Each array, with the index of the first of its gradients, and the parts of all of
    them; a gradient that arrived alone has no parts."""

    def add(self, array: np.ndarray, parts: Sequence[SetPart] = ()) -> None:
        """Adds a gradient, or an array that concatenates several gradients as ``parts``
        says."""
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
        """Returns the gradients with these indices, in this order, in one array, if
        they arrived so; otherwise None."""
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
    """As in `SlotStep`: an earlier update of the same push changes the variable."""

    def distinct(self) -> RowStep:
        """Returns this step with sorted and distinct rows; gradients of the same row
        are summed."""
        if not self.mixed:
            return self
        indices, gradient = distinct(self.indices, self.gradient)
        return self._replace(indices=indices, gradient=gradient, mixed=False)


@dataclass(slots=True)
class Ahead:
    """The state that slots will have after the updates of a push that come before some
    update."""

    layouts: dict[tuple[int, int], int] = field(default_factory=dict)
    """The numbers of the layouts that slots will have, by optimizer and by the `id` of
    the variable's cell."""
    reserved: dict[tuple[int, int], list[Cell]] = field(default_factory=dict)
    """Memory that is reserved for slots, which will be made when their update runs; by
    optimizer and by the `id` of the variable's cell."""
    writes: dict[int, list[Write]] = field(default_factory=dict)
    """The writes to each slot, by the `id` of its cell."""


def lose(
    optimizer: int, steps: Sequence[SlotStep | RowStep], error: BaseException
) -> None:
    """Marks the values of the steps as lost, and drops their slots, because an error
    interrupted the update."""
    for step in steps:
        step.cell.lose(str(error))
        step.slots.pop(optimizer, None)


def is_wide(dtype: np.dtype) -> bool:
    """Returns whether a dtype has 64 bits; for complex dtypes, whether each part
    has."""
    return dtype.itemsize > (8 if dtype.kind == "c" else 4)


_LAYOUT: Final = -1
"""Stands in place of the number of a layout for slots that no program takes."""

Kind = tuple[SlotArray, tuple[int, ...], "np.dtype"]
"""An array of the state with its shape and dtype."""


@dataclass(slots=True)
class Unbound(Slots):
    """Slots that were loaded before the tree of their optimizer has arrived, by name
    alone.

    ``filled``: for each slot the rows that were loaded; a slot without rows counts as
    one.
    """

    filled: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @staticmethod
    def like(other: Slots | None) -> Unbound:
        """Returns unbound slots with the arrays of ``other``; without arrays if that is
        None."""
        if isinstance(other, Unbound):
            filled = {name: list(rows) for name, rows in other.filled.items()}
            return Unbound(other.cells, other.leaves, _LAYOUT, filled)
        return Unbound((), (), _LAYOUT)

    @staticmethod
    def of(slots: Slots) -> Unbound:
        """Returns slots without their layout: another program takes over the server,
        and sends the optimizer and its tree again."""
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
        """Makes an array of this name, shape and dtype for a variable with this value,
        unless the slots have one."""
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
        """Notes that rows ``[start, stop)`` of a slot were loaded."""
        self.filled[name].append((start, stop))

    def require_filled(self, who: str) -> None:
        """Checks that all rows of all slots were loaded.

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
        """Returns the loaded cells, in the order of the slots that an optimizer
        expects.

        Raises:
            InvalidArgumentError: The loaded slots have other names, shapes or dtypes;
                the error says which, and what was expected.
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
