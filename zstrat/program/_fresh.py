"""Keeps jax's caches of inner traces from crossing the border between our traces.

`jax.jit`, `lax.scan` and the like remember the jaxpr of a Python function by the
identity of the function and the types of its arguments. A function that reads a
variable closes over a traced value that neither of the two shows: met again in another
trace of the step, or after a write in the same one, the remembered jaxpr would hold the
old value. A jax user context is part of those caches' keys, so each trace, and each
write within one, runs under a number of its own.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, cast

import jax

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# Made when the module is imported: jax forbids to do it while other threads use jax.
_epoch: Final[Any] = jax.make_user_context(0)  # type: ignore[no-untyped-call]
_numbers: Final = itertools.count(1)


def fresh() -> AbstractContextManager[None]:
    """While entered, no inner trace from outside of it is used again."""
    return cast("AbstractContextManager[None]", _epoch(next(_numbers)))
