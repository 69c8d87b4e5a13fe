"""What a variable does while a function is traced, by a capture or by jax alone.

A step function's capture installs itself in the context variable `recorder`, which is
where a variable turns to; then reads return traced arrays and updates are written down
instead of being done. Law of the file: the context variable is set by captures alone,
cleared while an optimizer's transformation is traced, and always reset by who set it.

Outside of a step function jax may stage Python out all the same: what runs now runs
once, and what it leaves behind is computed with again and again. Nobody notes what
happens to a variable meanwhile: a value would be a constant of what jax keeps, and an
update would happen once, at the first call. So both are refused, with words. Law of the
file: ``jax.grad``, ``jax.vmap`` and ``jax.linearize`` compute at once, hence they are
free to read.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from .gradients._gradient_call import UpdateRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._spec import VariableSpec
    from ._storage import VariableHandle
    from ._table import Table
    from .gradients._gradient_call import GradientCall


class TraceRecorder(UpdateRecorder, Protocol):
    """What the trace of a step function does with the variables that it meets."""

    def read(self, variable: VariableHandle) -> jax.Array:
        """The value as the trace sees it, writes of the same step included."""
        ...

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        """The rows of a table, ``ids.shape + row``; ``ids`` are integers."""
        ...

    def optimize(self, call: GradientCall) -> None:
        """Notes gradients of the leaves of a tree; what belongs together stays
        together."""
        ...

    def drew(self, leaf: object) -> bool:
        """Whether this very object is (a leaf of) an element that the step drew from an
        iterator. Such arrays are split over the replicas of a worker."""
        ...


class VariableUse(enum.Enum):
    """What a body that is traced does with a variable."""

    VALUE = enum.auto()
    """Reads or updates it."""
    NAME = enum.auto()
    """Asks for its name, its device or its strategy."""
    HASH = enum.auto()
    """Looks for it in a dict or a set."""


use_watcher: Final[ContextVar[Callable[[Any, VariableUse], None] | None]] = ContextVar(
    "zstrat_use_watcher", default=None
)
"""Called at each use of a variable. Whoever sets it resets it."""


def note_use(use: VariableUse, *variables: object) -> None:
    """Reports a use of variables to the watcher, if there is one."""
    watcher = use_watcher.get()
    if watcher is not None:
        for variable in variables:
            watcher(variable, use)


@runtime_checkable
class KeepsCopies(Protocol):
    """A recorder outside of replicas, which knows all copies of a variable of which
    each replica has its own."""

    def copies(self, variable: VariableHandle) -> jax.Array:
        """All copies, ``[count, ...]``."""
        ...

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        """The copies from now on."""
        ...


@runtime_checkable
class RunsWithValues(Protocol):
    """A recorder of a function that may run with values."""

    has_values: bool
    """It does, so what it reads can be given to numpy."""
    may_create: bool
    """And there is a place for new variables."""


recorder: Final[ContextVar[TraceRecorder | None]] = ContextVar(
    "zstrat_recorder", default=None
)
"""The capture that is under way in this thread or task, if any."""


_TRACED: Final = (
    "inside a function that jax traces before it runs (jax.jit, jax.lax.scan, "
    "jax.lax.cond, jax.checkpoint, jax.eval_shape, ...)"
)

_at_once: Any = None
"""The last state of jax in which it was found to compute at once: comparing with it
spares the operation that finds out. Not asked at import, where the operation would
start jax's backend before the program has said which devices it wants."""


def is_staging() -> bool:
    """Whether what is computed now is only traced, to be run later."""
    global _at_once
    state: Any = get_opaque_trace_state()  # type: ignore[no-untyped-call]
    if state == _at_once:
        return False
    # An operation without operands belongs to the innermost trace that stages, if any:
    # those that compute at once hand it on.
    if isinstance(jax.lax.iota(np.int32, 1), jax.core.Tracer):
        return True
    _at_once = state
    return False


class StagedAccess(RuntimeError):
    """A variable is read or updated by Python that jax runs once, to trace it."""

    def __init__(self, variable: str, words: str) -> None:
        super().__init__(words)
        self.variable = variable


def refuse_read(spec: VariableSpec) -> None:
    """Refuses a value that jax would keep.

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
    """Refuses an update that would happen at the first call alone.

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
