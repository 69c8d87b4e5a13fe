"""What a trace is made in, and may be used again in: of jax, a worker, a strategy.

The worker sets `worker_context` around every step and dataset function. A step that
asks is traced again when the answer changes (a second attempt, say), because the answer
is a Python value of the trace. The strategy in whose scope a step is called, or whose
replica function calls it, names its programs, asked for or not: `strategy.run` and
others look at it, too.

`jax.jit`, `lax.scan` and the like remember the jaxpr of a Python function by the
identity of the function and the types of its arguments. A function that reads a
variable closes over a traced value that neither of the two shows: met again in another
trace of the step, or after a write in the same one, the remembered jaxpr would hold the
old value. A jax user context is part of those caches' keys, so each trace of ours, and
each write within one, runs under a number of its own (`fresh`). Replicas that run one
after the other are in the same trace, or in none: they have a context besides.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import jax
from jax.extend.core import get_opaque_trace_state

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Hashable, Iterator
    from contextlib import AbstractContextManager


# Both made when the module is imported: jax forbids it while other threads use jax.
_epoch: Final[Any] = jax.make_user_context(0)  # type: ignore[no-untyped-call]
_replica: Final[Any] = jax.make_user_context(None)  # type: ignore[no-untyped-call]
_numbers: Final = itertools.count(1)


def fresh() -> AbstractContextManager[None]:
    """While entered, no inner trace from outside of it is used again.

    Costs a retrace of every inner function, and outside of a trace a compilation of
    every operation: for traces only.
    """
    return cast("AbstractContextManager[None]", _epoch(next(_numbers)))


def apart(name: Hashable) -> AbstractContextManager[None]:
    """While entered, only inner traces made under the same name are used again."""
    return cast("AbstractContextManager[None]", _epoch(name))


def as_replica(number: int, count: int) -> AbstractContextManager[None]:
    """While entered, only inner traces made as this one of so many replicas are used
    again: a function that jax has traced may have asked for the number."""
    return cast("AbstractContextManager[None]", _replica((number, count)))


def current_trace() -> object:
    """The innermost transformation under way, comparable and otherwise opaque."""
    state: object = get_opaque_trace_state()  # type: ignore[no-untyped-call]
    return state


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Which worker this is.

    ``worker_index`` is in ``[0, worker_count)``, where ``worker_count`` are those that
    the cluster had so far when this one joined; ``attempt`` is 1 when the closure runs
    for the first time, and one more after each worker that was lost with it.
    """

    worker_index: int
    worker_count: int
    attempt: int = 1


worker_context: Final[ContextVar[WorkerContext | None]] = ContextVar(
    "zstrat_worker_context", default=None
)
"""Set by the worker; law of the file: whoever sets it resets it."""

building: Final[ContextVar[bool]] = ContextVar("zstrat_building", default=False)
"""Whether a worker builds a dataset here: a step function is its plain body then, as it
returns datasets, and is not traced. Whoever sets it resets it."""

input_pipeline: Final[ContextVar[tuple[int, int] | None]] = ContextVar(
    "zstrat_input_pipeline", default=None
)
"""Which input pipeline, and of how many, a worker builds a dataset for; None: that of
its context. Whoever sets it resets it."""

asked: Final[ContextVar[Callable[[], None] | None]] = ContextVar(
    "zstrat_worker_context_asked", default=None
)
"""Told whenever a trace asks, so that its plan is not used under another context."""

strategy_fingerprint: Final[ContextVar[StrategyFingerprint | None]] = ContextVar(
    "zstrat_strategy_fingerprint", default=None
)
"""The fingerprint of the innermost strategy context; None outside of all contexts. The
code that enters or leaves a context sets it."""

_default_fingerprint: StrategyFingerprint | None = None


@dataclass(frozen=True, slots=True)
class StrategyFingerprint:
    """What a body can see of its strategy; equal fingerprints can share a program.

    Programs hold the ``strategy`` weakly; ``side`` says on which side of the strategy
    the code runs.
    """

    strategy: weakref.ref[object]
    side: Hashable


def set_default_fingerprint(fingerprint: StrategyFingerprint | None) -> None:
    """Sets the fingerprint of code that has entered no strategy context."""
    global _default_fingerprint
    _default_fingerprint = fingerprint


def current_fingerprint() -> StrategyFingerprint | None:
    """Returns the fingerprint of the strategy context of the caller."""
    fingerprint = strategy_fingerprint.get()
    return _default_fingerprint if fingerprint is None else fingerprint


tracing_again: Final = ContextVar("zstrat tracing again", default=False)
"""Whether a body is traced that was traced before, for the same program: what it prints
was printed already."""


@contextmanager
def printed_before() -> Iterator[None]:
    """While entered, a body is traced again."""
    before = tracing_again.set(True)
    try:
        yield
    finally:
        tracing_again.reset(before)


ABSTRACT: Final = WorkerContext(worker_index=0, worker_count=1)
"""What a step sees while the coordinator traces it only for its shapes."""


def get_worker_context() -> WorkerContext:
    """The worker that runs this step or dataset function.

    While the coordinator traces a step to learn the shapes of its results, this is
    worker 0 of 1: a shape must not depend on it.

    Raises:
        RuntimeError: Called outside of a step function or a dataset function.
    """
    return _asked("get_worker_context")


def get_current_worker_index() -> int:
    """The index of the worker that runs this step or dataset function, from 0.

    The same as ``get_worker_context().worker_index``; TF's name.

    Raises:
        RuntimeError: Called outside of a step function or a dataset function.
    """
    return _asked("get_current_worker_index").worker_index


def _asked(name: str) -> WorkerContext:
    context = worker_context.get()
    tell = asked.get()
    if tell is not None:
        tell()
        return ABSTRACT if context is None else context
    if context is None:
        raise RuntimeError(
            f"{name}() has an answer only on a worker: call it in the body of a "
            "zs.function or of a dataset function that a coordinator runs"
        )
    return context
