"""`Substitution`, the recorder of differentiated functions; and the discovery of their
lookups.

A `Substitution` returns the arrays of jax's trace in place of values of variables and
of looked-up rows. The lookups of a function are not known at first: its first lookup
ends the attempt (`NotKnownYet`), and a `LookupDiscovery` finds them before the function
is differentiated.

The discovery traces the function twice, and runs neither trace. The first trace finds
the lookups; the second one has their rows as inputs and their ids as outputs. Then the
discovery computes the ids of one lookup after the other, from the rows of earlier
lookups, and looks them up with the outer recorder: to a step they are lookups of its
own body. The second trace also shows which values the result depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from zstrat.program.trace import _refusals
from zstrat.program.trace._eager import Immediate
from zstrat.program.trace._flow import Flow
from zstrat.program.trace._signature import apart, current_trace, fresh
from zstrat.program.trace._tracebacks import claimed, here
from zstrat.variables import TraceRecorder, recorder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from zstrat.program.trace._iterator import StepIterator
    from zstrat.variables import (
        GradientCall,
        Table,
        VariableHandle,
        VariableUpdate,
    )


class NotKnownYet(BaseException):
    """The rows or values that ``by`` reads are not known before a `LookupDiscovery` has
    run. Not an `Exception`, because the differentiated function must not catch it."""

    def __init__(self, by: Substitution) -> None:
        self.by = by


class SoughtLookup(NamedTuple):
    """A lookup by the function. ``via`` has for each component of the table the number
    of the given array that replaces the variable, or None."""

    table: Table
    ids: jax.Array
    via: tuple[int | None, ...]
    where: str


class Substitution(TraceRecorder):
    """Returns given arrays in place of values of variables.

    Other reads are passed to the recorder ``outer``; updates and draws are refused.
    With real values, a substituted read under jax.jit and the like is refused, too: jax
    would cache that trace with the array of this one, and hiding the cache (`fresh`)
    would compile every operation again.

    Args:
        values: The arrays, by key of the variable.
        given: Arrays among the arguments, each with the variable whose value it is.
        late: Variables, by key, whose values ``value_of`` returns; without that, reads
            of them raise `NotKnownYet`.
        rows_of: Returns the rows of a lookup; without it a lookup raises `NotKnownYet`.
        is_staged: The trace is never run.
    """

    def __init__(
        self,
        outer: TraceRecorder | None,
        values: dict[int, jax.Array],
        given: Sequence[tuple[Any, VariableHandle | None]] = (),
        *,
        late: Collection[int] = (),
        value_of: Callable[[VariableHandle], jax.Array] | None = None,
        rows_of: Callable[[int, SoughtLookup], jax.Array] | None = None,
        is_staged: bool = False,
    ) -> None:
        self.live = not is_staged and (outer is None or outer.live)
        """Whether values are real arrays, because no step is being captured."""
        self.sought: list[SoughtLookup] = []
        self._outer = Immediate() if outer is None else outer
        self._values = values
        self._given = given
        self._late, self._value_of, self._rows_of = late, value_of, rows_of
        # A function inside of a differentiated one sees the arrays of both, so both
        # name what jax caches.
        inherited: tuple[int, ...] = ()
        if isinstance(outer, Substitution):
            inherited = outer.substituted
        self.substituted: tuple[int, ...] = (*inherited, *sorted(values))
        self._outermost: object = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Activates the substitution for the code inside. Enter it in the trace of the
        given arrays."""
        self._outermost = current_trace()
        before = recorder.set(self)
        # With real values a new number at each call would compile each operation again.
        try:
            with apart(("live", *self.substituted)) if self.live else fresh():
                yield
        finally:
            recorder.reset(before)

    def read(self, variable: VariableHandle) -> jax.Array:
        key = variable.spec.key
        if key in self._values:
            if self.live and current_trace() != self._outermost:
                raise _refusals.live_read_inside(variable.spec)
            return self._values[key]
        # Not differentiated here: the step, or an outer differentiated function, has
        # it.
        if key not in self._late:
            return self._outer.read(variable)
        if self._value_of is None:
            raise NotKnownYet(self)
        return self._value_of(variable)

    def copies(self, variable: VariableHandle) -> jax.Array:
        return self._outer.copies(variable)

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        raise _refusals.update_inside(variable.spec, "an update of copies")

    def lookup(
        self, table: Table, ids: jax.Array, via: Sequence[int | None] = ()
    ) -> jax.Array:
        if current_trace() != self._outermost:
            raise _refusals.lookup_inside(table)
        if self._rows_of is None:
            raise NotKnownYet(self)
        via = tuple(via) or (None,) * len(table.components)
        self.sought.append(SoughtLookup(table, ids, via, here()))
        return self._rows_of(len(self.sought) - 1, self.sought[-1])

    def behind(self, array: object) -> tuple[VariableHandle, int] | None:
        """Returns the variable whose value this very array is, and the number of the
        array."""
        # By identity: the function got this very array in place of the variable.
        for number, (given, variable) in enumerate(self._given):
            if given is array and variable is not None:
                return variable, number
        return None

    def update(self, update: VariableUpdate) -> None:
        raise _refusals.update_inside(update.subject, update.op.name)

    def optimize(self, call: GradientCall) -> None:
        first = call.variables[0].spec
        raise _refusals.update_inside(first, "an update by an optimizer")

    def draw(self, iterator: StepIterator) -> Any:
        raise _refusals.draw_inside()

    def require_known_end(self, name: str) -> None:
        raise _refusals.draw_inside()

    def drew(self, leaf: object) -> bool:
        return self._outer.drew(leaf)


Call = Callable[[list[Any], Substitution], Any]
"""A function that calls the differentiated function with these arrays among its
arguments, under that recorder; returns the scalar without aux."""


@dataclass(frozen=True, slots=True)
class DiscoveredLookups:
    """The lookups of a function: ``ids`` and ``rows`` of the lookups ``sought``; the
    ``late`` values that it reads, by key; and the arrays (``used_given``, by number)
    and values (``used_keys``, by key) that its result depends on."""

    sought: list[SoughtLookup]
    ids: list[jax.Array]
    rows: list[jax.Array]
    late: dict[int, jax.Array]
    used_given: frozenset[int]
    used_keys: frozenset[int]

    def rows_of(
        self, rows: list[jax.Array]
    ) -> Callable[[int, SoughtLookup], jax.Array]:
        """Makes a ``rows_of`` function for `Substitution` that returns these rows in
        order."""

        def handed(number: int, sought: SoughtLookup) -> jax.Array:
            known = self.sought[number] if number < len(self.sought) else None
            if known is None or not _is_same(known, sought):
                raise _refusals.changed(
                    "zs.value_and_grad", f"it looks up other rows of {sought.table}"
                )
            return rows[number]

        return handed


@dataclass(frozen=True, slots=True)
class LookupDiscovery:
    """Finds the lookups of a function by tracing it.

    ``late`` are variables, by key, which are read only if the function reads them.
    """

    call: Call
    outer: TraceRecorder
    given: list[Any]
    stand_for: list[VariableHandle | None]
    values: dict[int, jax.Array]
    late: dict[int, VariableHandle]

    def run(self) -> DiscoveredLookups:
        """Traces the function, and looks up the rows of all its lookups.

        Raises:
            Exception: Whatever the function raises.
        """
        sought, keys = self._found()
        flow = self._traced(sought, keys)
        # Ids are the last outputs of the trace.
        first = flow.outputs - len(sought)
        late: dict[int, jax.Array] = {}
        rows: list[jax.Array] = []
        ids: list[jax.Array] = []
        values = [self.values[key] for key in sorted(self.values)]
        known = [*self.given, *values]

        def given(number: int) -> Any:
            if number < len(known):
                return known[number]
            number -= len(known)
            return (
                late_value(keys[number])
                if number < len(keys)
                else rows[number - len(keys)]
            )

        def late_value(key: int) -> jax.Array:
            if key not in late:
                late[key] = self.outer.read(self.late[key])
            return late[key]

        for number, wanted in enumerate(sought):
            part, needed = flow.part([first + number])
            # In order: these ids may depend on rows of earlier lookups.
            ids += part(*[given(n) for n in needed])
            with claimed(wanted.where):
                rows.append(self.outer.lookup(wanted.table, ids[-1]))
        # Of the result alone: ids are integers and carry no gradient.
        used = flow.inputs_of(range(first))
        names = [*sorted(self.values), *keys]
        return DiscoveredLookups(
            sought,
            ids,
            rows,
            {key: late_value(key) for key in keys},
            frozenset(n for n in range(len(self.given)) if used >> n & 1),
            frozenset(
                key for n, key in enumerate(names, len(self.given)) if used >> n & 1
            ),
        )

    def _found(self) -> tuple[list[SoughtLookup], list[int]]:
        """Traces the function to find its lookups, and the keys of the late values that
        it reads."""
        keys: list[int] = []
        recordings: list[Substitution] = []

        def abstract(seed: jax.Array, given: Any, values: Any) -> None:
            def like(shape: tuple[int, ...], dtype: Any) -> jax.Array:
                seen: Any = jax.dtypes.canonicalize_dtype(dtype)
                return jax.lax.broadcast(seed.astype(seen), shape)

            def value_of(variable: VariableHandle) -> jax.Array:
                if variable.spec.key not in keys:
                    keys.append(variable.spec.key)
                return like(variable.shape, variable.dtype)

            recording = self._substitution(
                given,
                values,
                late=self.late,
                value_of=value_of,
                rows_of=lambda _, sought: like(_shape(sought), sought.table.dtype),
            )
            recordings.append(recording)
            self.call(given, recording)

        # Values are computed from a seed, as constants would not be traced at every
        # depth; see `zstrat.program.trace._flow.Discovery`.
        jax.eval_shape(abstract, np.zeros((), np.float32), self.given, self.values)
        return recordings[-1].sought, keys

    def _traced(self, sought: list[SoughtLookup], keys: list[int]) -> Flow:
        """Traces the function with the looked-up rows as last inputs and the ids as
        last outputs."""
        checked = DiscoveredLookups(sought, [], [], {}, frozenset(), frozenset())

        def replayed(given: Any, values: Any, late: Any, rows: Any) -> Any:
            known = dict(
                zip((*sorted(self.values), *keys), (*values, *late), strict=True)
            )
            recording = self._substitution(given, known, rows_of=checked.rows_of(rows))
            result = self.call(given, recording)
            return result, [lookup.ids for lookup in recording.sought]

        kind: Any = jax.ShapeDtypeStruct  # untyped
        late = [kind(self.late[k].shape, self.late[k].dtype) for k in keys]
        rows = [kind(_shape(s), s.table.dtype) for s in sought]
        values = [self.values[key] for key in sorted(self.values)]
        return Flow(jax.make_jaxpr(replayed)(self.given, values, late, rows))

    def _substitution(
        self, given: Any, values: dict[int, jax.Array], **how: Any
    ) -> Substitution:
        handed = list(zip(given, self.stand_for, strict=True))
        return Substitution(self.outer, values, handed, is_staged=True, **how)


def _shape(sought: SoughtLookup) -> tuple[int, ...]:
    return (*sought.ids.shape, *sought.table.shape[1:])


def _is_same(one: SoughtLookup, other: SoughtLookup) -> bool:
    return (one.table, one.ids.shape, one.via) == (
        other.table,
        other.ids.shape,
        other.via,
    )
