"""The function that ``run`` was given, for the step that is kept of its like.

A step is kept for all functions that are the same by what they have captured when they
are given. Later that may change, of each of them by itself, and a step may be traced
once more at any call, for another shape: so it runs the function of that very call.

Law of the file: a step holds none of the functions that it runs, so that each may go.
"""

from __future__ import annotations

import functools
import types
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from zstrat.program import Function

from ._captured import is_partial

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_given: Final[ContextVar[Callable[..., Any]]] = ContextVar("zstrat_given_function")


def run_as(
    step: Function,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a step, and in it ``fn``. Raises: Whatever either raises."""
    token = _given.set(fn)
    try:
        return step(*args, **kwargs)
    finally:
        _given.reset(token)


def given() -> Callable[..., Any]:
    """The function of this call; a step function as it runs in a step."""
    fn = _given.get()
    return fn.body if isinstance(fn, Function) else fn


def origin(fn: Callable[..., Any]) -> weakref.ref[Any] | None:
    """Whatever says whether the function is still in use."""
    held: Any = fn.__self__ if isinstance(fn, types.MethodType) else fn
    try:
        return weakref.ref(held)
    except TypeError:
        return None


def called_like(step: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """``step``, by the names of ``fn``, which it does not hold."""
    while is_partial(fn) and "__name__" not in vars(fn):
        fn = fn.func  # it has none of its own
    names = [fn] if isinstance(fn, types.FunctionType) else [type(fn), fn]
    for each in names:  # the object's own ones, if it has them
        functools.update_wrapper(step, each, updated=())
    del step.__dict__["__wrapped__"]
    return step
