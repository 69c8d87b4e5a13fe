"""`RowsProgram`: a plan with lookups as compiled programs, for the ids and for the
step.

All programs are parts of the same trace: one for the ids of each level, and the main
one. A program returns ids as one vector per dtype, whatever the number of lookups. A
level whose ids are inputs, or parts of inputs, needs no program.

Gradients of looked-up rows leave the program without their ids: the host has sorted
these ids already, and so has the rows to sum and the servers to send them to. `Lookups`
is one step that runs through these programs.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program._compile import (
    SUMMED,
    Computed,
    outgoing,
    own,
    parted,
    side_by_side,
)
from zstrat.program.trace import _refusals
from zstrat.program.trace._flow import Flow, InputView
from zstrat.program.trace._wide import evaluator, has_whole, with_64_bits
from zstrat.rows import sums

from ._lookups import Level, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zstrat.program._compile import StepResult, StepUpdate
    from zstrat.program.trace._discover import Traced
    from zstrat.program.trace._plan import Plan

    from ._lookups import LevelRequest, LookupBlock


class RowPlace(NamedTuple):
    """The position of a lookup's rows: the level, the block, and the first row in the
    block."""

    level: int
    block: int
    start: int
    shape: tuple[int, ...]


class TraceInputs:
    """Finds the inputs of the trace, by number, in the lists ``given`` and ``blocks``
    of a step."""

    def __init__(self, traced: Traced, places: Sequence[RowPlace]) -> None:
        self.data = traced.inputs
        self._first = traced.inputs + traced.reads
        # Reads that no output needs were dropped from the plan, so the others have
        # other places there than in the trace.
        self._values = {
            traced.inputs + read: traced.inputs + place
            for place, read in enumerate(traced.kept)
        }
        self._places = places

    def of(
        self,
        number: int,
        given: Sequence[Any] | Mapping[int, Any],
        blocks: Sequence[Any],
    ) -> Any:
        """Returns the input of this number; called inside of a program."""
        # The order of the trace's inputs: data, values of reads, rows of lookups.
        if number < self.data:
            return given[number]
        if number < self._first:
            return given[self._values[number]]
        place = self._places[number - self._first]
        rows = blocks[place.level][place.block]
        count = math.prod(place.shape)
        rows = jax.lax.slice_in_dim(rows, place.start, place.start + count)
        return rows.reshape(*place.shape, *rows.shape[1:])

    def givens(self, numbers: Sequence[int]) -> list[int]:
        """Returns the indices in ``given`` of these inputs; leaves out inputs that are
        looked-up rows."""
        return [
            number if number < self.data else self._values[number]
            for number in numbers
            if number < self._first
        ]


class Ids:
    """Makes the ids of one level: takes those that are inputs of the step or parts of
    one, and computes the others with a program."""

    def __init__(
        self,
        level: Level,
        flow: Flow,
        first: int,
        inputs: TraceInputs,
        name: str,
        wide: frozenset[int],
    ) -> None:
        self._views: list[InputView | None] = []
        computed: dict[Any, list[int]] = {}
        places: list[tuple[Any, int, int]] = []
        counts: dict[Any, int] = {}
        for output in [first + number for number in level.order]:
            view = flow.view_of_input(output)
            # These need no program, which would cut them to 32 bits.
            is_given = view is not None and view.number < inputs.data
            self._views.append(view if is_given else None)
            if is_given:
                places.append((None, 0, 0))
                continue
            kind = flow.kind_of(output)
            start = counts.get(kind.dtype.name, 0)
            counts[kind.dtype.name] = start + math.prod(kind.shape)
            places.append((kind.dtype.name, start, counts[kind.dtype.name]))
            computed.setdefault(kind.dtype.name, []).append(output)
        self._places = places
        self._program = (
            _compiled(flow, computed, inputs, name, wide) if computed else None
        )

    def __call__(self, given: list[Any], blocks: list[Any]) -> np.ndarray:
        computed: dict[Any, np.ndarray] = {}
        if self._program is not None:
            vectors = self._program(given, blocks)
            computed = {dtype: np.asarray(ids) for dtype, ids in vectors.items()}
        parts = [
            view.elements(given[view.number])
            if view is not None
            else computed[dtype][start:stop]
            for view, (dtype, start, stop) in zip(
                self._views, self._places, strict=True
            )
        ]
        # Unchecked: `Level.ask` finds what is outside of its table.
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")


def _compiled(
    flow: Flow,
    computed: dict[Any, list[int]],
    inputs: TraceInputs,
    name: str,
    wide: frozenset[int],
) -> Callable[..., Any]:
    """Compiles a program that computes ids, and returns all ids of a dtype as one
    vector."""
    outputs = [output for same in computed.values() for output in same]
    part, needed = flow.part(outputs)
    # Only then: a program with 64 bits converts its inputs at each call.
    is_wide = has_whole(flow) or not wide.isdisjoint(needed)
    if is_wide:
        part, needed = flow.part(outputs, evaluate=evaluator(wide))
    chosen = inputs.givens(needed)

    def program(given: list[Any], blocks: list[Any]) -> Any:
        known = dict(zip(chosen, given, strict=True))
        outputs_made = part(*[inputs.of(number, known, blocks) for number in needed])
        ids = dict(zip(outputs, outputs_made, strict=True))
        vectors = {}
        for dtype, same in computed.items():
            parts = [ids[output].reshape(-1) for output in same]
            # Ids of one dtype in the trace may be wide or not where they are evaluated.
            widest = max([part.dtype for part in parts], key=lambda kind: kind.itemsize)
            vectors[dtype] = jnp.concatenate([part.astype(widest) for part in parts])
        return vectors

    program.__name__ = program.__qualname__ = f"{name}_ids"
    jitted: Callable[..., Any] = jax.jit(program)
    if is_wide:
        places = [n for n, number in enumerate(chosen) if number in wide]
        jitted = with_64_bits(jitted, places)
    return lambda given, blocks: jitted([given[number] for number in chosen], blocks)


class Shared(NamedTuple):
    """Updates (by number) of neighbouring segments ``[first, last)`` of a block, which
    update the same rows that were looked up: the program returns the operands of all of
    them as one array."""

    level: int
    block: LookupBlock
    first: int
    last: int
    updates: tuple[int, ...]


class RowsProgram:
    """The programs of one signature, compiled when they first run.

    In all methods ``given`` are the leaves of arguments and elements and the values of
    ``plan.reads``, in one list; ``blocks`` are the rows of the levels so far, as
    `Level` returns them.
    """

    is_current: Final = True
    """Always True, as in `CompiledProgram`."""

    def __init__(self, plan: Plan, traced: Traced) -> None:
        self.plan = plan
        self.constant: StepResult | None = None
        self._name = plan.function.rpartition(".")[2]
        self.levels = [_level(plan, number) for number in range(plan.levels)]
        flow = Flow(traced.closed)
        self._operands = _operands(plan)
        inputs = TraceInputs(traced, _places(self.levels, plan))
        # The ids of lookups are the last outputs of the trace.
        first = len(traced.closed.jaxpr.outvars) - len(plan.lookups)
        self._ids = [
            None
            if level is None
            else Ids(level, flow, first, inputs, self._name, plan.wide)
            for level in self.levels
        ]
        # Before the main program, which returns shared rows as one array and without
        # their ids.
        self._shared = _shared(plan, self.levels, flow, self._operands, first)
        together = {number for shared in self._shared for number in shared.updates}
        for number, update in enumerate(plan.updates):
            table = update.table
            if table is not None and table.is_hashed and number not in together:
                raise _refusals.hashed_update(table, update.where)
        self._sent = [x for x in plan.sent if x.numbers[0] not in together]
        self._main = self._compiled(flow, inputs)
        self._traced = False

    def ids(self, number: int, given: list[Any], blocks: list[Any]) -> np.ndarray:
        """Computes the ids of a level, as one vector in the level's order."""
        ids = self._ids[number]
        assert ids is not None
        with _refusals.translated_errors(self.plan.function):
            return ids(given, blocks)

    def __call__(self, given: list[Any], blocks: list[Any]) -> Outputs:
        """Runs the main program; may return before the results are ready."""
        if self._traced:
            return Outputs(*self._main(given, blocks))
        with _refusals.translated_errors(self.plan.function):
            outputs = Outputs(*self._main(given, blocks))
        self._traced = True
        return outputs

    def updates(
        self, outputs: Outputs, asked: Sequence[LevelRequest | None]
    ) -> list[StepUpdate]:
        """Makes the updates of the step, in the order of the body.

        Raises:
            IndexError: An index is outside of its table.
        """
        found: dict[int, list[StepUpdate]] = {}
        for shared, rows in zip(self._shared, outputs.shared, strict=True):
            level, request = self.levels[shared.level], asked[shared.level]
            assert level is not None
            assert request is not None
            segments = shared.block.segments[shared.first : shared.last]
            summed = sums(level.runs_of(request, segments), np.asarray(rows))
            parts = level.parts_of(request, segments)
            for number, segment_parts in zip(shared.updates, parts, strict=True):
                found[number] = parted(self.plan.updates[number], summed, segment_parts)
        for (update, numbers), operands in zip(
            self._sent, outputs.operands, strict=True
        ):
            found[numbers[0]] = outgoing(update, operands)
        # In the order of the body, though shared updates were made first.
        return [step for number in sorted(found) for step in found[number]]

    def _compiled(self, flow: Flow, inputs: TraceInputs) -> Callable[..., Any]:
        results = range(len(self.plan.out_specs))
        alone = [[self._operands[n] for n in each.numbers] for each in self._sent]
        rows = [[self._operands[n][1] for n in s.updates] for s in self._shared]
        wanted = [
            *results,
            *(n for each in alone for operands in each for n in operands),
            *(n for numbers in rows for n in numbers),
        ]
        # With effects: prints and callbacks belong to the step, not to its ids.
        part, needed = flow.part(wanted, with_effects=True)
        wide = self.plan.wide & set(needed)
        if wide:
            part, needed = flow.part(
                wanted, with_effects=True, evaluate=evaluator(wide)
            )
        kinds = [flow.kind_of(number).dtype for number in wanted]

        def program(given: list[Any], blocks: list[Any]) -> Any:
            values = [inputs.of(number, given, blocks) for number in needed]
            # Evaluated with 64 bits, outputs return to the dtypes of the trace.
            outputs = [
                value if value.dtype == kind else value.astype(kind)
                for value, kind in zip(part(*values), kinds, strict=True)
            ]
            results_by_number = dict(zip(wanted, outputs, strict=True))
            # An output that is an input has to be copied; see `own`.
            known = {id(value) for value in (*values, *given)}
            return (
                [own(results_by_number[n], known) for n in results],
                [
                    [own(results_by_number[n], known) for n in each[0]]
                    if len(each) == 1
                    else [side_by_side([results_by_number[n] for (n,) in each])]
                    for each in alone
                ],
                [_joined([results_by_number[n] for n in numbers]) for numbers in rows],
            )

        program.__name__ = program.__qualname__ = self._name
        return with_64_bits(jax.jit(program), wide) if wide else jax.jit(program)


class Lookups:
    """The progress of one step through its levels.

    An answer has the values and rows of one `Wanted` request; values are in the first
    answer. Before the next level or the main program, the rows are joined to blocks.
    ``given`` are the leaves of arguments and elements.
    """

    __slots__ = ("_asked", "_blocks", "_given", "_program")

    def __init__(self, program: RowsProgram, given: list[Any]) -> None:
        self._program = program
        self._given = given
        self._asked: list[LevelRequest | None] = []
        self._blocks: list[list[np.ndarray]] = []

    def first(self) -> Wanted:
        """Makes the first request of the step.

        Raises:
            IndexError: An id is outside of its table.
        """
        return Wanted(self._program.plan.reads, self._ask())

    def advance(self, answer: Sequence[np.ndarray]) -> Wanted | None:
        """Makes the next request from an answer; None if there is no further request.
        Raises as `first`."""
        # The last answer goes to the main program.
        if len(self._asked) == self._program.plan.levels:
            return None
        self._take(answer)
        return Wanted((), self._ask())

    def compute(self, answer: Sequence[np.ndarray]) -> Computed:
        """Starts the main program with the last answer."""
        self._take(answer)
        outputs = self._program(self._given, self._blocks)
        arrays = [*outputs.operands, outputs.shared]
        return Computed(
            outputs.results,
            arrays,
            lambda: self._program.updates(outputs, self._asked),
        )

    def _ask(self) -> tuple[Any, ...]:
        number = len(self._asked)
        level = self._program.levels[number]
        if level is None:
            self._asked.append(None)
            return ()
        ids = self._program.ids(number, self._given, self._blocks)
        asked = level.ask(ids)
        self._asked.append(asked)
        return asked.rows

    def _take(self, answer: Sequence[np.ndarray]) -> None:
        number = len(self._blocks)
        rows = answer
        # Values come with the first answer alone; from then on they are inputs of all
        # programs.
        if number == 0:
            reads = len(self._program.plan.reads)
            self._given = [*self._given, *answer[:reads]]
            rows = answer[reads:]
        level, asked = self._program.levels[number], self._asked[number]
        if level is None or asked is None:
            self._blocks.append([])
        else:
            self._blocks.append(level.assembled(asked, rows))


class Outputs(NamedTuple):
    """The outputs of the main program: arrays of the result, the operands of the
    updates that are not in a `Shared`, and the rows of each `Shared`."""

    results: list[jax.Array]
    operands: list[list[jax.Array]]
    shared: list[jax.Array]


def _level(plan: Plan, number: int) -> Level | None:
    """Makes the layout of a level of the plan; None for the first level if it has no
    lookups."""
    lookups = [(n, x) for n, x in enumerate(plan.lookups) if x.level == number]
    return Level(lookups) if lookups else None


def _operands(plan: Plan) -> dict[int, list[int]]:
    """Returns for each update, by number, which outputs of the trace are its
    operands."""
    at, operands = len(plan.out_specs), {}
    for number, update in enumerate(plan.updates):
        operands[number] = list(range(at, at + len(update.operands)))
        at += len(update.operands)
    return operands


def _places(levels: Sequence[Level | None], plan: Plan) -> list[RowPlace]:
    places: dict[int, RowPlace] = {}
    for number, level in enumerate(levels):
        for place, block in enumerate(level.blocks if level is not None else ()):
            at = 0
            for lookup in (n for s in block.segments for n in s.lookups):
                planned = plan.lookups[lookup]
                places[lookup] = RowPlace(number, place, at, planned.shape)
                at += planned.size
    return [places[number] for number in range(len(plan.lookups))]


def _shared(
    plan: Plan,
    levels: Sequence[Level | None],
    flow: Flow,
    operands: dict[int, list[int]],
    first: int,
) -> list[Shared]:
    """Finds updates of rows by the same ids that a segment looks up, and groups those
    of neighbouring segments."""
    open_updates = [
        number
        for number, update in enumerate(plan.updates)
        if update.table is not None and update.op in SUMMED
    ]
    groups: list[Shared] = []
    for number, level in enumerate(levels):
        for block in level.blocks if level is not None else ():
            matched: list[int | None] = []
            for segment in block.segments:
                ids = [v for n in segment.lookups for v in flow.origin(first + n)]
                update = next(
                    (
                        n
                        for n in open_updates
                        if plan.updates[n].table == segment.table
                        and list(flow.origin(operands[n][0])) == ids
                    ),
                    None,
                )
                matched.append(update)
                if update is not None:
                    # One update for one segment: two updates by the same ids are two
                    # steps of an optimizer.
                    open_updates.remove(update)
            groups += _neighbours(number, block, matched)
    return groups


def _neighbours(
    level: int, block: LookupBlock, matched: Sequence[int | None]
) -> Iterator[Shared]:
    """Yields one group for each run of neighbouring segments that have an update."""
    start = 0
    for has, run in itertools.groupby(matched, lambda update: update is not None):
        updates = tuple(run)
        end = start + len(updates)
        if has:
            numbers = tuple([n for n in updates if n is not None])
            yield Shared(level, block, start, end, numbers)
        start = end


def _joined(rows: Sequence[jax.Array]) -> jax.Array:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows)
