"""`Capture`: records what a body does with variables and iterators while jax traces it.

In *discovery* the reads of the body are not known yet, so each read makes a placeholder
(`Discovery`); that trace yields the plan, and usually the program (`_flow`). If it
yields no program, the body is traced once more: in *replay* the values are inputs of
the program that is being compiled, and the body must do the same both times.

Theory of operation. All reads of one variable are one input of the program. The
operands of updates become outputs. A read after an update in the same step computes the
new value from the old one and the operands, except after an optimizer, whose result
only the parameter server can compute. Reads are allowed everywhere, as jax functions
may close over outer values. Updates, lookups and draws are allowed only at the level
where the capture began: under `jax.grad`, `lax.cond` and the like the operand would be
a value of that inner trace.

The ids of a lookup are an output of the program and its rows an input; the plan then
finds out in which request each lookup's rows can be requested.

A *region* is a part of the step that is traced by itself (the replicas of
`strategy.run`). It has its own capture, with a `TraceFeed` that reads from the outer
capture; its updates are outputs, which the outer capture gets. Inside of a region, the
value of a variable with a copy per replica is the replica's copy; outside, the capture
has all copies, and the value is the first copy.

If one replica's copy is read outside of the replicas, the value is a row of all copies
as the step has updated them so far. Law of the file: a step never reads a copy from its
storage. So a read sees all earlier updates of the same step, of the copy or of the
variable.
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
from ._flow import marked
from ._signature import asked, current_trace, fresh
from ._tracebacks import claimed, here
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import jax

    from zstrat.variables import (
        CopyStorage,
        GradientCall,
        VariableHandle,
        VariableUpdate,
    )

    from ._flow import TraceFeed
    from ._iterator import StepIterator


MAX_DRAWS: Final = 1024
"""Most draws in one step. A Python loop that draws until the data end would never end
while it is traced."""

_OPTIMIZE: Final = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)


@dataclass(frozen=True, slots=True)
class RecordedLookup:
    """One lookup in a step; ``where`` is the user's line."""

    table: Table
    ids: jax.Array
    where: str


class Capture(TraceRecorder):
    """Records what a body does with variables and iterators in one trace.

    ``reads``, ``lookups``, ``updates`` and ``draws`` are in the order of the body; each
    variable is read once. ``draws`` are numbers of ``iterators``; iterators among the
    arguments come before captured ones. ``moves`` are the updates that the program
    itself executes, and ``updates`` all others; ``calls`` are the gradients that
    parameter servers apply. ``own`` are the last values of copies that a replica has
    updated by itself, by key of the variable.

    ``is_region``: the capture records a part of a step, and its updates are passed to
    the capture of the step.
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
        """Records the code inside of the block. Enter it once, in the trace that it
        belongs to."""
        self._own_trace = current_trace()
        with self._scope:
            self._scope.enter_context(fresh())
            here_before = recorder.set(self)
            # A region is a part of a step, whose plan depends on the answer as well.
            self._tell_outer = asked.get()
            asked_before = asked.set(self._ask_context)
            try:
                yield self
            finally:
                asked.reset(asked_before)
                recorder.reset(here_before)

    def read(self, variable: VariableHandle) -> jax.Array:
        """Returns the value of a variable, after the updates that the step has made so
        far.

        Raises:
            RuntimeError: An optimizer has updated the variable in this step.
        """
        note_use(VariableUse.VALUE, variable)
        if not self._is_region and (copy := copy_storage(variable)) is not None:
            row: jax.Array = self.copies(copy.container)[copy.number]
            return row
        value = self._current(variable)
        # Code outside of the replicas sees the first copy.
        return value[0] if value.ndim > len(variable.shape) else value

    def update(self, update: VariableUpdate) -> None:
        """Records an update of a variable.

        Raises:
            RuntimeError: Under a transformation of jax.
        """
        target, op, operands, optimizer = update
        note_use(VariableUse.VALUE, *target.components)
        if len(operands) > 1 and not isinstance(target, Table):
            # As rows of a table: then indices out of bounds raise an error with the
            # user's line, before anything is sent.
            target = Table(target.name, (target,))
        if not self._is_here():
            raise _refusals.update_inside(update.subject, _named(op))
        table = target if isinstance(target, Table) else None
        self._note(
            Recorded(target.components, op, operands, optimizer, here(), table=table)
        )

    def update_own(self, update: VariableUpdate) -> None:
        """Records an update of a replica's own copy of a variable.

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
        """Returns the copies of a variable that all replicas have, ``[count, ...]``."""
        note_use(VariableUse.VALUE, variable)
        return spread(variable, self._current(variable))

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        """Replaces the copies of a variable that all replicas have, by those that
        replicas in this step have computed.

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
        """Sets values, by key, of variables of another process; they were sent with the
        step.

        Reads of these variables return the values; the step updates none of the
        variables.
        """
        self._values.update(values)

    @property
    def variables(self) -> list[VariableHandle]:
        """The variables that the body reads, and those whose copies (one per replica)
        it updates."""
        own = {key: variable for key, (variable, _) in self.own.items()}
        return list({**self.reads, **own}.values())

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        """Records a lookup; returns rows of a table as they are before the step,
        ``ids.shape + row``.

        Raises:
            RuntimeError: Under a transformation of jax, or this step has updated the
                table.
        """
        note_use(VariableUse.VALUE, *table.components)
        if not self._is_here():
            raise _refusals.lookup_inside(table)
        # The whole table is an input of the program, so no request is needed.
        if all(map(self._knows, table.components)):
            return rows_here(table, marked(ids), partial(shown_to, self))
        # The server answers from before the step, so the rows would lack this update.
        for key in table.keys:
            if key in self._touched:
                raise _refusals.lookup_after_update(table, self._touched[key])
        rows = self._feed.rows(len(self.lookups), table, ids.shape)
        self.lookups.append(RecordedLookup(table, ids, here()))
        return rows

    def optimize(self, call: GradientCall) -> None:
        """Records a call of ``apply_gradients``.

        Variables on devices of this process are updated at once, together. Parameter
        servers update their variables after the step, each variable by itself.

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
        if not self._is_region and all(map(is_here, variables)):
            self.moves.optimize(call, self._current)
            for variable in variables:
                key = variable.spec.key
                self._values[key] = self.moves.values[key][1]
            self._scope.enter_context(fresh())
        # In a region the capture of the step decides who applies them. Variables of
        # this process that are not on its devices are updated after the step.
        elif self._is_region or lives_here(call):
            op = UpdateOp.OPTIMIZE
            self._note(noted(variables, op, operands=arrays, call=call))
        else:
            self._send(call, noted)

    def _send(self, call: GradientCall, noted: Callable[..., Recorded]) -> None:
        """Records the updates of a call for variables on parameter servers."""
        rule = call.rule(is_here=False)
        require_servers(call, rule)
        self.calls.append(call)
        # Servers need them to apply the gradients, so they come first.
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
        """Refuses to branch on the end of the data called ``name``.

        Raises:
            LoopsOverData: Always: the end of the data is unknown during a trace.
        """
        raise _refusals.LoopsOverData(name)

    def draw(self, iterator: StepIterator) -> Any:
        """Draws from an iterator among the arguments, or from a captured one of a
        worker; returns the element as it is in the trace.

        Raises:
            RuntimeError: Under a transformation of jax, or in a region, or from a
                captured iterator of this process.
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
        # By identity: the same iterator may be among the arguments twice.
        ordinal = next(
            (n for n, known in enumerate(self.iterators) if known is iterator), None
        )
        if ordinal is None and iterator.is_resource:
            ordinal = len(self.iterators)
            self.iterators.append(iterator)
        if ordinal is None:
            raise RuntimeError(
                f"{here()}: the step draws from a captured iterator of "
                f"{iterator.name}: pass the iterator as an argument of the zs.function"
            )
        element = self._feed.element(ordinal, iterator)
        self.draws.append(ordinal)
        self._drawn.extend(joined.leaves(element))
        return element

    def drew(self, leaf: object) -> bool:
        """Returns whether an array is, by identity, a leaf of an element drawn in this
        trace."""
        return any(leaf is drawn for drawn in self._drawn)

    def _note(self, update: Recorded) -> None:
        if not self._is_region and all(map(self._knows, update.variables)):
            self._move(update)
            return
        self.updates.append(update)
        for number, variable in enumerate(update.variables):
            # The next read computes the value from the writes, unless an optimizer has
            # it.
            key = variable.spec.key
            self._values.pop(key, None)
            self._touched[key] = update.where
            if update.op in _OPTIMIZE:
                self._optimized[key] = update.where
            # What was written before has no effect any longer.
            elif update.op is UpdateOp.ASSIGN:
                self._optimized.pop(key, None)
                self._writes[key] = [(update, number)]
            else:
                self._writes.setdefault(key, []).append((update, number))
        # Inner functions that jax has traced already closed over the old value.
        self._scope.enter_context(fresh())

    def _knows(self, variable: VariableHandle) -> bool:
        """Returns whether the program itself executes updates of the variable, or
        copy."""
        is_row = not self._is_region and copy_storage(variable) is not None
        return is_row or is_here(variable)

    def _move(self, update: Recorded) -> None:
        if (copy := copy_storage(update.variables[0])) is not None:
            self._move_copy(copy, update)
            return
        self.moves.note(update, self._current)
        for variable in update.variables:
            key = variable.spec.key
            self._values[key] = self.moves.values[key][1]
        self._scope.enter_context(fresh())

    def _move_copy(self, copy: CopyStorage, update: Recorded) -> None:
        """Updates the copy of one replica; from then on each replica has a separate
        copy."""
        if update.optimizer is not None:
            raise copy.not_optimized(update.variables[0])
        operands = update.operands
        if len(operands) > 1:
            operands = (marked(reaching(operands[0])), *operands[1:])
        # At once, in the trace: the program is then one over copies.
        apart_from_now(copy.container)
        copies = self.copies(copy.container)
        value = moved(update.op, operands, copies[copy.number])
        self.put_copies(copy.container, copies.at[copy.number].set(value))

    def _is_here(self) -> bool:
        """Returns whether the code runs directly in the captured trace, not under a
        transformation of jax inside of it."""
        return current_trace() == self._own_trace

    def _current(self, variable: VariableHandle) -> jax.Array:
        """Returns the value of a variable, or all its copies, after the updates so
        far."""
        key = variable.spec.key
        known = self._values.get(key)
        if known is not None:
            return known
        if key in self._optimized:
            raise _refusals.read_after_optimizer(variable, self._optimized[key])
        writes = self._writes.get(key, [])
        if writes and writes[0][0].op is UpdateOp.ASSIGN:
            value = after_writes(writes[0][0].operands[0], writes[1:])
        else:
            value = after_writes(self._before(variable), writes)
        if self._is_here():
            # A value computed under a transformation belongs to that inner trace.
            self._values[key] = value
        return value

    def _before(self, variable: VariableHandle) -> jax.Array:
        """Returns the value of a variable from before the step."""
        key = variable.spec.key
        # In the order of first reads, which is that of the program's inputs.
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
