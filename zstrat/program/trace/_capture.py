"""The recorder: what a body does with variables and iterators while jax traces it.

In *discovery* it is not known which variables a body reads, so a read makes up an
abstract value (see `Discovery`); that trace yields the plan, and mostly the program
(`_made_up`). Else the body is traced once more: in *replay* the values are inputs of
the program that is being compiled, and the body must do the same both times.

Theory of operation. Reads of one variable are one input of the program, whatever their
number. Updates are written down with their operands, which become outputs. What was
written is also known here: a later read in the same step computes the new value from
the old one and the operands, except after an optimizer, whose result only the
parameter server knows. Reads are allowed everywhere, as jax functions may close over
outer values. Updates, lookups and draws are allowed only where the capture began: under
`jax.grad`, `lax.cond` and the like the operand would be a value of that inner trace.

A lookup names rows of a table. Its ids are an output of the program and its rows an
input, so that it is found out only in the plan which of them can be asked for when.

A region that is traced by itself (the replicas of `strategy.run`) makes a capture of
its own with a `TraceFeed` that reads from the outer one, and hands the inner one's
updates on as explicit outputs. In it, the value of a variable of which each replica has
a copy is that copy; outside of it, all copies are known, and the value is the first.

One replica's copy, taken outside of the replicas, is a row of all copies as the step
has made them so far. Law of the file: a step never asks the storage of a copy. So a
read finds what was written before it in the same step, to the copy or to the variable.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zstrat.variables import (
    Table,
    TraceRecorder,
    VariableUse,
    copy_storage,
    lives_here,
    note_use,
    operands_of,
    reaching,
    recorder,
    require_servers,
)
from zstrat.wire import UpdateOp

from . import _refusals, joined
from ._context import asked, current_trace, fresh
from ._flow import marked
from ._updates import (
    Moves,
    Write,
    after_writes,
    apart_from_now,
    is_apart,
    is_here,
    moved,
    rows_here,
    shown_to,
    spread,
)
from ._updates import Recorded as Recorded
from ._where import claimed, here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import jax

    from zstrat.variables import (
        CopyStorage,
        GradientCall,
        VariableHandle,
        VariableUpdate,
    )

    from ._feeds import TraceFeed
    from ._iterator import StepIterator


def row_of(recording: TraceRecorder, copy: CopyStorage) -> jax.Array:
    """The value of the copy."""
    row: jax.Array = recording.copies(copy.container)[copy.number]
    return row


def change(recording: TraceRecorder, copy: CopyStorage, update: Recorded) -> None:
    """Makes the next value of the copy alone; all are kept apart from now on.

    Raises:
        NotImplementedError: By an optimizer.
        RuntimeError: Under a transformation of jax.
    """
    if update.optimizer is not None:
        raise copy.not_optimized(update.variables[0])
    operands = update.operands
    if len(operands) > 1:
        operands = (marked(reaching(operands[0])), *operands[1:])
    apart_from_now(copy.container)
    copies = recording.copies(copy.container)
    value = moved(update.op, operands, copies[copy.number])
    recording.put_copies(copy.container, copies.at[copy.number].set(value))


MAX_DRAWS: Final = 1024
"""Draws of one step. A Python loop that draws until the data end never ends while it is
traced; this ends it, with words."""

_OPTIMIZE: Final = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)


@dataclass(frozen=True, slots=True)
class RecordedLookup:
    """One lookup: what the step wants, and the user's line that wants it."""

    table: Table
    ids: jax.Array
    where: str


class Capture(TraceRecorder):
    """Records one trace of a body. See the module's docstring.

    ``reads``, ``lookups``, ``updates`` and ``draws`` (ordinals of ``iterators``, those
    of the arguments before those that are captured) are in the order of the body; each
    variable is read once. ``moves`` are the updates of
    variables that live here, which are not among ``updates``; ``calls`` the gradients
    that parameter servers apply. ``own`` are the last
    values of copies that a replica has updated for itself, by key of the variable.

    ``is_region``: of a part of a step, whose updates go on to the capture of the step.
    """

    def __init__(
        self,
        feed: TraceFeed,
        iterators: Sequence[StepIterator] = (),
        *,
        is_region: bool = False,
    ) -> None:
        self.reads: dict[int, VariableHandle] = {}
        self.lookups: list[RecordedLookup] = []
        self.updates: list[Recorded] = []
        self.draws: list[int] = []
        self.own: dict[int, tuple[VariableHandle, jax.Array]] = {}
        self.moves = Moves(feed)
        self.calls: list[GradientCall] = []
        self.asked_context = False
        self._is_region = is_region
        self._drawn: list[Any] = []
        self._feed = feed
        self.iterators = list(iterators)
        self._values: dict[int, jax.Array] = {}
        self._base: dict[int, jax.Array] = {}
        self._writes: dict[int, list[Write]] = {}
        self._optimized: dict[int, str] = {}
        self._touched: dict[int, str] = {}
        self._own_trace: object = None
        self._tell_outer: Callable[[], None] | None = None
        self._scope = ExitStack()

    @contextmanager
    def recording(self) -> Iterator[Capture]:
        """Runs what is inside as the body; entered once, in the trace it belongs to."""
        self._own_trace = current_trace()
        with self._scope:
            self._scope.enter_context(fresh())
            here_before = recorder.set(self)
            self._tell_outer = asked.get()
            asked_before = asked.set(self._ask_context)
            try:
                yield self
            finally:
                asked.reset(asked_before)
                recorder.reset(here_before)

    def read(self, variable: VariableHandle) -> jax.Array:
        """The value of the variable, the step's own writes included.

        Raises:
            RuntimeError: An optimizer has updated it in this step.
        """
        note_use(VariableUse.VALUE, variable)
        if not self._is_region and (copy := copy_storage(variable)) is not None:
            return row_of(self, copy)
        value = self._current(variable)
        # Of copies that replicas keep apart, who stands outside of them has the first.
        return value[0] if value.ndim > len(variable.shape) else value

    def update(self, update: VariableUpdate) -> None:
        """Writes an update down.

        Raises:
            RuntimeError: Under a transformation of jax.
        """
        target, op, operands, optimizer = update
        note_use(VariableUse.VALUE, *target.components)
        if len(operands) > 1 and not isinstance(target, Table):
            # Of rows, as if it were in parts: what is not there is named, with the line
            # that meant it, before anything is sent.
            target = Table(target.name, (target,))
        if not self._is_here():
            raise _refusals.update_inside(update.subject, _named(op))
        table = target if isinstance(target, Table) else None
        self._note(
            Recorded(target.components, op, operands, optimizer, here(), table=table)
        )

    def update_own(self, update: VariableUpdate) -> None:
        """Makes the next value of a replica's own copy.

        Raises:
            RuntimeError: Under a transformation of jax, or after an optimizer has
                updated the variable.
        """
        variable, op = update.variable, update.op
        note_use(VariableUse.VALUE, variable)
        if not self._is_here():
            raise _refusals.update_inside(variable.spec, _named(op))
        key = variable.spec.key
        self.own[key] = variable, moved(op, update.operands, self._current(variable))
        self._values[key] = self.own[key][1]
        self._scope.enter_context(fresh())

    def copies(self, variable: VariableHandle) -> jax.Array:
        """All copies of a variable, ``[count, ...]``."""
        note_use(VariableUse.VALUE, variable)
        return spread(variable, self._current(variable))

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        """The copies from now on; made by replicas that are part of this step.

        Raises:
            RuntimeError: Under a transformation of jax.
        """
        note_use(VariableUse.VALUE, variable)
        if not self._is_here():
            raise _refusals.update_inside(variable.spec, "an update of copies")
        self.moves.put(variable, copies)
        self._values[variable.spec.key] = copies
        self._scope.enter_context(fresh())

    def take_values(self, values: Mapping[int, jax.Array]) -> None:
        """The values of variables of another process that came with the step, by key:
        they are read from nowhere else, and the step updates none of them."""
        self._values.update(values)

    @property
    def variables(self) -> list[VariableHandle]:
        """The variables that the body reads, and those whose copies it updates."""
        found = dict(self.reads)
        found.update({key: variable for key, (variable, _) in self.own.items()})
        return list(found.values())

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        """The rows of a table as they are before the step, ``ids.shape + row``.

        Raises:
            RuntimeError: Under a transformation of jax, or this step has updated the
                table.
        """
        note_use(VariableUse.VALUE, *table.components)
        if not self._is_here():
            raise _refusals.lookup_inside(table)
        if all(map(self._knows, table.components)):
            return rows_here(table, marked(ids), partial(shown_to, self))
        for key in table.keys:
            if key in self._touched:
                raise _refusals.lookup_after_update(table, self._touched[key])
        rows = self._feed.rows(len(self.lookups), table, ids.shape)
        self.lookups.append(RecordedLookup(table, ids, here()))
        return rows

    def optimize(self, call: GradientCall) -> None:
        """Writes gradients of a tree down: what lives here is moved at once, all of it
        together; what lives on parameter servers is updated there, each variable by
        itself.

        Raises:
            RuntimeError: Under a transformation of jax.
            ValueError: The optimizer cannot do this to these variables.
        """
        call = replace(call, where=call.where or here())
        variables = call.variables
        note_use(VariableUse.VALUE, *variables)
        if not self._is_here():
            raise _refusals.update_inside(variables[0].spec, _named(UpdateOp.OPTIMIZE))
        arrays, optimizer = call.arrays, call.optimizer
        noted = partial(Recorded, optimizer=optimizer, where=call.where)
        if self._is_region:
            op = UpdateOp.OPTIMIZE
            self._note(noted(variables, op, operands=arrays, call=call))
        elif all(map(is_here, variables)):
            self.moves.optimize(call, self._current)
            for variable in variables:
                key = variable.spec.key
                self._values[key] = self.moves.values[key][1]
            self._scope.enter_context(fresh())
        elif lives_here(call):
            # Of this process, but not of its devices: moved when the step has run.
            op = UpdateOp.OPTIMIZE
            self._note(noted(variables, op, operands=arrays, call=call))
        else:
            self._send(call, noted)

    def _send(self, call: GradientCall, noted: Callable[..., Recorded]) -> None:
        """Notes updates of variables on parameter servers."""
        rule = call.rule(is_here=False)
        require_servers(call, rule)
        self.calls.append(call)
        operands = tuple(operands_of(call, rule))
        if operands:
            op = UpdateOp.OPERANDS
            self.updates.append(noted(call.variables, op, operands))
        with claimed(call.where):
            for _, target, sparse, arrays in call.leaves():
                if sparse:
                    op, rows = UpdateOp.OPTIMIZE_ROWS, (arrays[0], arrays[1])
                    target._record_rows(self, op, rows, call.optimizer)
                else:
                    op = UpdateOp.OPTIMIZE
                    target._record(self, op, arrays[0], call.optimizer)

    def require_known_end(self, name: str) -> None:
        """Refuses what goes by the end of the data of this name.

        Raises:
            LoopsOverData: Always: a trace has no end of the data.
        """
        raise _refusals.LoopsOverData(name)

    def draw(self, iterator: StepIterator) -> Any:
        """The next element of an iterator among the arguments, or of one that an object
        holds which came with the body, as the trace sees it.

        Raises:
            RuntimeError: Under a transformation of jax, or in a region, or it is no
                argument.
        """
        if self._is_region:
            raise _refusals.draw_in_replica(iterator)
        if not self._is_here():
            raise _refusals.draw_inside()
        if len(self.draws) == MAX_DRAWS:
            raise RuntimeError(
                f"{here()}: the step draws more than {MAX_DRAWS} elements: a Python "
                "loop that draws until the data end has no end while it is traced. "
                "Call next(iterator) as often as the step needs"
            )
        ordinal = next(
            (n for n, known in enumerate(self.iterators) if known is iterator), None
        )
        if ordinal is None and iterator.is_resource:
            ordinal = len(self.iterators)
            self.iterators.append(iterator)
        if ordinal is None:
            raise RuntimeError(
                f"{here()}: the step draws from an iterator of {iterator.name} that it "
                "captured: pass the iterator as an argument of the zs.function"
            )
        element = self._feed.element(ordinal, iterator)
        self.draws.append(ordinal)
        self._drawn.extend(joined.leaves(element))
        return element

    def drew(self, leaf: object) -> bool:
        """Whether this very array is (a leaf of) an element drawn in this trace."""
        return any(leaf is drawn for drawn in self._drawn)

    def _note(self, update: Recorded) -> None:
        if not self._is_region and all(map(self._knows, update.variables)):
            self._move(update)
            return
        self.updates.append(update)
        for number, variable in enumerate(update.variables):
            key = variable.spec.key
            self._values.pop(key, None)
            self._touched[key] = update.where
            if update.op in _OPTIMIZE:
                self._optimized[key] = update.where
            elif update.op is UpdateOp.ASSIGN:
                self._optimized.pop(key, None)
                self._writes[key] = [(update, number)]
            else:
                self._writes.setdefault(key, []).append((update, number))
        # Inner functions that jax has traced already closed over the old value.
        self._scope.enter_context(fresh())

    def _knows(self, variable: VariableHandle) -> bool:
        """Whether the value is here, or a row of what is."""
        is_row = not self._is_region and copy_storage(variable) is not None
        return is_row or is_here(variable)

    def _move(self, update: Recorded) -> None:
        if (copy := copy_storage(update.variables[0])) is not None:
            change(self, copy, update)
            return
        self.moves.note(update, self._current)
        for variable in update.variables:
            key = variable.spec.key
            self._values[key] = self.moves.values[key][1]
        self._scope.enter_context(fresh())

    def _is_here(self) -> bool:
        return current_trace() == self._own_trace

    def _current(self, variable: VariableHandle) -> jax.Array:
        """The value, or all copies of it."""
        key = variable.spec.key
        known = self._values.get(key)
        if known is not None:
            return known
        if key in self._optimized:
            raise _refusals.read_after_optimizer(variable, self._optimized[key])
        value = self._computed(variable)
        if self._is_here():
            # A value computed under a transformation belongs to that inner trace.
            self._values[key] = value
        return value

    def _computed(self, variable: VariableHandle) -> jax.Array:
        writes = self._writes.get(variable.spec.key, [])
        if writes and writes[0][0].op is UpdateOp.ASSIGN:
            return after_writes(writes[0][0].operands[0], writes[1:])
        return after_writes(self._before(variable), writes)

    def _before(self, variable: VariableHandle) -> jax.Array:
        """The value as it was before the step."""
        key = variable.spec.key
        self.reads.setdefault(key, variable)
        if key in self._base:
            return self._base[key]
        value = self._feed.value(variable.spec)
        if not self._is_region and is_apart(variable):
            value = spread(variable, value)
        if self._is_here():
            self._base[key] = value
        return value

    def _ask_context(self) -> None:
        self.asked_context = True
        if self._tell_outer is not None:
            self._tell_outer()


def _named(op: UpdateOp) -> str:
    return "an update by an optimizer" if op in _OPTIMIZE else f"{op.name} (an update)"
