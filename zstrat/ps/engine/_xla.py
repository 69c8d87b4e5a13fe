"""Applies whole gradients by XLA. Imported with the first optimizer, never at start-up.

`UpdatePrograms` holds the compiled programs of one optimizer. A program updates one
variable: ``(value, slots, gradient, operands) -> (value, slots)``, value and slots
donated. It is compiled ahead of its first use, so that a transformation which cannot be
traced for a shape is refused before anything has changed. Gradients of some rows have
programs of their own (`_row_updates`), and the same slots.

Where it is faster, one program updates all variables of a push (`JointPrograms`).
Separate programs are started one by one, and each wakes threads of XLA; six of them,
for the layers of a small network, take a fifth longer than one program for all six. For
large variables this does not matter, and for very small ones a joint program is slower,
because XLA runs its parts on several threads. So pushes of a few variables of some size
are updated together, and all others one by one. Every element is computed by the same
operations either way. A push that names other variables than the one before needs a
program of its own, so only so many sets of variables have one.

Many small variables that are updated element by element are concatenated to one array
(`FlatUpdates`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import jax

from zstrat.ps.store._cell import Cell, Write

from ._flat_updates import (
    Context,
    FlatGroup,
    FlatUpdates,
    Kinds,
    SlotLayout,
    SlotLayouts,
    StartedUpdate,
    operands_of,
    shape,
    spec,
)
from ._row_updates import RowUpdates
from ._slots import Ahead, Slots, SlotStep, Unbound, lose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from zstrat.optimizers import LeafRule, TreeRule

    from ._row_updates import RowCalls
    from ._slots import Gradients, RowStep


@dataclass(frozen=True, slots=True)
class UpdateProgram:
    """A compiled update of one variable. ``after`` is the number of the layout that its
    slots have after the update."""

    call: Any
    after: int
    tree: TreeRule

    def start(
        self, optimizer: int, step: SlotStep, gradients: Gradients, place: int
    ) -> Any:
        """Starts the update of a step in XLA, which may compute it later; returns the
        new value."""
        gradient, cell, slots = gradients[place], step.cell, step.slots[optimizer]
        # With the settings of its tree: jax would make 32 bits of a float64 argument.
        with self.tree.arithmetic():
            given = tuple([leaf.give() for leaf in slots.cells])
            value, leaves = self.call(
                cell.give(), given, gradient, gradients.operands_for(step.uses)
            )
        cell.take_back(value)
        # Nearly always: the dtypes of slots change with the first gradient alone.
        if slots.layout == self.after:
            for leaf, new in zip(slots.cells, leaves, strict=True):
                leaf.take_back(new)
        else:
            slots.become(tuple(map(Cell.on_device, leaves)), self.after)
        return value


@dataclass(frozen=True, slots=True)
class Division:
    """The programs for the updates of a push: one for all (``is_joint``), or one for
    each of ``groups`` and one for each update whose index is in ``alone``. Valid while
    their slots keep their layouts."""

    kinds: Kinds
    is_joint: bool
    groups: Sequence[FlatGroup]
    alone: Sequence[int]

    @property
    def is_flat(self) -> bool:
        """Whether all updates are in groups, so that they take as long as numpy
        would."""
        return not self.is_joint and not self.alone

    @property
    def is_in_place(self) -> bool:
        """Whether all values are in concatenated arrays of XLA, so that none was
        lost."""
        return self.is_flat and all(group.flats[0] is not None for group in self.groups)

    def at_present(self) -> Division:
        """Returns the division for the slots as they are now: updates of groups whose
        scalar slots are no longer equal become ``alone``."""
        apart = {
            place for each in self.groups if not each.locate() for place in each.places
        }
        if not apart:
            return self
        groups = [each for each in self.groups if each.places[0] not in apart]
        return replace(self, groups=groups, alone=sorted([*self.alone, *apart]))


@dataclass(frozen=True, slots=True)
class KnownDivision:
    """The latest steps, with the slots and layouts for which their ``division`` is
    valid."""

    steps: Sequence[SlotStep] = ()
    slots: Sequence[tuple[Cell, ...]] = ()
    layouts: Sequence[int] = ()
    division: Division = field(default_factory=lambda: Division((), False, (), ()))


class UpdatePrograms:
    """The compiled programs of one optimizer, by the layouts and dtypes that they
    take."""

    def __init__(self, optimizer: int, name: str) -> None:
        self._optimizer = optimizer
        self._layouts = SlotLayouts(name)
        self._programs: dict[object, UpdateProgram] = {}
        self._initials: dict[int, Any] = {}
        self._after: dict[tuple[int, np.dtype], int] = {}
        self._joint = JointPrograms(optimizer, self._layouts)
        self._flat = FlatUpdates(optimizer, self._layouts)
        self.rows = RowUpdates(optimizer, self._layouts)
        self._known = KnownDivision()

    @property
    def count(self) -> int:
        """Number of programs that have been compiled."""
        alone = len(self._programs) + len(self._initials)
        several = len(self._joint.programs) + len(self._flat.programs)
        return alone + several + self.rows.count

    def on_cpu(self) -> Context:
        """Returns the context in which programs are traced and compiled, on the CPU."""
        return self._layouts.on_cpu()

    def division(self, steps: Sequence[SlotStep]) -> Division | None:
        """Returns how these updates share programs, as long as no other request uses
        their variables; None if slots have to be made, or may change before. For
        steps that were given the last time (`AlikePushes`) this does no work for each
        step."""
        number, known = self._optimizer, self._known
        try:
            slots = [step.slots[number] for step in steps]
        except KeyError:
            return None
        cells, layouts = [x.cells for x in slots], [x.layout for x in slots]
        if (
            # `is not`: the steps of a push like the one before are the same list
            # (`AlikePushes`).
            known.steps is not steps
            or known.layouts != layouts
            or not all(map(is_, known.slots, cells))
        ):
            if any([step.late for step in steps]):  # noqa: C419 (a generator is slower)
                return None
            kinds = self._kinds(steps)
            if not all(self._after.get(kind) == kind[0] for kind in {*kinds}):
                # Slots change their layout in their first update alone: a program for
                # several would be compiled for one use.
                return Division(kinds, False, (), range(len(steps)))
            division = self._divide(steps, kinds)
            known = self._known = KnownDivision(steps, cells, layouts, division)
        # In each push, as readers and other updates change where the cells are.
        return known.division.at_present()

    def is_prepared(self, division: Division) -> bool:
        """Returns whether all programs of a division are compiled."""
        kinds = division.kinds
        if division.is_joint:
            return kinds in self._joint.programs
        return all(each.key in self._flat.programs for each in division.groups) and all(
            kinds[place] in self._programs for place in division.alone
        )

    def forget_steps(self) -> None:
        """Drops the steps that `division` remembers, which keep the memory of variables
        alive."""
        self._known = KnownDivision()

    def prepare(
        self, steps: Sequence[SlotStep], rows: Sequence[RowStep], ahead: Ahead
    ) -> None:
        """Compiles the programs that `apply` will need, and makes slots, except those
        that earlier updates of the push still affect (`complete`); changes no value.

        Args:
            rows: Steps whose rows are sorted and distinct.

        Raises:
            InvalidArgumentError: The transformation cannot be traced for this shape.
            BusyError: Programs have been compiled for too many shapes.
            ResourceExhaustedError: There is no memory for slots, or for copies of
                values and slots that readers hold.
        """
        numbers = []
        for step in steps:
            # First: slots that were loaded decide which layout the update has.
            self.adopt(step.slots, step.rule, step.cell)
            numbers.append(self._prepare(step, ahead))
        if steps:
            self._compile_all(steps, numbers)
        if rows:
            for each in rows:
                self.adopt(each.slots, each.rule, each.cell)
            self.rows.prepare(rows, ahead)

    def complete(
        self, steps: Sequence[SlotStep], rows: Sequence[RowStep], ahead: Ahead
    ) -> None:
        """Makes the slots that `prepare` had to leave, when the earlier updates of the
        push are done."""
        for step in steps:
            if self._optimizer not in step.slots:
                step.slots[self._optimizer] = self._initial(step.rule, step.cell)
        self.rows.complete(rows, ahead)

    def apply(
        self,
        steps: Sequence[SlotStep],
        gradients: Gradients,
        rows: Sequence[RowStep] = (),
        ready: Sequence[RowCalls] | None = None,
        division: Division | None = None,
    ) -> None:
        """Applies one gradient to each variable, and waits until all are computed. Each
        variable occurs once.

        Args:
            gradients: The gradients of ``steps``, by index.
            ready: The result of ``rows.ready`` for ``rows``.
            division: The result of `division` for ``steps``.
        """
        # If the rows fail, these are done and are dropped: half of a push must not be
        # seen.
        self._apply(steps, gradients, division)
        if rows:
            try:
                self.rows.apply(rows, ready)
            except BaseException as error:  # to the pusher, and to later readers
                lose(self._optimizer, steps, error)
                raise

    def make_slots(self, rule: LeafRule, cell: Cell) -> Slots:
        """Returns initial slots for a variable; made by rows if the rule can update
        rows.

        Raises: As `prepare`.
        """
        layout = self._layouts[self._layouts.initial(rule, cell)]
        if layout.by_rows or cell.grows:
            return self.rows.initial(rule, cell)
        return self._initial(rule, cell)

    def retype(self, slots: Slots, dtypes: Mapping[int, np.dtype]) -> None:
        """Converts slots with these numbers to other dtypes, as gradients of these
        dtypes would."""
        layout = self._layouts[slots.layout]
        leaves = tuple(
            shape(leaf.shape, dtypes.get(place, leaf.dtype))
            for place, leaf in enumerate(layout.leaves)
        )
        number = self._layouts.number(replace(layout, leaves=leaves))
        self.rows.convert(slots, number)

    def adopt(self, slots: dict[int, Slots], rule: LeafRule, cell: Cell) -> None:
        """Converts loaded slots of a variable to the slots of its rule.

        Raises:
            InvalidArgumentError: The loaded slots are not those of the rule.
        """
        unbound = slots.get(self._optimizer)
        if isinstance(unbound, Unbound):
            slots[self._optimizer] = self._layouts.adopted(unbound, rule, cell)

    def _prepare(self, step: SlotStep, ahead: Ahead) -> int:
        """Makes missing slots, unless earlier updates of the push still affect them;
        returns the number of the layout that the slots have when the update runs."""
        place = (self._optimizer, id(step.cell))
        slots = step.slots.get(self._optimizer)
        # What an earlier update of the push leaves, which is not there yet.
        number = ahead.layouts.get(place)
        if number is None and slots is None:
            number = self._layouts.initial(step.rule, step.cell)
            self._first(step.cell, number)
            # A late update makes its slots when it runs, from the value that it finds
            # then.
            if not step.late:
                slots = step.slots[self._optimizer] = self._initial(
                    step.rule, step.cell
                )
        if number is None:
            assert slots is not None
            number = slots.layout
        # For the next update of this variable in the push.
        ahead.layouts[place] = self._left(step, number)
        for cell in () if slots is None else slots.with_rows:
            ahead.writes.setdefault(id(cell), []).append(Write.GIVE)
        return number

    def _compile_all(self, steps: Sequence[SlotStep], numbers: Sequence[int]) -> None:
        """Compiles the programs of updates whose slots will have the layouts
        ``numbers``."""
        division = self.division(steps)
        if division is not None:
            if division.is_joint:
                with self._layouts.naming(steps[0].cell):
                    self._joint.prepare(steps, division.kinds)
                return
            for group in division.groups:
                with (
                    self._layouts.naming(group.step.cell),
                    self._layouts.on_cpu(),
                ):
                    self._flat.prepare(group)
            steps = [steps[place] for place in division.alone]
            numbers = [numbers[place] for place in division.alone]
        for step, number in zip(steps, numbers, strict=True):
            self._program(step, number)

    def _kinds(self, steps: Sequence[SlotStep]) -> Kinds:
        """Returns the layouts of slots and the dtypes of gradients, which decide about
        programs, of updates whose slots exist."""
        number = self._optimizer
        return tuple([(step.slots[number].layout, step.dtype) for step in steps])

    def _divide(self, steps: Sequence[SlotStep], kinds: Kinds) -> Division:
        """Divides updates among programs; their slots exist, and keep their layouts."""
        if self._joint.takes(steps, kinds):
            return Division(kinds, True, (), ())
        groups = self._flat.groups(steps, kinds)
        taken = {place for group in groups for place in group.places}
        alone = [place for place in range(len(steps)) if place not in taken]
        return Division(kinds, False, groups, alone)

    def _apply(
        self,
        steps: Sequence[SlotStep],
        gradients: Gradients,
        division: Division | None,
    ) -> None:
        """Updates values and slots, and waits until they are computed."""
        started: list[tuple[SlotStep, Any]] = []
        together: list[StartedUpdate] = []
        try:
            found = division or self.division(steps)
            # Their layouts may have changed since the push was planned, so nothing is
            # shared.
            if found is None:  # they come late
                kinds, everything = self._kinds(steps), range(len(steps))
                found = Division(kinds, False, (), everything)
            kinds = found.kinds
            if found.is_joint:
                # Until a value is there, XLA may have begun to write over the old one
                # (`_is_whole`).
                started = [(step, None) for step in steps]
                values = self._joint.start(steps, gradients, kinds)
                started = list(zip(steps, values, strict=True))
            else:
                together.extend(
                    [self._flat.start(group, gradients) for group in found.groups]
                )
                for place in found.alone:
                    step, number = steps[place], kinds[place][0]
                    started.append((step, None))
                    program = self._program(step, number)
                    value = program.start(self._optimizer, step, gradients, place)
                    started[-1] = (step, value)
            # All are started before the first is awaited: XLA computes them side by
            # side.
            for _, value in started:
                value.block_until_ready()
            for update in together:
                update.wait()
            # Not before all are there: a flat program that fails has changed nothing.
            for update in together:
                update.finish()
        except Exception as error:
            # Goes to the caller. Only XLA itself can fail here (it is out of memory,
            # say), and it may have been writing in place: what it had is lost.
            for step, value in started:
                if value is None and _is_whole(step, self._optimizer):
                    continue
                lose(self._optimizer, [step], error)
            raise

    def _initial(self, rule: LeafRule, cell: Cell) -> Slots:
        number = self._layouts.initial(rule, cell)
        call = self._first(cell, number)
        with rule.tree.arithmetic():
            # Waits, because XLA reads the value where numpy may write to it next.
            leaves = [leaf.block_until_ready() for leaf in call(cell.give())]
        cells = tuple(map(Cell.on_device, leaves))
        for each in cells:
            each.who = f"{cell.who}, slots of optimizer {self._layouts.name!r}"
        return Slots(cells, self._layouts[number].about, number)

    def _first(self, cell: Cell, number: int) -> Any:
        """Returns the program that makes initial slots of this layout."""
        call = self._initials.get(number)
        if call is None:
            rule = self._layouts[number].rule
            initial, arithmetic = jax.jit(rule.init), rule.tree.arithmetic
            with arithmetic(), self._layouts.naming(cell), self._layouts.on_cpu():
                call = initial.lower(spec(cell)).compile()
            self._initials[number] = call
        return call

    def _program(self, step: SlotStep, number: int) -> UpdateProgram:
        """Returns the program for variables whose slots have this layout."""
        key = (number, step.dtype)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(step, number)
        return program

    def _compile(self, step: SlotStep, number: int) -> UpdateProgram:
        layout, after = self._layouts[number], self._left(step, number)
        rule, arithmetic = layout.rule, layout.rule.tree.arithmetic
        given = _given(step, layout)
        with (
            arithmetic(),
            self._layouts.naming(step.cell),
            self._layouts.on_cpu(),
        ):
            # Slots whose dtype changes (a bfloat16 variable with float32 gradients, in
            # its first step) have no output that they could be donated to.
            donated = (0, 1) if after == number else (0,)
            call = jax.jit(rule.step, donate_argnums=donated).lower(*given).compile()
        return UpdateProgram(call, after, rule.tree)

    def _left(self, step: SlotStep, number: int) -> int:
        """Returns the number of the layout that an update leaves, if the slots have the
        layout ``number`` before."""
        key = (number, step.dtype)
        after = self._after.get(key)
        if after is None:
            layout = self._layouts[number]
            with layout.rule.tree.arithmetic(), self._layouts.naming(step.cell):
                with self._layouts.on_cpu():
                    given = _given(step, layout)
                    new, leaves = jax.eval_shape(layout.rule.step, *given)
                if spec(new) != layout.value:
                    raise TypeError(f"it turns a {layout.value} into a {spec(new)}")
            moved = replace(layout, leaves=tuple(map(spec, leaves)))
            after = self._after[key] = self._layouts.number(moved)
        return after


def _given(step: SlotStep, layout: SlotLayout) -> tuple[Any, ...]:
    """Returns the shapes and dtypes of the arguments of a program for slots of this
    layout."""
    operands = operands_of(layout.rule)
    return layout.value, layout.leaves, shape(step.cell.shape, step.dtype), operands


def _is_whole(step: SlotStep, optimizer: int) -> bool:
    """Returns whether value and slots still exist: XLA has not begun to overwrite
    them."""
    # XLA deletes a buffer when it takes it, whatever becomes of the call.
    given = [step.cell.give(), *(c.give() for c in step.slots[optimizer].cells)]
    return not any(isinstance(x, jax.Array) and x.is_deleted() for x in given)


MAX_JOINT_VARIABLES: Final = 16
"""The most variables of one joint program, which is compiled in as many tenths of a
second at worst."""

MIN_JOINT_BYTES: Final = 2**20
MAX_JOINT_BYTES: Final = 64 * 2**20
"""The most bytes of values that a joint program updates; above, the cost of starting
several programs does not matter. Below `MIN_JOINT_BYTES`, several small programs are
cheaper than a joint one."""

SETS: Final = 8
"""The most sets of variables that have a joint program."""


@dataclass(slots=True)
class JointPrograms:
    """The joint programs of one optimizer, by the variables that they update."""

    optimizer: int
    layouts: SlotLayouts
    programs: dict[Kinds, Any] = field(default_factory=dict)

    def takes(self, steps: Sequence[SlotStep], kinds: Kinds) -> bool:
        """Returns whether one joint program updates these variables, whose slots keep
        their layouts."""
        return (
            2 <= len(steps) <= MAX_JOINT_VARIABLES
            and MIN_JOINT_BYTES
            <= sum([step.cell.nbytes for step in steps])
            <= MAX_JOINT_BYTES
            and (kinds in self.programs or len(self.programs) < SETS)
            # One program has one width of numbers, and one way to draw them.
            and len({(x.rule.tree.wide, x.rule.tree.random) for x in steps}) == 1
        )

    def prepare(self, steps: Sequence[SlotStep], kinds: Kinds) -> None:
        """Compiles the joint program of these updates; call it in the context
        `SlotLayouts.on_cpu`."""
        if kinds in self.programs:
            return
        rules = [step.rule for step in steps]
        layouts = [self.layouts[number] for number, _ in kinds]
        given = (
            [layout.value for layout in layouts],
            [layout.leaves for layout in layouts],
            [shape(step.cell.shape, step.dtype) for step in steps],
            [operands_of(rule) for rule in rules],
        )

        def update(values: Any, slots: Any, gradients: Any, operands: Any) -> Any:
            each = zip(rules, values, slots, gradients, operands, strict=True)
            return [rule.step(*of_one) for rule, *of_one in each]

        with rules[0].tree.arithmetic(), self.layouts.on_cpu():
            jitted = jax.jit(update, donate_argnums=(0, 1))
            self.programs[kinds] = jitted.lower(*given).compile()

    def start(
        self, steps: Sequence[SlotStep], gradients: Gradients, kinds: Kinds
    ) -> list[Any]:
        """Starts a joint update in XLA, which may compute it later; returns the new
        values."""
        slots = [step.slots[self.optimizer] for step in steps]
        with steps[0].rule.tree.arithmetic():
            made = self.programs[kinds](
                [step.cell.give() for step in steps],
                [tuple([leaf.give() for leaf in each.cells]) for each in slots],
                [gradients[place] for place in range(len(steps))],
                [gradients.operands_for(step.uses) for step in steps],
            )
        for step, each, (value, leaves) in zip(steps, slots, made, strict=True):
            step.cell.take_back(value)
            for leaf, new in zip(each.cells, leaves, strict=True):
                leaf.take_back(new)
        return [value for value, _ in made]
