"""The steps inside of a window, and the tables in which they look up rows.

`WindowRecorder` records one step inside of a window. Variables that the window trains
are arrays here: reads return the worker's own copy, and the inner optimizer updates the
copy at once. Everything else that would have an effect outside of the window is
refused.

A window pulls only the rows of a table that its steps look up. The ids of all steps are
computed before the first step, and their rows are looked up at once. The worker's copy
of the table has these rows, and zeros in all others, which no step reads. So the copy
has the size of the table, but only the looked-up rows are sent.

This is correct only if the ids depend on nothing that is pulled, and the step uses the
table in no other way: its result and its gradients depend on the table's value by
lookups alone; the gradient has only rows that the step looks up; and new slots do not
depend on values. Other tables are pulled as a whole.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.trace import _refusals, joined
from zstrat.program.trace._flow import Flow, marked
from zstrat.program.trace._signature import current_trace, fresh, printed_before
from zstrat.program.trace._structure import split
from zstrat.program.trace._tracebacks import claimed, here
from zstrat.program.trace._updates import Moves, rows_here
from zstrat.variables import (
    TraceRecorder,
    VariableUse,
    note_use,
    recorder,
    rows_of_component,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.program.trace._capture import Capture
    from zstrat.program.trace._flow import SlotsKey
    from zstrat.program.trace._iterator import StepIterator
    from zstrat.program.trace._structure import Structure
    from zstrat.variables import (
        GradientCall,
        SlotRule,
        Table,
        VariableHandle,
        VariableUpdate,
    )

    Replay = Callable[
        [Any, Sequence[Any], dict[int, Any], Sequence[Any]],
        tuple["WindowRecorder", Sequence[Any]],
    ]


window_of_step: Final[ContextVar[int | None]] = ContextVar(
    "zstrat_window_of_step", default=None
)
"""The id of the inner optimizer whose window is being traced, if any. The code that
sets this variable resets it."""


class NeedsElement(BaseException):
    """A step draws an element that its window has not drawn yet. Not an `Exception`,
    because the step must not catch it."""

    def __init__(self, iterator: StepIterator) -> None:
        self.iterator = iterator


class StepLookup(NamedTuple):
    """A lookup in a step of a window; ``ids`` belong to the trace of the step."""

    table: Table
    ids: jax.Array
    where: str


class WindowRecorder(TraceRecorder):
    """Records one step of a window.

    Args:
        inner: Id of the inner optimizer.
        outer: The capture of the window.
        drawn: The elements that the step draws, each with its iterator.
        values: Values of variables, by key. Other variables are zeros, and recorded in
            ``reads``: such a trace is not run, and only finds out what the step does.
        slots: The slots of the inner optimizer; without them zeros are used.
        rows: The rows of the step's lookups; without them the rows of ``values``.
    """

    def __init__(
        self,
        inner: int,
        outer: Capture,
        drawn: Sequence[tuple[StepIterator, Any]],
        values: dict[int, jax.Array] | None = None,
        slots: dict[SlotsKey, list[Any]] | None = None,
        rows: Sequence[jax.Array] | None = None,
    ) -> None:
        self.reads: dict[int, VariableHandle] = {}
        self.lookups: list[StepLookup] = []
        self.call: GradientCall | None = None
        """The gradients that the step applies; their arrays belong to the trace."""
        self.moves = Moves(self)
        self.drawn = 0
        """Number of elements that the step has drawn."""
        self._inner, self._outer, self._elements = inner, outer, drawn
        self._is_trial = values is None
        self._values = {} if values is None else dict(values)
        self._slots, self._rows = slots, rows
        self._own_trace: object = None
        self._scope = ExitStack()

    def run(
        self, step: Callable[..., Any], args: Any, kwargs: Any, number: Any
    ) -> tuple[Structure, list[jax.Array]]:
        """Runs step ``number`` of the window; returns structure and arrays of its
        result. Random keys among the arguments are combined with the number
        (`jax.random.fold_in`)."""
        args, kwargs = joined.mapped(partial(_of_step, number), (args, dict(kwargs)))
        with self._recording():
            structure, arrays = split(step(*args, **kwargs), self.read)
            return structure, [jnp.asarray(array) for array in arrays]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._own_trace = current_trace()
        before, window_before = recorder.set(self), window_of_step.set(self._inner)
        try:
            with self._scope:
                # Hides what jax has cached in another step of the window: inner
                # functions that closed over the values of that step.
                self._scope.enter_context(fresh())
                yield
        finally:
            window_of_step.reset(window_before)
            recorder.reset(before)

    def read(self, variable: VariableHandle) -> jax.Array:
        note_use(VariableUse.VALUE, variable)
        key = variable.spec.key
        if key not in self._values:
            if not self._is_trial:
                step = "the step of a window"
                raise _refusals.changed(step, f"it reads {variable.spec}")
            self.reads[key] = variable
            dtype = jax.dtypes.canonicalize_dtype(variable.spec.numpy_dtype)
            zeros = jnp.zeros(variable.shape, dtype)
            # These zeros belong to an inner trace: kept, they would leak from it.
            if current_trace() != self._own_trace:
                return zeros
            self._values[key] = zeros
        return self._values[key]

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        if current_trace() != self._own_trace:
            raise _refusals.lookup_inside(table)
        if table.is_hashed:
            raise ValueError(
                f"{here()}: a window looks up rows of {table}: windows of local steps "
                "number the rows of their tables, and this one has any id. Give its "
                "gradients to a zs.Optimizer in steps of their own, or use a "
                "zs.ShardedVariable of hashed ids"
            )
        self.lookups.append(StepLookup(table, ids, here()))
        if self._rows is None:
            return rows_here(table, marked(ids), self.read)
        # No rows are left if it looks up more than in the trial.
        found = self._rows[len(self.lookups) - 1 :][:1]
        if not found or found[0].shape != (*ids.shape, *table.shape[1:]):
            step = "the step of a window"
            raise _refusals.changed(step, f"it looks up other rows of {table}")
        return found[0]

    def update(self, update: VariableUpdate) -> None:
        raise RuntimeError(
            f"{here()}: {update.op.name} of {update.subject} in a window, whose steps "
            "change only the worker's own copy of the variables, by apply_gradients of "
            "its zs.LocalOptimizer. Return the value from the step, and assign it "
            "outside of the window"
        )

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        raise _refusals.update_inside(variable.spec, "an update of copies")

    def copies(self, variable: VariableHandle) -> jax.Array:
        return self._outer.copies(variable)

    def optimize(self, call: GradientCall) -> None:
        call = replace(call, where=call.where or here())
        if current_trace() != self._own_trace:
            first = call.variables[0].spec
            raise _refusals.update_inside(first, "an update by an optimizer")
        if call.optimizer.id != self._inner:
            raise RuntimeError(
                f"{call.where}: optimizer {call.optimizer.name!r} is applied in a "
                "window of another one: in a window, call apply_gradients of the "
                "zs.LocalOptimizer that made it"
            )
        if self.call is not None:
            raise RuntimeError(
                f"{call.where}: apply_gradients is called twice in a step of a window "
                f"(before at {self.call.where}): give all gradients to one call"
            )
        self.call = call
        self.moves.optimize(call, self.read)
        # A read after the update sees the moved copy.
        for key, (_, value) in self.moves.values.items():
            self._values[key] = value
        # Inner functions that jax has traced already closed over the old value.
        self._scope.enter_context(fresh())

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        """Returns the slots that the inner optimizer has for a variable before the
        step."""
        if self._slots is None:
            return [jnp.zeros(kind.shape, kind.dtype) for kind in rule.kinds]
        key = variable.spec.key, rule.id
        if key not in self._slots:
            step = "the step of a window"
            raise _refusals.changed(step, f"it updates {variable.spec}")
        return self._slots[key]

    def draw(self, iterator: StepIterator) -> Any:
        if current_trace() != self._own_trace:
            raise _refusals.draw_inside()
        if self.drawn == len(self._elements) and self._is_trial:
            raise NeedsElement(iterator)
        known = self._elements[self.drawn :][:1]
        if not known or known[0][0] is not iterator:
            what = f"it draws another element of {iterator.name}"
            raise _refusals.changed("the step of a window", what)
        self.drawn += 1
        return known[0][1]

    def drew(self, leaf: object) -> bool:
        return any(
            leaf is drawn
            for _, element in self._elements[: self.drawn]
            for drawn in joined.leaves(element)
        )

    def require_known_end(self, name: str) -> None:
        self._outer.require_known_end(name)


def _of_step(number: Any, leaf: Any) -> Any:
    """Returns an argument as step ``number`` gets it: a random key is different in each
    step."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return leaf
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        # One fold for each key of an array of keys.
        fold: Any = jax.random.fold_in
        for _ in np.shape(leaf):
            fold = jax.vmap(fold, (0, None))
        return fold(leaf, number)
    return leaf


@final
class TableRows:
    """Finds the tables of which a window needs only the rows that its steps look up,
    and pulls these rows.

    Args:
        replay: Traces the step from its number, the leaves of its elements, values of
            variables by key, and the rows of its lookups; returns the recorder and the
            arrays of the result.
        lookups: The lookups of the step in its first trace.
        leaves: The leaves of the elements of a step.
        variables: All variables that the step reads or trains.
        rules: The slots that the step updates, each with the key of its variable.
    """

    def __init__(
        self,
        replay: Replay,
        lookups: Sequence[StepLookup],
        leaves: Sequence[Any],
        variables: Sequence[VariableHandle],
        rules: Sequence[tuple[int, SlotRule]],
    ) -> None:
        self._lookups = lookups
        # With the rows as inputs of their own, what still depends on a table's value is
        # a use other than a look-up.
        flow, count, rows_updated = _traced(replay, lookups, leaves, variables)
        first_value = 1 + len(leaves)
        used = flow.inputs_of(range(flow.outputs)) >> first_value
        used_keys = {v.spec.key for n, v in enumerate(variables) if used >> n & 1}
        moving = {key for key, rule in rules if _begins_with_values(rule)}
        # Of a variable that is in two tables the rows of one would not be enough for
        # the other.
        several: dict[int, set[Table]] = {}
        for lookup in lookups:
            for key in lookup.table.keys:
                several.setdefault(key, set()).add(lookup.table)
        self._numbers: list[int] = []
        for table in dict.fromkeys(lookup.table for lookup in lookups):
            keys = set(table.keys)
            own = [n for n, lookup in enumerate(lookups) if lookup.table == table]
            origins = {x for n in own for x in flow.origin(count + n)}
            if (
                # No output and no new slot depends on the value.
                not keys & (used_keys | moving)
                and not flow.has_effects
                and all(len(several[key]) == 1 for key in keys)
                # The ids are known before anything is pulled.
                and not flow.inputs_of([count + n for n in own]) >> first_value
                # Each row that a gradient changes is among those that are looked up.
                and all(
                    number is not None and origins.issuperset(flow.origin(number))
                    for updated, number in rows_updated
                    if keys & set(updated)
                )
            ):
                self._numbers += own
        if self._numbers:
            wanted = [count + number for number in self._numbers]
            self._part, self._needed = flow.part(wanted)

    @property
    def keys(self) -> frozenset[int]:
        """The keys of the variables that need not be pulled as a whole."""
        tables = [self._lookups[number].table for number in self._numbers]
        return frozenset(key for table in tables for key in table.keys)

    def pulled(
        self, outer: TraceRecorder, numbers: jax.Array, leaves: Sequence[jax.Array]
    ) -> dict[int, jax.Array]:
        """Looks up the rows that several steps need; returns the tables, by key, with
        zeros for all other rows.

        Args:
            numbers: The numbers of the steps, ``[steps]``.
            leaves: The leaves of their elements, each ``[steps, ...]``.
        """
        if not self._numbers:
            return {}

        def ids_of(given: tuple[Any, Sequence[Any]]) -> list[jax.Array]:
            known = [given[0], *given[1]]
            return self._part(*[known[number] for number in self._needed])

        found: dict[int, jax.Array] = {}
        all_ids = jax.lax.map(ids_of, (numbers, list(leaves)))
        for number, ids in zip(self._numbers, all_ids, strict=True):
            table, _, where = self._lookups[number]
            flat = ids.reshape(-1)
            with claimed(where):
                rows = outer.lookup(table, flat)
            for place, component in enumerate(table.components):
                key, zeros = component.spec.key, jnp.zeros(component.shape, rows.dtype)
                own = rows_of_component(table, place, flat)
                # Ids of other components, and padding, are out of bounds here.
                found[key] = found.get(key, zeros).at[own].set(rows, mode="drop")
        return found


def _traced(
    replay: Replay,
    lookups: Sequence[StepLookup],
    leaves: Sequence[Any],
    variables: Sequence[VariableHandle],
) -> tuple[Flow, int, list[tuple[tuple[int, ...], int | None]]]:
    """Traces the step as a program from its number, elements, values, and rows of
    lookups. Returns the `Flow` of the program; the number of its first output that is
    the ids of a lookup; and for each gradient the keys of its variable, and the output
    with its row indices."""
    updated: list[tuple[tuple[int, ...], int | None]] = []
    counts: list[int] = []

    def program(
        number: Any, leaves: Sequence[Any], values: Sequence[Any], rows: Sequence[Any]
    ) -> list[Any]:
        known = {v.spec.key: x for v, x in zip(variables, values, strict=True)}
        recording, arrays = replay(number, leaves, known, rows)
        call = recording.call
        assert call is not None
        outputs = list(arrays)
        updated.clear()
        for _, target, sparse, own in call.leaves():
            keys = tuple([part.spec.key for part in target.components])
            updated.append((keys, len(outputs) if sparse else None))
            outputs += own
        counts[:] = [len(outputs)]
        return [*outputs, *[lookup.ids for lookup in recording.lookups]]

    with printed_before():
        closed = jax.make_jaxpr(program)(
            0,
            list(leaves),
            [_zeros(v.shape, v.dtype) for v in variables],
            [
                _zeros((*x.ids.shape, *x.table.shape[1:]), x.table.dtype)
                for x in lookups
            ],
        )
    return Flow(closed), counts[0], updated


def _begins_with_values(rule: SlotRule) -> bool:
    """Returns whether new slots of a variable depend on its value."""
    flow = Flow(rule.leaf.initial(rule.size))
    return bool(flow.inputs_of(range(flow.outputs)))


def _zeros(shape: Sequence[int], dtype: Any) -> Any:
    kind: Any = jax.ShapeDtypeStruct
    return kind(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))
