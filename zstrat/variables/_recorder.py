"""What is being traced: the recorder of a step, and refusals outside of steps.

The capture of a step function sets itself in the context variable `recorder`, and
variables send reads and updates there: reads return traced arrays, updates are recorded
instead of applied. Law: only captures set the context variable; it is cleared while an
optimizer's transformation is traced; the code that sets it resets it.

Outside of step functions jax may trace Python, too (``jax.jit``): the body runs once,
and the program that comes out runs many times. A value that is read would be a constant
of that program, and an update would happen once, at the first call. So both are
refused. Law: ``jax.grad``, ``jax.vmap`` and ``jax.linearize`` compute at once, so reads
in them are allowed.
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
    """The ways in which a traced body uses a variable."""

    VALUE = enum.auto()
    """Reads or updates it."""
    NAME = enum.auto()
    """Reads its name, its device or its strategy."""
    HASH = enum.auto()
    """Looks it up in a dict or a set."""


use_watcher: Final[ContextVar[Callable[[Any, VariableUse], None] | None]] = ContextVar(
    "zstrat_use_watcher", default=None
)
"""Called at each use of a variable. The code that sets it resets it."""


def note_use(use: VariableUse, *variables: object) -> None:
    """Reports a use of variables to the watcher, if one is set."""
    watcher = use_watcher.get()
    if watcher is not None:
        for variable in variables:
            watcher(variable, use)


recorder: Final[ContextVar[TraceRecorder | None]] = ContextVar(
    "zstrat_recorder", default=None
)
"""The capture that runs in this thread or task, if any."""


_TRACED: Final = (
    "inside a function that jax traces before it runs (jax.jit, jax.lax.scan, "
    "jax.lax.cond, jax.checkpoint, jax.eval_shape, ...)"
)

_at_once: Any = None
"""The last trace state in which jax computed at once. Comparing with it saves the
operation that finds out. Not set at import: the operation would start jax's backend
before the program has said which devices it wants."""


def is_staging() -> bool:
    """Returns whether jax traces what runs now, to run it later."""
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
    """Python that jax runs only once, to trace it, reads or updates a variable."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(message)
        self.variable = variable


def refuse_read(spec: VariableSpec) -> None:
    """Refuses to read a value that jax would keep as a constant.

    Raises:
        StagedAccess: jax is staging.
    """
    if is_staging():
        raise StagedAccess(
            str(spec),
            f"{spec} is read {_TRACED} outside of a zs.function: jax would keep the "
            "value of now for all later calls. Read it before and pass the value in as "
            "an argument, or make the outermost function a zs.function",
        )


def refuse_update(spec: VariableSpec, what: str) -> None:
    """Refuses an update that would happen only at the first call.

    Raises:
        StagedAccess: jax is staging.
    """
    if is_staging():
        raise StagedAccess(
            str(spec),
            f"{what} {spec} {_TRACED} outside of a zs.function: it would happen once, "
            "while jax traces, and at no later call. Return the new value and update "
            "the variable with it, or make the outermost function a zs.function",
        )
