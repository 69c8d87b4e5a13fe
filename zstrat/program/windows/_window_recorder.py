"""`WindowRecorder`: the recorder of one step inside of a window.

Variables that the window trains are arrays here: reads return the worker's own copy,
and the inner optimizer moves it at once. All else that would have an effect on others
is refused.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.trace import _refusals, joined
from zstrat.program.trace._context import current_trace, fresh
from zstrat.program.trace._flow import marked
from zstrat.program.trace._structure import split
from zstrat.program.trace._updates import Moves, rows_here
from zstrat.program.trace._where import here
from zstrat.variables import TraceRecorder, VariableUse, note_use, recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.program.trace._capture import Capture
    from zstrat.program.trace._feeds import SlotsKey
    from zstrat.program.trace._iterator import StepIterator
    from zstrat.program.trace._structure import Structure
    from zstrat.variables import (
        GradientCall,
        SlotRule,
        Table,
        VariableHandle,
        VariableUpdate,
    )

window_of_step: Final[ContextVar[int | None]] = ContextVar(
    "zstrat_window_of_step", default=None
)
"""The id of the inner optimizer whose window is being traced. The code that sets it
resets it."""


class NeedsElement(BaseException):
    """A step draws an element that its window has not drawn yet. Not an `Exception`:
    the step must not catch it."""

    def __init__(self, iterator: StepIterator) -> None:
        self.iterator = iterator


class StepLookup(NamedTuple):
    """A look-up in a step of a window; ``ids`` belong to the trace of the step."""

    table: Table
    ids: jax.Array
    where: str


class WindowRecorder(TraceRecorder):
    """Records one step of a window.

    Args:
        inner: Id of the inner optimizer.
        outer: The capture of the window.
        values: Values of variables, by key. Others are zeros, and noted in ``reads``:
            such a trace is not run, and finds out what the step does.
        slots: The slots of the inner optimizer; zeros without it.
        drawn: The elements that the step draws, each with its iterator.
        rows: The rows of its look-ups; without them those of ``values``.
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
        """The gradients that the step applies; the arrays belong to the trace."""
        self.moves = Moves(self)
        self.drawn = 0
        """Number of elements drawn."""
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
        result. Random keys among the arguments are folded with the number."""
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
        for key, (_, value) in self.moves.values.items():
            self._values[key] = value
        # Inner functions that jax has traced already closed over the old value.
        self._scope.enter_context(fresh())

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        """Returns the slots of the inner optimizer before the step."""
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
    """Returns an argument as step ``number`` gets it: a random key is another one in
    each step."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return leaf
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        fold: Any = jax.random.fold_in
        for _ in np.shape(leaf):
            fold = jax.vmap(fold, (0, None))
        return fold(leaf, number)
    return leaf
