"""The trace of jax that is under way, and which earlier ones may be used in it.

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
from typing import TYPE_CHECKING, Any, Final, cast

import jax
from jax.extend.core import get_opaque_trace_state

if TYPE_CHECKING:
    from collections.abc import Hashable
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
