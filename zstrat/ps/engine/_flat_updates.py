"""Updates many small variables as one concatenated array.

This is for optimizers that update each element by itself. A program of one small
variable computes for a microsecond and takes thirty to start, and a program of a
hundred arrays takes as long as a hundred programs: XLA runs its parts one by one. So
the values of small variables that are updated alike are concatenated to one array, as
are their slots and gradients (`zstrat.ps.store._flat`), and one program of these arrays
updates all of the variables. Every element is computed by the same operations either
way.

The gradients of a push are concatenated, unless they arrived so (`zstrat.wire`). Values
and slots are concatenated from the last update, unless that update was of other
variables, or one of them was changed otherwise since; then they are concatenated again.

Nothing is donated, so that an update which fails has changed nothing.

One `SlotLayouts` belongs to one optimizer. It knows the slots that the transformation
keeps for a variable (by shapes alone, nothing is computed), and names the optimizer in
errors. Layouts have numbers, so that variables with the same layout share programs.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import jax
import numpy as np

from zstrat.errors import BusyError, InvalidArgumentError, ResourceExhaustedError
from zstrat.memory import aligned
from zstrat.optimizers import elementwise
from zstrat.ps.store._flat import Flat
from zstrat.wire import in_sets

from ._slots import LAYOUTS, SlotArray, Slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.optimizers import ElementwiseUpdate, LeafRule
    from zstrat.ps.store._cell import Cell

    from ._slots import Gradients, SlotStep, Unbound


Shape = jax.ShapeDtypeStruct
Context = contextlib.AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The shapes and dtypes of a variable and of its slots, and the rule of all
    variables that are updated alike."""

    value: Shape
    rule: LeafRule
    leaves: tuple[Shape, ...]
    about: tuple[SlotArray, ...]

    @property
    def by_rows(self) -> bool:
        """Whether the optimizer can update some rows of such a variable alone."""
        return not self.rule.row_dependence


class SlotLayouts:
    """The layouts of one optimizer, by number."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Also on a machine with accelerators, whose memory is for programs of steps.
        self._device = jax.local_devices(backend="cpu")[0]
        self._numbers: dict[SlotLayout, int] = {}
        self._layouts: list[SlotLayout] = []
        self._initial: dict[tuple[LeafRule, tuple[int, ...], np.dtype], int] = {}

    def __getitem__(self, number: int) -> SlotLayout:
        return self._layouts[number]

    def initial(self, rule: LeafRule, cell: Cell) -> int:
        """Returns the number of the layout that the initial slots of a variable have.

        Raises:
            InvalidArgumentError: The transformation cannot be traced for this shape.
            BusyError: Programs have been compiled for too many shapes.
        """
        dims = cell.shape
        if cell.grows:  # one layout for all heights
            dims = (rule.kind.shape[0], *dims[1:])
        key = (rule, dims, cell.dtype)
        number = self._initial.get(key)
        if number is None:
            with rule.tree.arithmetic(), self.naming(cell), self.on_cpu():
                kinds = rule.kinds(dims[0] if dims else None)
            about = tuple([SlotArray(slot.name, slot.rows) for slot in rule.slots])
            value = shape(dims, cell.dtype)
            layout = SlotLayout(value, rule, tuple(map(spec, kinds)), about)
            number = self._initial[key] = self.number(layout)
        return number

    def adopted(self, unbound: Unbound, rule: LeafRule, cell: Cell) -> Slots:
        """Converts slots that were loaded before their update rule was known to slots
        of the rule.

        Raises:
            InvalidArgumentError: The loaded slots are not those of the rule, or some
                are missing.
        """
        layout = self._layouts[self.initial(rule, cell)]
        pairs = zip(layout.about, layout.leaves, strict=True)
        wanted = [(leaf, tuple(s.shape), np.dtype(s.dtype)) for leaf, s in pairs]
        cells = unbound.taken(wanted, f"optimizer {self.name!r}")
        # With the heights of the layout, which those of a table do not have.
        leaves = tuple(
            shape(dims, cell.dtype)
            for cell, (_, dims, _) in zip(cells, wanted, strict=True)
        )
        number = self.number(SlotLayout(layout.value, rule, leaves, layout.about))
        return Slots(cells, layout.about, number)

    def number(self, layout: SlotLayout) -> int:
        """Returns the number of a layout; a new layout gets the next number.

        Raises:
            BusyError: Programs have been compiled for too many shapes.
        """
        number = self._numbers.get(layout)
        if number is None:
            if len(self._layouts) >= LAYOUTS:
                raise BusyError(
                    f"{LAYOUTS} shapes have optimizer slots in this session already"
                )
            number = self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return number

    def on_cpu(self) -> Context:
        """Returns a context in which jax computes on the CPU, whatever other devices
        the machine has."""
        return cast("Context", jax.default_device(self._device))

    @contextlib.contextmanager
    def naming(self, cell: Cell) -> Iterator[None]:
        """Adds the names of the optimizer and the variable to errors raised while the
        body traces or compiles."""
        try:
            yield
        except Exception as error:  # goes to the caller, with the optimizer's name
            raise InvalidArgumentError(
                f"optimizer {self.name!r} cannot be applied to {cell.dtype.name}"
                f"{list(cell.shape)}: {type(error).__name__}: {error}"
            ) from error


def spec(array: Any) -> Shape:
    """Returns the shape and dtype of an array without jax's weak type, which would make
    equal slots look different."""
    return shape(array.shape, array.dtype)


def shape(dims: tuple[int, ...], dtype: Any) -> Shape:
    return jax.ShapeDtypeStruct(dims, dtype)  # type: ignore[no-untyped-call]


def operands_of(rule: LeafRule) -> tuple[Shape, ...]:
    """Returns the shapes and dtypes of the operands that a rule takes."""
    kinds = rule.tree.cut().operand_kinds
    return tuple([spec(kinds[number]) for number in rule.uses])


FEWEST: Final = 4
"""The fewest variables that are worth an array of their own."""

PROGRAMS: Final = 64
"""The most programs of one optimizer for concatenated variables: each set of variables
has one for the sum of its sizes."""

Kinds = tuple[tuple[int, "np.dtype"], ...]
"""For each variable, the number of the layout of its slots, and the dtype of its
gradient."""


@dataclass(slots=True)
class FlatGroup:
    """Updates of a push that one program makes: their indices in the push (``places``),
    and the first of them (``step``). ``cells`` are the values of all, and then each
    slot of all."""

    key: tuple[Any, int]
    rule: ElementwiseUpdate
    places: Sequence[int]
    step: SlotStep
    cells: Sequence[Sequence[Cell]]
    flats: Sequence[Flat | None] = ()
    """For each of ``cells``, the array that concatenates exactly these cells, as
    `locate` has found; None if there is none."""

    def locate(self) -> bool:
        """Finds the arrays that concatenate the cells now. Returns whether one program
        can make the updates, which needs each scalar slot to be equal for all
        variables."""
        self.flats = [Flat.of(each) for each in self.cells]
        every = zip(self.cells[1:], self.flats[1:], self.rule.by_element, strict=True)
        return all(
            by_element or flat is not None or _are_equal(cells)
            for cells, flat, by_element in every
        )


@dataclass(slots=True)
class StartedUpdate:
    """The update of a group, which XLA is computing: the new values, then the new
    slots."""

    group: FlatGroup
    made: Sequence[Any]

    def wait(self) -> None:
        """Waits until the update is computed. Raises the error of XLA if that fails."""
        jax.block_until_ready(self.made)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Replaces the values and slots of the variables by the computed ones."""
        group = self.group
        for cells, flat, value in zip(group.cells, group.flats, self.made, strict=True):
            if flat is not None:
                flat.become(value)
                continue
            parts = [cell.part for cell in cells]
            before = {part.flat for part in parts if part is not None}
            # Alive, they would count as left in their old arrays (`Flat.shrink`).
            del parts
            Flat(value, cells)
            for each in before:
                if each is not None:
                    each.shrink()
        group.flats = ()  # which would hold their memory until the next push


@dataclass(slots=True)
class FlatUpdates:
    """The programs of one optimizer for concatenated variables, by the update of an
    element and the number of elements."""

    optimizer: int
    layouts: SlotLayouts
    programs: dict[tuple[Any, int], Any] = field(default_factory=dict)
    _rules: dict[tuple[int, np.dtype], ElementwiseUpdate | None] = field(
        default_factory=dict
    )
    _divided: dict[object, list[list[int]]] = field(default_factory=dict)
    _gradients: dict[tuple[Any, int], np.ndarray] = field(default_factory=dict)
    """For each program, the array into which the gradients of a push are
    concatenated."""

    def groups(self, steps: Sequence[SlotStep], kinds: Kinds) -> list[FlatGroup]:
        """Returns the groups of updates that one program each can make, if
        `FlatGroup.locate` agrees. The slots of the updates exist, and keep their
        layouts."""
        if len(steps) < FEWEST:
            return []
        uses = [step.uses for step in steps]
        name = kinds, tuple(uses)
        divided = self._divided.get(name)
        if divided is None:
            # Where sets change with each push, nothing that is remembered is of use.
            if len(self._divided) >= PROGRAMS:
                self._divided.clear()
            divided = self._divided[name] = self._divide(kinds, uses)
        found = [self._group(places, steps, kinds) for places in divided]
        return [group for group in found if group is not None]

    def prepare(self, group: FlatGroup) -> None:
        """Compiles the program of a group; call this in the context
        `SlotLayouts.on_cpu`."""
        if group.key in self.programs:
            return
        step, count = group.step, group.key[1]
        given = (
            shape((count,), step.cell.dtype),
            [
                shape((count,) if is_flat else (), cells[0].dtype)
                for cells, is_flat in zip(
                    group.cells[1:], group.rule.by_element, strict=True
                )
            ],
            shape((count,), step.dtype),
            operands_of(step.rule),
        )
        with step.rule.tree.arithmetic():
            call = jax.jit(group.rule.run).lower(*given).compile()
        self.programs[group.key] = call
        # One for each program: `start` waits before another group writes to it.
        self._gradients[group.key] = aligned((count,), step.dtype)

    def start(self, group: FlatGroup, gradients: Gradients) -> StartedUpdate:
        """Starts the update of a group in XLA, which may compute it later; changes no
        value.

        Raises:
            UnavailableError: A value was lost.
            ResourceExhaustedError: There is no memory to concatenate values.
        """
        try:
            return self._start(group, gradients)
        except MemoryError:
            raise ResourceExhaustedError(
                f"{group.step.cell.who}: not enough memory to copy it together "
                f"with {len(group.places) - 1} others"
            ) from None

    def _start(self, group: FlatGroup, gradients: Gradients) -> StartedUpdate:
        is_flat = (True, *group.rule.by_element)
        value, *others = [
            flat.value if flat is not None else _joined(each, by_element)
            for each, flat, by_element in zip(
                group.cells, group.flats, is_flat, strict=True
            )
        ]
        # Where they are, if they came side by side: XLA reads them without a copy.
        given = gradients.together(group.places)
        gradient = given
        if gradient is None:
            gradient = self._gradients[group.key]
            each = [gradients[place].reshape(-1) for place in group.places]
            np.concatenate(each, out=gradient)
        rule = group.step.rule
        with rule.tree.arithmetic():
            call = self.programs[group.key]
            operands = gradients.operands_for(group.step.uses)
            moved, after = call(value, others, gradient, operands)
        update = StartedUpdate(group, [moved, *after])
        if given is None:
            # A group of as many elements has the same memory for gradients, and XLA
            # reads them where they are.
            update.wait()
        return update

    def _divide(self, kinds: Kinds, uses: Sequence[object]) -> list[list[int]]:
        """Groups the indices of updates that have the same update of an element and the
        same operands, as many in a group as fit."""
        found: dict[Any, list[int]] = {}
        for place, kind in enumerate(kinds):
            rule = self._rule(*kind)
            if rule is not None:
                found.setdefault((rule.form, uses[place]), []).append(place)
        divided: list[list[int]] = []
        for places in found.values():
            sizes = [_bytes_of(self.layouts[kinds[at][0]].value) for at in places]
            for some in in_sets(sizes, FEWEST):
                divided.append([places[at] for at in some])  # noqa: PERF401 (clearer)
        return divided

    def _group(
        self, places: Sequence[int], steps: Sequence[SlotStep], kinds: Kinds
    ) -> FlatGroup | None:
        members = [steps[place] for place in places]
        rule = self._rule(*kinds[places[0]])
        assert rule is not None
        key = rule.form, sum([step.cell.size for step in members])
        # These are updated one by one.
        if key not in self.programs and len(self.programs) >= PROGRAMS:
            return None
        slots = zip(*[x.slots[self.optimizer].cells for x in members], strict=True)
        cells = [[step.cell for step in members], *slots]
        return FlatGroup(key, rule, places, members[0], cells)

    def _rule(self, number: int, gradient: np.dtype) -> ElementwiseUpdate | None:
        kind = number, gradient
        # That there is none is remembered, too: finding out takes a trace.
        if kind not in self._rules:
            layout = self.layouts[number]
            dtypes = tuple([np.dtype(leaf.dtype) for leaf in layout.leaves])
            with layout.rule.tree.arithmetic():
                found = elementwise(layout.rule, layout.value.shape, dtypes)
            self._rules[kind] = found
        return self._rules[kind]


def _bytes_of(value: Any) -> int:
    elements, dtype = math.prod(value.shape), np.dtype(value.dtype)
    return int(elements * dtype.itemsize)


def _are_equal(cells: Sequence[Cell]) -> bool:
    """Returns whether the scalars in cells are equal, bit for bit; False if one was
    lost."""
    # Then they are updated one by one, and the one that was lost raises its error.
    if any(cell.lost for cell in cells):
        return False
    return len({cell.look().tobytes() for cell in cells}) == 1


def _joined(cells: Sequence[Cell], by_element: bool) -> np.ndarray:
    """Returns the values of cells concatenated in one array; or, if they are equal
    scalars, that scalar."""
    if not by_element:
        cells[0].require()
        return cells[0].look()
    out = aligned((sum([cell.size for cell in cells]),), cells[0].dtype)
    for cell in cells:
        cell.require()
    np.concatenate([cell.look().reshape(-1) for cell in cells], out=out)
    return out
