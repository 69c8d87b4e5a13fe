"""The contexts of a trace: worker, strategy, and jax's caches of inner traces.

The worker sets `worker_context` around every step and dataset function. A step that
asks for it is traced again when the answer changes (a second attempt, say), because the
answer is a Python value of the trace. The strategy context of the caller is part of the
key of every program (`StrategyFingerprint`), because `strategy.run` and others depend
on it.

`jax.jit`, `lax.scan` and the like cache the jaxpr of a Python function by the identity
of the function and the types of its arguments. A function that reads a variable closes
over a traced value, which is not in that key: in another trace of the step, or after an
update in the same one, the cached jaxpr would have the old value. A jax user context is
part of those keys, so each trace of ours, and each update in one, runs under a number
of its own (`fresh`). Replicas that run sequentially share one trace, or have none: they
have a second user context.
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
    """Hides cached inner traces while entered.

    Costs a retrace of every inner function, and outside of a trace a compilation of
    every operation: for traces only.
    """
    return cast("AbstractContextManager[None]", _epoch(next(_numbers)))


def apart(name: Hashable) -> AbstractContextManager[None]:
    """Hides cached inner traces of other names while entered."""
    return cast("AbstractContextManager[None]", _epoch(name))


def as_replica(number: int, count: int) -> AbstractContextManager[None]:
    """Hides cached inner traces of other replicas while entered: a function that jax
    has traced may have asked for the number of its replica."""
    return cast("AbstractContextManager[None]", _replica((number, count)))


def current_trace() -> object:
    """Returns jax's innermost transformation, as an opaque object to compare."""
    state: object = get_opaque_trace_state()  # type: ignore[no-untyped-call]
    return state


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The worker that runs a step or dataset function.

    ``worker_index`` is in ``[0, worker_count)``; ``worker_count`` is the number of
    workers when this one joined. ``attempt`` is 1 at the first run of a closure, and
    grows by one with each worker that was lost while it ran the closure.
    """

    worker_index: int
    worker_count: int
    attempt: int = 1


worker_context: Final[ContextVar[WorkerContext | None]] = ContextVar(
    "zstrat_worker_context", default=None
)
"""Set by the worker. Law of the file: code that sets a context variable resets it."""

building: Final[ContextVar[bool]] = ContextVar("zstrat_building", default=False)
"""Whether a worker builds a dataset here. A call of a step function then runs its plain
body, which may return datasets."""

input_pipeline: Final[ContextVar[tuple[int, int] | None]] = ContextVar(
    "zstrat_input_pipeline", default=None
)
"""Index and number of the input pipelines for which a worker builds a dataset; None:
those of its context."""

asked: Final[ContextVar[Callable[[], None] | None]] = ContextVar(
    "zstrat_worker_context_asked", default=None
)
"""Called when a trace asks for the context, so that no other context uses its plan."""

strategy_fingerprint: Final[ContextVar[StrategyFingerprint | None]] = ContextVar(
    "zstrat_strategy_fingerprint", default=None
)
"""The fingerprint of the innermost strategy context; None outside of all contexts. The
code that enters or leaves a context sets it."""

_default_fingerprint: StrategyFingerprint | None = None


@dataclass(frozen=True, slots=True)
class StrategyFingerprint:
    """The properties of a strategy that a body can see; bodies with equal fingerprints
    can share a program.

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
"""Whether a body is traced a second time for the same program: its prints have appeared
already."""


@contextmanager
def printed_before() -> Iterator[None]:
    """Marks the code inside as a second trace of a body."""
    before = tracing_again.set(True)
    try:
        yield
    finally:
        tracing_again.reset(before)


ABSTRACT: Final = WorkerContext(worker_index=0, worker_count=1)
"""The context while a coordinator traces a step only for its shapes."""


def get_worker_context() -> WorkerContext:
    """Returns the worker that runs this step or dataset function.

    While the coordinator traces a step to learn the shapes of its results, this is
    worker 0 of 1: a shape must not depend on it.

    Raises:
        RuntimeError: Called outside of a step function or a dataset function.
    """
    return _asked("get_worker_context")


def get_current_worker_index() -> int:
    """Returns the index of the worker that runs this step or dataset function, from 0.

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
            f"{name}() is called outside of a worker: call it in the body of a "
            "zs.function or dataset function that a coordinator schedules"
        )
    return context
