"""Gradients of some rows behind XLA: gathered, updated by a program, scattered back.

The rows that a gradient names, of the value and of those slots that have rows, are
gathered into pooled, aligned buffers that XLA reads without a copy; a program computes
the new ones; they are scattered into the cells, in place unless somebody looks. All
other rows, and their slots, stay as they are ("lazy" updates): a momentum does not
decay while its row has no gradient. Slots without rows (a count, a learning rate) are
those of the variable, and every update advances them, be it of no rows.

Programs are compiled for a bucket of rows and not for a table: tables whose rows look
alike share them, and tables whose slots without rows are equal share a call, unless
those slots are computed from rows (`_row_programs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.ps.store._cell import Cell, Write
from zstrat.rows import lasting

from ._arithmetic import as_rows
from ._layouts import precision
from ._row_calls import Open, Ready, calls, together
from ._row_programs import RowKind, RowKinds
from ._slots import RowStep, Slots, lose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.optimizers import LeafRule

    from ._layouts import SlotLayouts
    from ._slots import Ahead


class RowPrograms:
    """Applies gradients of rows with one optimizer."""

    def __init__(self, optimizer: int, layouts: SlotLayouts) -> None:
        self._optimizer = optimizer
        self._kinds = RowKinds(layouts)

    @property
    def count(self) -> int:
        """How many programs have been compiled."""
        return self._kinds.count

    def ready(self, steps: Sequence[RowStep]) -> list[Ready] | None:
        """The calls that update these rows where they are, if that is all there is to
        do: programs and slots are there, nobody looks at a value, nothing is late.

        Most updates are such, and one look at each table replaces the five of
        `prepare`, `Cell.reserve`, `begin_rows` and `settle`.
        """
        groups: dict[object, Ready] = {}
        get = self._kinds.get
        for number, step in enumerate(steps):
            slots = step.slots.get(self._optimizer)
            if slots is None or step.mixed or step.late:
                return None
            kind = get(slots.layout, step.gradient.dtype)
            tables = [each.rows_in_place() for each in (step.cell, *slots.with_rows)]
            if kind is None or any(table is None for table in tables):
                return None
            key = (id(kind), together(kind, slots, number), *map(id, step.operands))
            group = groups.get(key)
            if group is None:
                group = groups[key] = Ready(kind, [])
            group.opened.append(Open(step, cast("list[np.ndarray]", tables)))
        found = list(groups.values())
        return found if all(ready.is_compiled for ready in found) else None

    def apply_ready(self, groups: Sequence[Ready]) -> None:
        """`apply`, of what `ready` found."""
        for at, (kind, opened) in enumerate(groups):
            try:
                new = calls(self._optimizer, self._kinds, kind, opened)
            except BaseException as error:  # to the pusher, and to later readers
                for group in groups[:at]:
                    lose(self._optimizer, group.steps, error)
                raise
            for step, _ in opened if new else ():
                self._share(step, new)

    def prepare(self, steps: Sequence[RowStep], ahead: Ahead) -> None:
        """Makes slots, unless it is too early to, and compiles; changes no value.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to rows of this
                shape.
            BusyError: Too many shapes have been compiled for.
            ResourceExhaustedError: There is no memory for slots, or beside those that
                readers look at.
        """
        late: list[tuple[RowKind, RowStep]] = []
        for step in steps:
            if step.late:
                late.append((self._foresee(step, ahead), step))
            else:
                self._prepare(step, ahead)
        groups = self._groups([step for step in steps if not step.late])
        for kind, step in late:
            # Whom it will share a call with is not known yet: nobody, or all.
            others = [each for other, each in late if other is kind]
            early = [each for k, group in groups if k is kind for each in group]
            self._compile(kind, [step])
            self._compile(kind, [*early, *others])
        for kind, group in groups:
            self._compile(kind, group)

    def complete(self, steps: Sequence[RowStep], ahead: Ahead) -> None:
        """Makes slots, and gives them dtypes, for which `prepare` was too early."""
        for step in steps:
            if step.late:
                place = (self._optimizer, id(step.cell))
                if self._optimizer not in step.slots:
                    room = ahead.rooms.pop(place, None)
                    slots = self.initial(step.rule, step.cell, room)
                    step.slots[self._optimizer] = slots
                self._steady(step)

    def apply(self, steps: Sequence[RowStep]) -> None:
        """Updates the rows of variables, each of which occurs once."""
        done: list[RowStep] = []
        for kind, group in self._groups(steps):
            try:
                self._update(kind, group)
            except BaseException as error:  # to the pusher, and to later readers
                lose(self._optimizer, done, error)
                raise
            done += group

    def _compile(self, kind: RowKind, group: Sequence[RowStep]) -> None:
        for size in kind.sizes(_rows(group)):
            self._kinds.program(kind, size, group[0].cell)

    def _prepare(self, step: RowStep, ahead: Ahead) -> None:
        if self._optimizer not in step.slots:
            step.slots[self._optimizer] = self.initial(step.rule, step.cell)
        slots = self._steady(step)
        ahead.layouts[self._optimizer, id(step.cell)] = slots.layout
        self._reserve(slots, ahead)

    def _steady(self, step: RowStep) -> Slots:
        """Its slots, with the dtypes that such gradients leave in them."""
        slots, dtype = step.slots[self._optimizer], step.gradient.dtype
        if self._kinds.get(slots.layout, dtype) is None:
            number = self._kinds.steady(slots.layout, dtype, step.cell)
            if number != slots.layout:
                self.convert(slots, number)
            self._kinds.kind(number, dtype, step.cell)
        return slots

    def _foresee(self, step: RowStep, ahead: Ahead) -> RowKind:
        """The kind of an update whose slots will look as earlier ones leave them."""
        place, cell = (self._optimizer, id(step.cell)), step.cell
        slots, number = step.slots.get(self._optimizer), ahead.layouts.get(place)
        if number is None and slots is not None:
            number = slots.layout
        if number is None:
            number = self._numbered(step.rule, cell)
            ahead.rooms[place] = self._room(cell, number)
        if slots is not None:
            self._reserve(slots, ahead)
        number = self._kinds.steady(number, step.gradient.dtype, cell)
        ahead.layouts[place] = number
        return self._kinds.kind(number, step.gradient.dtype, cell)

    def _reserve(self, slots: Slots, ahead: Ahead) -> None:
        for cell in slots.with_rows:
            writes = ahead.writes.setdefault(id(cell), [])
            writes.append(Write.ROWS)
            cell.reserve(writes)

    def _room(self, cell: Cell, number: int) -> list[np.ndarray]:
        layouts = self._kinds.layouts
        leaves = layouts[number].leaves
        try:
            return [lasting(tuple(s.shape), np.dtype(s.dtype)) for s in leaves]
        except MemoryError:
            raise ResourceExhaustedError(
                f"{cell.who}: there is no memory for what optimizer {layouts.name!r} "
                "keeps beside it"
            ) from None

    def _numbered(self, rule: LeafRule, cell: Cell) -> int:
        """The layout of new slots, which are made by rows."""
        layouts = self._kinds.layouts
        number = layouts.initial(rule, cell)
        if rule.row_dependence:
            raise InvalidArgumentError(
                f"optimizer {layouts.name!r} does not move {cell.dtype.name}"
                f"{list(cell.shape)} row by row ({rule.row_dependence}): send a dense "
                "gradient"
            )
        return number

    def initial(
        self, rule: LeafRule, cell: Cell, room: list[np.ndarray] | None = None
    ) -> Slots:
        """New slots, made a block of rows at a time: there is no second table of them
        on the way. ``room``: memory for them."""
        number = self._numbered(rule, cell)
        layout = self._kinds.layouts[number]
        made = self._room(cell, number) if room is None else room
        value, total = cell.look(), len(cell.look())
        call, size = self._kinds.initial(rule, cell)
        if total < size:
            value = np.zeros((size, *cell.shape[1:]), cell.dtype)
            value[:total] = cell.look()
        with precision(rule.tree.wide):
            for start in range(0, max(total, 1), size):
                # The last block overlaps the one before.
                at = max(0, min(start, total - size))
                leaves = call(value[at : at + size])
                for out, about, leaf in zip(made, layout.about, leaves, strict=True):
                    if about.rows:
                        out[at : at + size] = np.asarray(leaf)[: total - at]
                    else:
                        out[...] = np.asarray(leaf)
        cells = tuple(map(Cell.around, made))
        for each in cells:
            each.who = f"{cell.who}, slots of optimizer {self._kinds.layouts.name!r}"
        return Slots(cells, layout.about, number)

    def convert(self, slots: Slots, number: int) -> None:
        """Gives slots the dtypes that updates will leave in them."""
        layout = self._kinds.layouts[number]
        cells = []
        for cell, leaf in zip(slots.cells, layout.leaves, strict=True):
            if cell.dtype != leaf.dtype:
                cell = _converted(cell, np.dtype(leaf.dtype))
            cells.append(cell)
        slots.become(tuple(cells), number)

    def _groups(self, steps: Sequence[RowStep]) -> list[tuple[RowKind, list[RowStep]]]:
        """Steps that go into the same calls."""
        groups: dict[object, tuple[RowKind, list[RowStep]]] = {}
        for number, step in enumerate(steps):
            slots = step.slots[self._optimizer]
            kind = self._kinds.get(slots.layout, step.gradient.dtype)
            assert kind is not None, "apply() without prepare()"
            key = (id(kind), together(kind, slots, number), *map(id, step.operands))
            _, group = groups.setdefault(key, (kind, []))
            group.append(step)
        return list(groups.values())

    def _update(self, kind: RowKind, steps: list[RowStep]) -> None:
        opened = [self._open(step) for step in steps]
        new = calls(self._optimizer, self._kinds, kind, opened)
        for step in steps:
            self._settle(step, new)

    def _open(self, step: RowStep) -> Open:
        slots = step.slots[self._optimizer]
        cells = [step.cell, *slots.with_rows]
        return Open(step, [as_rows(c.begin_rows(step.indices)) for c in cells])

    def _settle(self, step: RowStep, shared: Sequence[np.ndarray]) -> None:
        slots = step.slots[self._optimizer]
        step.cell.settle()
        for cell in slots.with_rows:
            cell.settle()
        self._share(step, shared)

    def _share(self, step: RowStep, shared: Sequence[np.ndarray]) -> None:
        slots = step.slots[self._optimizer]
        for cell, new in zip(slots.shared, shared, strict=True):
            cell.overwrite()[...] = new
            cell.settle()


def _converted(cell: Cell, dtype: np.dtype) -> Cell:
    try:
        new = lasting(cell.shape, dtype)
    except MemoryError:
        raise ResourceExhaustedError(
            f"{cell.who}: there is no memory to make them {dtype.name}"
        ) from None
    np.copyto(new, cell.look(), casting="unsafe")
    converted = Cell.around(new)
    converted.who = cell.who
    return converted


def _rows(steps: Sequence[RowStep]) -> int:
    return sum([len(step.indices) for step in steps])
