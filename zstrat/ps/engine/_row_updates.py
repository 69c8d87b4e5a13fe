"""Applies gradients of rows: by XLA, which gets the rows gathered and whose results are
scattered back; or by compiled loops, which update the rows where they are.

The rows that a gradient names, of the value and of those slots that have rows, are
gathered into pooled, aligned buffers that XLA reads without a copy; a program computes
the new rows; they are scattered into the cells, in place unless a reader has a lease on
them. All other rows, and their slots, stay as they are ("lazy" updates): a momentum
does not decay while its row has no gradient. Slots without rows (a count, a learning
rate) belong to the whole variable, and every update advances them, even one of no rows.

Programs are compiled for a number of rows and not for a table: tables whose rows have
the same layout share programs, and tables whose slots without rows are equal share a
call, unless those slots are computed from rows (`_row_programs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.memory import lasting
from zstrat.native import put_rows, take_rows
from zstrat.ps.store._cell import Cell, Write
from zstrat.ps.tables._growing_cell import growing

from ._arithmetic import as_rows, pack
from ._row_programs import NEW_ROWS, RowKind, RowKinds
from ._slots import RowStep, Slots, lose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.optimizers import LeafRule

    from ._arithmetic import RowRun
    from ._flat_updates import SlotLayouts
    from ._row_programs import RowProgram
    from ._slots import Ahead


class RowCalls(NamedTuple):
    """Row updates of one kind that share calls of its programs. A call gets the rows of
    as many updates as fit into it, concatenated, from any tables.

    ``tables``: for each update the value and slots that it writes in place, as opaque
    vectors of rows; None if they are known only when the update runs.
    """

    kind: RowKind
    steps: list[RowStep]
    tables: list[list[np.ndarray]] | None

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows of the programs for the calls."""
        return self.kind.sizes(sum([len(step.indices) for step in self.steps]))

    @property
    def is_compiled(self) -> bool:
        kind = self.kind
        if kind.loop is not None:
            return True
        return all(size in kind.programs for size in self.sizes)


class RowUpdates:
    """Applies gradients of rows with one optimizer."""

    def __init__(self, optimizer: int, layouts: SlotLayouts) -> None:
        self._optimizer = optimizer
        self._kinds = RowKinds(layouts)

    @property
    def count(self) -> int:
        """Number of programs that have been compiled."""
        return self._kinds.count

    def ready(self, steps: Sequence[RowStep]) -> list[RowCalls] | None:
        """Returns the calls that update these rows in place; None if that is not
        possible at once: a program or slots are missing, a reader holds a value, or a
        step is ``late``.

        Most updates can be made in place, and one check of each table replaces the five
        of `prepare`, `Cell.reserve`, `begin_rows` and `settle`.
        """
        kinds, tables = [], []
        for step in steps:
            slots = step.slots.get(self._optimizer)
            # A late step finds its slots only when it runs; a mixed one has rows twice.
            if slots is None or step.mixed or step.late:
                return None
            kind = self._kinds.get(slots.layout, step.gradient.dtype)
            here = [each.rows_in_place() for each in (step.cell, *slots.with_rows)]
            if kind is None or any(table is None for table in here):
                return None
            kinds.append(kind)
            tables.append(cast("list[np.ndarray]", here))
        found = self._together(steps, kinds, tables)
        # A program that is missing is compiled by `prepare`, not while rows are
        # written.
        return found if all(calls.is_compiled for calls in found) else None

    def prepare(self, steps: Sequence[RowStep], ahead: Ahead) -> None:
        """Compiles programs and makes slots for steps, except slots that earlier
        updates of the push still affect; changes no value.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to rows of this
                shape.
            BusyError: Programs have been compiled for too many shapes.
            ResourceExhaustedError: There is no memory for slots, or for copies of
                values and slots that readers hold.
        """
        late: list[tuple[RowKind, RowStep]] = []
        for step in steps:
            if step.late:
                late.append((self._foresee(step, ahead), step))
            else:
                self._prepare(step, ahead)
        # Late ones apart: which calls they share depends on slots that are not there
        # yet.
        known = self._calls([step for step in steps if not step.late])
        for kind, step in late:
            # It is not known yet whether it will share a call: with none, or all.
            others = [each for other, each in late if other is kind]
            early = [
                each for calls in known if calls.kind is kind for each in calls.steps
            ]
            self._compile(RowCalls(kind, [step], None))
            self._compile(RowCalls(kind, [*early, *others], None))
        for calls in known:
            self._compile(calls)

    def complete(self, steps: Sequence[RowStep], ahead: Ahead) -> None:
        """Makes the slots and changes the dtypes that `prepare` had to leave, as
        earlier updates of the push affect them."""
        for step in steps:
            if step.late:
                place = (self._optimizer, id(step.cell))
                # An earlier update of the push may have made them.
                if self._optimizer not in step.slots:
                    memory = ahead.reserved.pop(place, None)
                    slots = self.initial(step.rule, step.cell, memory)
                    step.slots[self._optimizer] = slots
                self._steady(step)

    def apply(
        self, steps: Sequence[RowStep], ready: Sequence[RowCalls] | None = None
    ) -> None:
        """Updates the rows of variables, each of which occurs once.

        Args:
            ready: The result of `ready` for these steps; None if the steps were given
                to `prepare`.
        """
        done: list[RowStep] = []
        for calls in self._calls(steps) if ready is None else ready:
            try:
                self._update(calls)
            except BaseException as error:  # to the pusher, and to later readers
                lose(self._optimizer, done, error)
                raise
            done += calls.steps

    def _compile(self, calls: RowCalls) -> None:
        if calls.kind.loop is not None:
            return
        for size in calls.sizes:
            self._kinds.program(calls.kind, size, calls.steps[0].cell)

    def _prepare(self, step: RowStep, ahead: Ahead) -> None:
        if self._optimizer not in step.slots:
            step.slots[self._optimizer] = self.initial(step.rule, step.cell)
        slots = self._steady(step)
        ahead.layouts[self._optimizer, id(step.cell)] = slots.layout
        self._reserve(slots, ahead)

    def _steady(self, step: RowStep) -> Slots:
        """Returns the slots of a step, converted to the dtypes that updates with its
        gradient keep."""
        slots, dtype = step.slots[self._optimizer], step.gradient.dtype
        # The dtypes of slots settle with the first gradient (`RowKinds.steady`).
        if self._kinds.get(slots.layout, dtype) is None:
            number = self._kinds.steady(slots.layout, dtype, step.cell)
            if number != slots.layout:
                self.convert(slots, number)
            self._kinds.kind(number, dtype, step.cell)
        return slots

    def _foresee(self, step: RowStep, ahead: Ahead) -> RowKind:
        """Returns the kind of a late update, whose slots will have the layout that
        earlier updates of the push leave; reserves memory for it."""
        place, cell = (self._optimizer, id(step.cell)), step.cell
        slots, number = step.slots.get(self._optimizer), ahead.layouts.get(place)
        if number is None and slots is not None:
            number = slots.layout
        if number is None:
            number = self._numbered(step.rule, cell)
            # Memory is set aside now, so that the update itself cannot fail for it.
            ahead.reserved[place] = self._memory_for(cell, number)
        if slots is not None:
            self._reserve(slots, ahead)
        # What this update leaves is what the next one of the push finds.
        number = self._kinds.steady(number, step.gradient.dtype, cell)
        ahead.layouts[place] = number
        return self._kinds.kind(number, step.gradient.dtype, cell)

    def _reserve(self, slots: Slots, ahead: Ahead) -> None:
        for cell in slots.with_rows:
            writes = ahead.writes.setdefault(id(cell), [])
            writes.append(Write.ROWS)
            # Called with each further write: what is reserved has to do for all of
            # them.
            cell.reserve(writes)

    def _memory_for(self, cell: Cell, number: int) -> list[Cell]:
        """Returns memory for slots of this layout. Raises ResourceExhaustedError if
        there is none."""
        layouts = self._kinds.layouts
        layout, made = layouts[number], list[Cell]()
        try:
            for about, leaf in zip(layout.about, layout.leaves, strict=True):
                shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
                if about.rows:
                    made.append(cell.sibling(shape[1:], dtype))
                else:
                    made.append(Cell.around(lasting(shape, dtype)))
        except MemoryError:
            raise ResourceExhaustedError(
                f"{cell.who}: not enough memory for what optimizer {layouts.name!r} "
                "keeps beside it"
            ) from None
        for each in made:
            each.who = f"{cell.who}, slots of optimizer {layouts.name!r}"
        return made

    def _numbered(self, rule: LeafRule, cell: Cell) -> int:
        """Returns the number of the layout of initial slots. Raises
        InvalidArgumentError if the rule cannot update rows one by one."""
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
        self, rule: LeafRule, cell: Cell, memory: list[Cell] | None = None
    ) -> Slots:
        """Returns initial slots, made a block of rows at a time, so that no second copy
        of them is needed. ``memory``: the cells to fill; None: new ones."""
        number = self._numbered(rule, cell)
        layout = self._kinds.layouts[number]
        made = self._memory_for(cell, number) if memory is None else memory
        if cell.grows:
            # Both programs now: rows are born in later pushes, which must not wait for
            # a compiler.
            for size in NEW_ROWS, NEW_ROWS + 1:
                self._kinds.initial(rule, cell, size)
        for at, leaves in self._begun(rule, cell, 0):
            for each, about, leaf in zip(made, layout.about, leaves, strict=True):
                out = each.look()
                if about.rows:
                    out[at : at + len(leaf)] = leaf
                else:
                    out[...] = leaf
        return Slots(tuple(made), layout.about, number)

    def can_extend(self, rule: LeafRule, cell: Cell) -> bool:
        """Returns whether `extend` could run without compiling."""
        return self._kinds.has_initial(rule, cell)

    def extend(self, slots: Slots, rule: LeafRule, cell: Cell) -> None:
        """Makes slots for the last rows of a table, which have none yet.

        Raises:
            ResourceExhaustedError: There is no memory for them.
        """
        total = cell.shape[0]
        made = [
            growing(each) if about.rows else None
            for each, about in zip(slots.cells, slots.leaves, strict=True)
        ]
        starts = [total if each is None else each.shape[0] for each in made]
        # Slots of loaded tables may have fewer rows than the value, and not all the
        # same number.
        first = min(starts, default=total)
        if first == total:
            return
        for each in made:
            if each is not None:
                each.extend(total - each.shape[0])
        for at, leaves in self._begun(rule, cell, first):
            for each, start, leaf in zip(made, starts, leaves, strict=True):
                if each is not None and start < at + len(leaf):
                    out, done = each.look()[at : at + len(leaf)], max(0, start - at)
                    out[done:] = leaf[done:]

    def _begun(
        self, rule: LeafRule, cell: Cell, first: int
    ) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yields initial slots for the rows from ``first`` on, in blocks of rows: the
        number of the block's first row, which may be less than ``first``, and all
        leaves. Yields at least one block."""
        value, total = cell.look(), cell.shape[0]
        call, size = self._kinds.initial(rule, cell, total - first)
        if total < size:
            # A program takes a fixed number of rows: few are padded, and cut again.
            value = np.zeros((size, *cell.shape[1:]), cell.dtype)
            value[:total] = cell.look()
        with rule.tree.arithmetic():
            for start in range(first, max(total, first + 1), size):
                # The last block overlaps the one before.
                at = max(0, min(start, total - size))
                yield (
                    at,
                    [
                        np.asarray(leaf)[: total - at]
                        if slot.rows
                        else np.asarray(leaf)
                        for leaf, slot in zip(
                            call(value[at : at + size]), rule.slots, strict=True
                        )
                    ],
                )

    def convert(self, slots: Slots, number: int) -> None:
        """Converts slots to the dtypes of the layout ``number``, which updates keep."""
        layout = self._kinds.layouts[number]
        cells = []
        for cell, leaf in zip(slots.cells, layout.leaves, strict=True):
            if cell.dtype != leaf.dtype:
                cell = _converted(cell, np.dtype(leaf.dtype))
            cells.append(cell)
        slots.become(tuple(cells), number)

    def _calls(self, steps: Sequence[RowStep]) -> list[RowCalls]:
        """Returns the calls for steps that were prepared."""
        kinds = []
        for step in steps:
            layout = step.slots[self._optimizer].layout
            kind = self._kinds.get(layout, step.gradient.dtype)
            assert kind is not None, "apply() without prepare()"
            kinds.append(kind)
        return self._together(steps, kinds, None)

    def _together(
        self,
        steps: Sequence[RowStep],
        kinds: Sequence[RowKind],
        tables: Sequence[list[np.ndarray]] | None,
    ) -> list[RowCalls]:
        """Groups steps that can share calls: of one kind, with the same operands and
        equal slots without rows. Steps share no call if such slots are computed from
        rows, as these would then be the rows of all steps in the call."""
        found: dict[object, RowCalls] = {}
        for number, (step, kind) in enumerate(zip(steps, kinds, strict=True)):
            # Equal to no bytes and no other place: such a step has calls of its own.
            shared: object = number
            if kind.is_apart:
                slots = step.slots[self._optimizer]
                # By value: slots that are equal now get the same new value.
                shared = b"".join([cell.look().tobytes() for cell in slots.shared])
            key = (id(kind), shared, *map(id, step.operands))
            calls = found.get(key)
            if calls is None:
                calls = RowCalls(kind, [], None if tables is None else [])
                found[key] = calls
            calls.steps.append(step)
            if tables is not None and calls.tables is not None:
                calls.tables.append(tables[number])
        return list(found.values())

    def _update(self, calls: RowCalls) -> None:
        tables = calls.tables
        # Unless `ready` has found them: then nothing has to be begun or settled.
        if tables is None:
            tables = [self._begin(step) for step in calls.steps]
        new = self._run(calls, tables)
        for step in calls.steps:
            slots = step.slots[self._optimizer]
            if calls.tables is None:
                for cell in (step.cell, *slots.with_rows):
                    cell.settle()
            # After all calls: each of them reads the slots as they were before the
            # push.
            for cell, leaf in zip(slots.shared, new, strict=True):
                cell.overwrite()[...] = leaf
                cell.settle()

    def _begin(self, step: RowStep) -> list[np.ndarray]:
        slots = step.slots[self._optimizer]
        cells = (step.cell, *slots.with_rows)
        return [as_rows(cell.begin_rows(step.indices)) for cell in cells]

    def _run(
        self, calls: RowCalls, tables: Sequence[list[np.ndarray]]
    ) -> list[np.ndarray]:
        """Updates the rows of all steps in the calls; returns the new slots without
        rows."""
        kind, steps = calls.kind, calls.steps
        shared = [cell.look() for cell in steps[0].slots[self._optimizer].shared]
        if kind.loop is not None:
            with kind.layout.rule.tree.arithmetic():
                constants, others = kind.loop.start(shared, steps[0].operands)
            update = kind.loop.program.update
            # Before any row is written, as there may be no memory for copies of them.
            gradients = [np.ascontiguousarray(step.gradient) for step in steps]
            for step, arrays, each in zip(steps, tables, gradients, strict=True):
                update(constants, arrays, step.indices, each)
            return others
        sizes = calls.sizes
        new: list[np.ndarray] | None = None
        packed = pack([len(step.indices) for step in steps], kind.most)
        for pieces, size in zip(packed, sizes, strict=True):
            try:
                program = self._kinds.program(kind, size, steps[0].cell)
                _gather(program, pieces, steps, tables)
                with kind.layout.rule.tree.arithmetic():
                    fresh, others = program.run(shared, steps[0].operands)
            except Exception as error:
                # Goes to the caller. Only XLA itself can fail here, out of memory say.
                if new is not None:  # some rows are written and others are not
                    lose(self._optimizer, steps, error)
                raise
            _scatter(pieces, steps, tables, fresh)
            if new is None:
                # These slots advance once, however many calls the rows take.
                new = others
        assert new is not None
        return new


def _converted(cell: Cell, dtype: np.dtype) -> Cell:
    try:
        new = cell.sibling(cell.shape[1:], dtype)
    except MemoryError:
        raise ResourceExhaustedError(
            f"{cell.who}: not enough memory to convert them to {dtype.name}"
        ) from None
    np.copyto(new.look(), cell.look(), casting="unsafe")
    new.who = cell.who
    return new


def _gather(
    program: RowProgram,
    pieces: Sequence[RowRun],
    steps: Sequence[RowStep],
    tables: Sequence[list[np.ndarray]],
) -> None:
    """Copies the rows of one call to the memory that its program reads, and zeros the
    padding, so that nothing overflows there."""
    at = 0
    for update, start, stop in pieces:
        step = steps[update]
        indices, end = step.indices[start:stop], at + stop - start
        # The last buffer is the gradient's, which has no table.
        for table, buffer in zip(tables[update], program.opaque, strict=False):
            take_rows(table, indices, buffer[at:end])
        program.inputs[-1][at:end] = step.gradient[start:stop]
        at = end
    # The buffers still have rows of earlier calls.
    if at < len(program.inputs[-1]):
        for buffer in program.inputs:
            buffer[at:] = 0


def _scatter(
    pieces: Sequence[RowRun],
    steps: Sequence[RowStep],
    tables: Sequence[list[np.ndarray]],
    fresh: Sequence[np.ndarray],
) -> None:
    """Copies the new rows of one call back to the tables."""
    at = 0
    for update, start, stop in pieces:
        indices, end = steps[update].indices[start:stop], at + stop - start
        for table, rows in zip(tables[update], fresh, strict=True):
            put_rows(table, indices, rows[at:end])
        at = end
