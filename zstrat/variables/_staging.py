"""Whether jax is staging Python out: what runs now runs once, and what it leaves behind
is computed with again and again.

Outside of a step function nobody notes what happens to a variable meanwhile: a value
would be a constant of what jax keeps, and an update would happen once, at the first
call. So both are refused, with words. Law of the file: ``jax.grad``, ``jax.vmap`` and
``jax.linearize`` compute at once, hence they are free to read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

if TYPE_CHECKING:
    from ._spec import VariableSpec

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
    if _makes_tracers():
        return True
    _at_once = state
    return False


def refuse_read(spec: VariableSpec) -> None:
    """Refuses a value that jax would keep.

    Raises:
        RuntimeError: jax is staging.
    """
    if is_staging():
        raise RuntimeError(
            f"{spec} is read {_TRACED} outside of a zs.function: jax would keep the "
            "value of now for all later calls. Read it before and pass the value in as "
            "an argument, or make the outermost function a zs.function"
        )


def refuse_update(spec: VariableSpec, what: str) -> None:
    """Refuses an update that would happen at the first call alone.

    Raises:
        RuntimeError: jax is staging.
    """
    if is_staging():
        raise RuntimeError(
            f"{what} {spec} {_TRACED} outside of a zs.function: it would happen once, "
            "while jax traces, and at no later call. Return the new value and update "
            "the variable with it, or make the outermost function a zs.function"
        )


def _makes_tracers() -> bool:
    # An operation without operands belongs to the innermost trace that stages, if any:
    # those that compute at once hand it on.
    return isinstance(jax.lax.iota(np.int32, 1), jax.core.Tracer)
