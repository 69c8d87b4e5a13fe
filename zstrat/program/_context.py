"""What a step knows about the worker that runs it.

The worker sets `worker_context` around every step and dataset function. A step that
asks is traced again when the answer changes (a second attempt, say), because the answer
is a Python value of the trace.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Which worker this is.

    ``worker_index`` is in ``[0, worker_count)``; ``attempt`` is 1 when the closure runs
    for the first time, and one more after each worker that was lost with it.
    """

    worker_index: int
    worker_count: int
    attempt: int = 1


worker_context: Final[ContextVar[WorkerContext | None]] = ContextVar(
    "zstrat_worker_context", default=None
)
"""Set by the worker; law of the file: whoever sets it resets it."""

asked: Final[ContextVar[Callable[[], None] | None]] = ContextVar(
    "zstrat_worker_context_asked", default=None
)
"""Told whenever a trace asks, so that its plan is not used under another context."""

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
