"""`Plan`: what one step function communicates, for one signature.

`_discover` finds the plan by tracing the body. It says which variables are read and
updated, which rows are looked up and when, how many elements are drawn from which
iterators, and what the result is. The coordinator needs only the plan; a worker
compiles it into a `CompiledProgram`.

`TracedBody` is the body as a function of arrays, which programs compile. It runs the
program that discovery has found, or else traces the body again. (Prints of the second
trace are suppressed.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp

from zstrat.variables import LOCAL

from . import _refusals
from ._capture import Capture
from ._flow import Replay
from ._iterator import StepIterator
from ._signature import printed_before
from ._structure import ResultLayout, Structure, split

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from zstrat.program.lookup._lookups import PlannedLookup
    from zstrat.variables import (
        GradientCall,
        OptimizerHandle,
        Table,
        VariableHandle,
        VariableSpec,
    )
    from zstrat.wire import UpdateOp

    from ._flow import BodyProgram, SlotsKey
    from .joined import TreeDef


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One update in a plan. ``optimizer`` is the optimizer's id, 0 for none; ``where``
    is the user's line.

    With a ``table`` it updates rows, and ``specs`` are those of the table's components.
    With a ``call`` it applies gradients of a tree to variables of this process.
    """

    specs: tuple[VariableSpec, ...]
    op: UpdateOp
    optimizer: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    where: str
    table: Table | None = None
    call: GradientCall | None = None

    @property
    def spec(self) -> VariableSpec:
        """The spec of the updated variable; for a table, that of its first
        component."""
        return self.specs[0]


class UpdateSet(NamedTuple):
    """Gradients for one optimizer that are sent as one array; ``keys`` (int64 ``[n]``)
    are the keys of their variables, ``spec`` that of the first variable."""

    spec: VariableSpec
    optimizer: int
    keys: np.ndarray


class Sent(NamedTuple):
    """What a step sends as one array or update: an update of its plan, or a set of
    updates; and the numbers of these updates in the plan."""

    update: PlannedUpdate | UpdateSet
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """The body of a step and the arguments of a call, with gaps in place of the inputs
    of the program."""

    fn: Callable[..., Any]
    treedef: TreeDef
    leaves: tuple[Any, ...]
    gaps: tuple[int, ...]
    iterators: tuple[StepIterator, ...]
    elements: tuple[TreeDef, ...]

    def empty(self, elements: Sequence[TreeDef]) -> Template:
        """Returns this template without its arguments, so that they can be freed.

        The template keeps the iterators that the body itself has captured.
        """
        # A template outlives the call for which it was made, and an iterator holds its
        # dataset, its thread and what it has read ahead.
        # Iterators of the arguments get stand-ins; those that the body captured are its
        # own.
        given = set(map(id, self.leaves))
        stand_ins = {
            id(it): StepIterator(None, name=it.name) if id(it) in given else it
            for it in self.iterators
        }
        leaves = [stand_ins.get(id(leaf), leaf) for leaf in self.leaves]
        for gap in self.gaps:
            leaves[gap] = None
        return replace(
            self,
            leaves=tuple(leaves),
            iterators=tuple([stand_ins[id(iterator)] for iterator in self.iterators]),
            elements=tuple(elements),
        )

    def drawn(self, leaves: Sequence[Any]) -> list[Any]:
        """Rebuilds the drawn elements from their leaves."""
        elements, start = [], 0
        for treedef in self.elements:
            end = start + treedef.num_leaves
            elements.append(treedef.unflatten(leaves[start:end]))
            start = end
        return elements

    def run(
        self, capture: Capture, inputs: Sequence[Any]
    ) -> tuple[Structure, list[jax.Array]]:
        """Runs the body under a capture; returns the structure and the arrays of its
        result."""
        leaves = list(self.leaves)
        # The body gets inputs of the program where arrays and numbers were, all else as
        # it was.
        for gap, value in zip(self.gaps, inputs, strict=True):
            leaves[gap] = value
        args, kwargs = self.treedef.unflatten(leaves)
        with capture.recording():
            structure, arrays = split(self.fn(*args, **kwargs), capture.read)
            return structure, [jnp.asarray(array) for array in arrays]


@dataclass(frozen=True, eq=False)
class Plan:
    """What one step function reads, draws, updates and returns, for one signature.

    Args:
        draws: For each draw the number of the iterator, in order; iterators among the
            arguments come before those of ``captured``.
        out_specs: Specs of the arrays of the result.
        variables, targets: The handles of ``reads``; the handles and optimizers of
            ``updates``.
        lookups: In the order of the body.
        moves: Updates that the program itself executes: variables and operation.
        downcast_leaves: Leaves of arguments and elements that must fit 32 bits: by
            number, each with a description of where it is, for messages.
        taken: Leaves that are ids of lookups, and keep all their bits.
        wide: Leaves that keep all their bits, because ids of hash tables are computed
            from them.
        watch: Checks all other leaves of more than 32 bits.
        calls: Calls of ``apply_gradients`` whose gradients parameter servers apply.
        sent: What a step sends, in order.
    """

    function: str
    reads: tuple[VariableSpec, ...]
    updates: tuple[PlannedUpdate, ...]
    draws: tuple[int, ...]
    out_structure: Structure
    out_specs: tuple[jax.ShapeDtypeStruct, ...]
    has_inputs: bool
    has_effects: bool
    asked_context: bool
    variables: tuple[VariableHandle, ...]
    targets: tuple[tuple[tuple[VariableHandle, ...], OptimizerHandle | None], ...]
    lookups: tuple[PlannedLookup, ...] = ()
    moves: tuple[tuple[tuple[VariableSpec, ...], UpdateOp], ...] = ()
    downcast_leaves: Mapping[int, str] = field(default_factory=dict)
    calls: tuple[GradientCall, ...] = ()
    taken: frozenset[int] = frozenset()
    wide: frozenset[int] = frozenset()
    watch: Callable[[Sequence[Any]], None] | None = None
    captured: tuple[StepIterator, ...] = ()
    sent: Sequence[Sent] = ()

    @property
    def has_lookups(self) -> bool:
        """Whether a step reads rows of tables, whose ids may differ at each run."""
        return bool(self.lookups)

    @property
    def levels(self) -> int:
        """Number of successive requests before a step can run."""
        return 1 + max((lookup.level for lookup in self.lookups), default=0)

    @property
    def specs(self) -> list[VariableSpec]:
        """Specs of all variables that a step reads, updates, or looks up rows in."""
        tables = [lookup.table.components for lookup in self.lookups]
        found = [*self.reads, *(v.spec for components in tables for v in components)]
        found += [spec for update in self.updates for spec in update.specs]
        found += [spec for specs, _ in self.moves for spec in specs]
        return list(dict.fromkeys(found))

    @property
    def read_only(self) -> bool:
        """Whether a step updates nothing."""
        return not self.updates and not self.moves

    @property
    def is_constant(self) -> bool:
        """Whether every run has the same result and no effects."""
        # What could differ between runs, or has to happen at each.
        moving = self.has_inputs or self.draws or not self.read_only
        return not (moving or self.reads or self.lookups) and not self.has_effects

    @cached_property
    def layout(self) -> ResultLayout:
        """Describes how the result is rebuilt from its arrays; always the same
        object."""
        return ResultLayout(
            tuple(spec.dtype.name for spec in self.out_specs),
            tuple(spec.shape for spec in self.out_specs),
            self.out_structure.plain,
        )

    def require_same(self, capture: Capture, structure: Structure) -> None:
        """Refuses a second trace of the body that differs from the one that made the
        plan.

        Raises:
            RuntimeError: The body depends on more than its arguments.
        """
        traced = [
            (tuple([v.spec for v in update.variables]), update.op)
            for update in capture.updates
        ]
        planned = [(update.specs, update.op) for update in self.updates]
        # The outputs of the second trace are taken by place, so all of these have to
        # agree.
        if traced != planned or capture.moves.notes != list(self.moves):
            raise _refusals.changed(self.function, "it made other updates")
        looked = [(lookup.table, lookup.ids.shape) for lookup in capture.lookups]
        if looked != [(lookup.table, lookup.shape) for lookup in self.lookups]:
            raise _refusals.changed(self.function, "it made other lookups")
        if tuple(capture.draws) != self.draws:
            raise _refusals.changed(self.function, "it drew other elements")
        if structure != self.out_structure:
            raise _refusals.result_changed(
                self.function, *self.out_structure.difference(structure)
            )

    def require_shared(self) -> None:
        """Refuses a plan that other tasks cannot run: one that updates variables of
        this process, or looks up rows in them. (Values that a step reads can be sent
        with it.)

        Raises:
            ValueError: The plan does so; names the variables.
        """
        who = f"the step function {self.function!r}"
        changed = [spec for update in self.updates for spec in update.specs]
        changed += [spec for specs, _ in self.moves for spec in specs]
        if local := [str(spec) for spec in changed if spec.ps == LOCAL]:
            raise _refusals.not_shared(f"{who} updates", *dict.fromkeys(local))
        tables = [part for x in self.lookups for part in x.table.components]
        if local := [str(part.spec) for part in tables if part.spec.ps == LOCAL]:
            raise _refusals.not_shared(f"{who} looks up rows in", *dict.fromkeys(local))


class BodyOutputs(NamedTuple):
    """The outputs of a body: arrays of its result, operands of each update, values and
    slots of the variables that its program updates itself, and ids of its lookups."""

    results: list[jax.Array]
    operands: list[list[jax.Array]]
    moved: list[jax.Array]
    slots: list[list[jax.Array]]
    ids: list[jax.Array]


def outputs_of(
    capture: Capture,
    arrays: list[jax.Array],
    moved: Sequence[int] | None = None,
    slots: Sequence[SlotsKey] | None = None,
) -> BodyOutputs:
    """Collects the outputs of a trace. ``moved``, ``slots``: keys of the values and
    slots to return, which the program has updated itself; None: all that it has
    updated."""
    moves = capture.moves
    return BodyOutputs(
        arrays,
        [list(update.operands) for update in capture.updates],
        [moves.values[key][1] for key in (moves.values if moved is None else moved)],
        [moves.slots[key][2] for key in (moves.slots if slots is None else slots)],
        [lookup.ids for lookup in capture.lookups],
    )


@final
@dataclass(frozen=True, slots=True)
class TracedBody:
    """The body of one plan, as a function of arrays.

    ``moved`` and ``slots`` are the keys of the variables and slots that the program
    updates itself, in order; ``program`` is None if the body must be traced again.
    """

    plan: Plan
    template: Template
    moved: list[int]
    slots: list[SlotsKey]
    program: BodyProgram | None

    def takes(self, values: Mapping[int, Any]) -> bool:
        """Returns whether the program was traced with values of these shapes and dtypes
        for its variables."""
        if self.program is None:
            return True  # a new trace takes any
        kinds = {key: self.program.kind_of(("value", key)) for key in values}
        return all(
            kind is None
            or (kind.shape, kind.dtype) == (values[key].shape, values[key].dtype)
            for key, kind in kinds.items()
        )

    def replayed(self) -> TracedBody:
        """Returns this body without its program, so that it is traced again."""
        return replace(self, program=None)

    def __call__(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        values: Mapping[int, Any],
        rows: Sequence[Any] = (),
        slots: Mapping[SlotsKey, list[Any]] | None = None,
    ) -> BodyOutputs:
        """Computes the outputs; called in a trace of jax.

        Args:
            leaves: Leaves of the elements that the body draws.
            values: Values of the variables that it reads, by key.
            rows: Rows of its lookups.

        Raises:
            RuntimeError: The body does something else than in its first trace.
        """
        slots = {} if slots is None else slots
        if self.program is None:
            return self._again(inputs, leaves, values, rows, slots)
        # The names that `Discovery` gave to placeholders.
        known: dict[Any, Any] = {("value", key): x for key, x in values.items()}
        known.update({("rows", n): x for n, x in enumerate(rows)})
        for key, arrays in slots.items():
            known.update({("slot", *key, n): x for n, x in enumerate(arrays)})
        given = iter(leaves)
        for drawn, treedef in enumerate(self.template.elements):
            for n in range(treedef.num_leaves):
                known["element", drawn, n] = next(given)
        outputs: BodyOutputs = self.program(inputs, known)
        return outputs

    def _again(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        values: Mapping[int, Any],
        rows: Sequence[Any],
        slots: Mapping[SlotsKey, list[Any]],
    ) -> BodyOutputs:
        # The second trace gets real inputs for all that the first one made up.
        drawn = self.template.drawn(leaves)
        feed = Replay(self.plan.function, dict(values), drawn, rows, slots)
        capture = Capture(feed, self.template.iterators)
        with printed_before():
            structure, arrays = self.template.run(capture, inputs)
        self.plan.require_same(capture, structure)
        return outputs_of(capture, arrays, self.moved, self.slots)
