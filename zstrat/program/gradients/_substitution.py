"""The recorder of a function that is being differentiated.

It hands out the arrays of jax's trace in place of the values of variables and of the
rows that are looked up. Which rows those are is not known when a function is met for
the first time: the first lookup then ends the attempt (`Met`), and the function is
looked through before it is differentiated (see `_survey`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from zstrat.program.trace import _refusals
from zstrat.program.trace._eager import Immediate
from zstrat.program.trace._fresh import apart, current_trace, fresh
from zstrat.program.trace._where import here
from zstrat.variables import KeepsCopies, recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import jax

    from zstrat.program.trace._iterator import StepIterator
    from zstrat.variables import (
        GradientCall,
        Table,
        TraceRecorder,
        VariableHandle,
        VariableUpdate,
    )


class Met(BaseException):
    """What cannot be had yet is asked of ``by``. No `Exception`: it is nobody's error,
    and the function that is differentiated must not catch it."""

    def __init__(self, by: Substitution) -> None:
        self.by = by


@runtime_checkable
class Live(Protocol):
    """A recorder that may hand out real values."""

    live: bool


class Sought(NamedTuple):
    """A lookup by the function. ``via`` tells of each component of the table which of
    the arrays that it was given (by number) was used in place of the variable."""

    table: Table
    ids: jax.Array
    via: tuple[int | None, ...]
    where: str


class Substitution:
    """Hands out given arrays in place of values read from outside.

    Other reads go on to ``outer``; updates and draws are refused. If nothing is being
    captured, a substituted read under jax.jit and the like is refused too: jax would
    keep that trace with the array of this one, and `fresh` would compile every
    operation again and again.

    Args:
        values: What to hand out, by key of the variable.
        given: Arrays among the arguments with the variables that they stand for.
        late: Variables, by key, whose values ``value_of`` gives; without it, `Met`.
        rows_of: Gives the rows of a lookup; without it, `Met`.
        is_staged: The function is only looked through: nothing of this trace is run.
    """

    def __init__(
        self,
        outer: TraceRecorder | None,
        values: dict[int, jax.Array],
        given: Sequence[tuple[Any, VariableHandle | None]] = (),
        *,
        late: Collection[int] = (),
        value_of: Callable[[VariableHandle], jax.Array] | None = None,
        rows_of: Callable[[int, Sought], jax.Array] | None = None,
        is_staged: bool = False,
    ) -> None:
        self.live = not is_staged and (outer is None or is_live(outer))
        """Whether values are real, so that nothing is being captured."""
        self.sought: list[Sought] = []
        self._outer = Immediate() if outer is None else outer
        self._values = values
        self._given = given
        self._late, self._value_of, self._rows_of = late, value_of, rows_of
        inherited: tuple[int, ...] = ()
        if isinstance(outer, Substitution):
            inherited = outer.substituted
        self.substituted: tuple[int, ...] = (*inherited, *sorted(values))
        self._outermost: object = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Substitutes in what is inside; entered in the trace of the given arrays."""
        self._outermost = current_trace()
        before = recorder.set(self)
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
        if key not in self._late:
            return self._outer.read(variable)
        if self._value_of is None:
            raise Met(self)
        return self._value_of(variable)

    def copies(self, variable: VariableHandle) -> jax.Array:
        """All copies of a variable of which each replica has its own."""
        assert isinstance(self._outer, KeepsCopies)
        return self._outer.copies(variable)

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        raise _refusals.update_inside(variable.spec, "an update of copies")

    def lookup(
        self, table: Table, ids: jax.Array, via: Sequence[int | None] = ()
    ) -> jax.Array:
        if current_trace() != self._outermost:
            raise _refusals.lookup_inside(table)
        if self._rows_of is None:
            raise Met(self)
        via = tuple(via) or (None,) * len(table.components)
        self.sought.append(Sought(table, ids, via, here()))
        return self._rows_of(len(self.sought) - 1, self.sought[-1])

    def behind(self, array: object) -> tuple[VariableHandle, int] | None:
        """The variable that this very array stands for, and the array's number."""
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


def is_live(outer: TraceRecorder) -> bool:
    """Whether values are real under this recorder, so that nothing is captured."""
    if isinstance(outer, Immediate):
        return True
    return isinstance(outer, Live) and outer.live
