"""The recorder of the step that is being traced, and errors for tracing outside of
steps.

The capture (tracing) of a step function sets itself in the context variable `recorder`,
and variables pass reads and updates to it: reads return traced arrays, updates are
recorded instead of applied. Law: only captures set the context variable; it is cleared
while an optimizer's transformation is traced; the code that sets it resets it.

Outside of step functions jax may trace Python, too (``jax.jit``): the body runs once,
and the program that comes out runs many times. A value that is read would be a constant
of that program, and an update would happen once, at the first call. So reads and
updates raise errors there. Law: ``jax.grad``, ``jax.vmap`` and ``jax.linearize``
compute at once, so reads inside these are allowed.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._storage import VariableSpec
    from .gradients._gradient_call import TraceRecorder


class VariableUse(enum.Enum):
    """The ways in which a function that is being traced uses a variable."""

    VALUE = enum.auto()
    """The code reads or updates the variable."""
    NAME = enum.auto()
    """The code reads the variable's name, device or strategy."""
    HASH = enum.auto()
    """The code looks the variable up in a dict or a set."""


use_watcher: Final[ContextVar[Callable[[Any, VariableUse], None] | None]] = ContextVar(
    "zstrat_use_watcher", default=None
)
"""Function to call at each use of a variable; None: nobody watches. The code that sets
it resets it."""


def note_use(use: VariableUse, *variables: object) -> None:
    """Reports a use of a variable to the watcher, if one is set."""
    watcher = use_watcher.get()
    if watcher is not None:
        for variable in variables:
            watcher(variable, use)


recorder: Final[ContextVar[TraceRecorder | None]] = ContextVar(
    "zstrat_recorder", default=None
)
"""The capture that is tracing a step in this thread or task; None if none is."""


_TRACED: Final = (
    "inside a function that jax traces before it runs (jax.jit, jax.lax.scan, "
    "jax.lax.cond, jax.checkpoint, jax.eval_shape, ...)"
)

_at_once: Any = None
"""The last trace state in which jax computed at once. If the present state is equal,
`is_staging` need not run an operation to find out. Not set at import: the operation
would start jax's backend before the program has said which devices it wants."""


def is_staging() -> bool:
    """Returns whether jax is tracing the running code, to compile it and run it
    later."""
    global _at_once
    state: Any = get_opaque_trace_state()  # type: ignore[no-untyped-call]
    if state == _at_once:
        return False
    # An operation without operands belongs to the innermost trace that stages, if any:
    # traces that compute at once pass it on.
    if isinstance(jax.lax.iota(np.int32, 1), jax.core.Tracer):
        return True
    _at_once = state
    return False


class StagedAccess(RuntimeError):
    """Raised when code that jax runs only once, to trace it, reads or updates a
    variable."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(message)
        self.variable = variable


def refuse_read(spec: VariableSpec) -> None:
    """Refuses to read a variable if jax is tracing and would keep its value as a
    constant.

    Raises:
        StagedAccess: jax is tracing the running code to run it later.
    """
    if is_staging():
        raise StagedAccess(
            str(spec),
            f"{spec} is read {_TRACED} outside of a zs.function: jax would keep the "
            "value of now for all later calls. Read it before and pass the value in as "
            "an argument, or make the outermost function a zs.function",
        )


def refuse_update(spec: VariableSpec, what: str) -> None:
    """Refuses an update of a variable that would happen once, while jax traces.

    Raises:
        StagedAccess: jax is tracing the running code to run it later.
    """
    if is_staging():
        raise StagedAccess(
            str(spec),
            f"{what} {spec} {_TRACED} outside of a zs.function: it would happen once, "
            "while jax traces, and at no later call. Return the new value and update "
            "the variable with it, or make the outermost function a zs.function",
        )
