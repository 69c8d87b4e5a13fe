"""By what a function is known: where it stands in the source, and what it has captured.

The place is the identity of a code. What was captured is known by what it is, where
that is all that it is: numbers, also those of numpy, text, and what is made of parts
that never change (tuples, slices, functions, methods, partials). Anything else is known
by which object it is. So a lambda that is made anew at each call is the same one.

Law of the file: this runs at each call of ``run``, and asks nothing of what it finds
but its type.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.program import Function

from ._captured import (
    MAX_ITEMS,
    PLAIN,
    captured_values,
    is_global,
    is_partial,
    wrapped_in,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

_DEPTH: Final = 3
"""How deep functions that capture functions are looked into; the objects themselves are
compared beneath."""

_OF_PARTS: Final = frozenset(
    (types.FunctionType, types.MethodType, functools.partial, tuple, slice)
)


def named(
    fn: Any,
    captured: list[Any],
    compared: list[types.FunctionType],
    depth: int = 0,
) -> tuple[int, Hashable]:
    """Where the function stands in the source, and what it has captured.

    Args:
        captured: Gets the objects that are known by their identity.
        compared: Gets the functions that are known by what they have captured.
    """
    if type(fn) is types.FunctionType:
        compared.append(fn)
        return id(fn.__code__), tuple(
            [_mark(value, captured, compared, depth) for value in captured_values(fn)]
        )
    match fn:
        case Function():
            place, marks = named(fn.body, captured, compared, depth)
            return place, (Function, fn.eager, marks)
        case types.MethodType():
            place, marks = named(fn.__func__, captured, compared, depth)
            captured.append(fn.__self__)
            return place, (id(fn.__self__), marks)
        case functools.partial() if is_partial(fn):
            place, marks = named(fn.func, captured, compared, depth)
            given = *fn.args, *fn.keywords.values()
            return place, (
                tuple(fn.keywords),
                marks,
                *[_mark(value, captured, compared, depth) for value in given],
            )
    captured.append(fn)
    code = _code_of(fn)
    if code is None:
        return id(fn), ()
    captured.append(code)
    return id(code), (id(fn),)


def _code_of(fn: Any) -> types.CodeType | None:
    """What stands in the source of an object that is called: a function that it wraps,
    as those of jax do, or the method that its class has for it."""
    call = wrapped_in(fn)
    if not isinstance(call, types.FunctionType):
        call = type(fn).__call__
    if isinstance(call, Function):
        call = call.body
    return call.__code__ if isinstance(call, types.FunctionType) else None


def _mark(
    value: Any, captured: list[Any], compared: list[types.FunctionType], depth: int
) -> Hashable:
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # -0.0 is another one than 0.0
    if kind in PLAIN:
        return kind, value
    if kind in _OF_PARTS:
        if depth < _DEPTH:
            return _mark_of_parts(value, captured, compared, depth + 1)
    elif isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    captured.append(value)
    return id(value)


def _mark_of_parts(
    value: Any, captured: list[Any], compared: list[types.FunctionType], depth: int
) -> Hashable:
    """Of what is made anew of the same parts, as it may be at each call."""
    kind = type(value)
    parts: tuple[Any, ...]
    if kind is tuple and len(value) <= MAX_ITEMS:
        parts = value
    elif kind is slice:
        parts = value.start, value.stop, value.step
    elif kind is tuple or (kind is types.FunctionType and is_global(value)):
        captured.append(value)
        return id(value)
    else:
        return named(value, captured, compared, depth)
    return kind, *[_mark(part, captured, compared, depth) for part in parts]
