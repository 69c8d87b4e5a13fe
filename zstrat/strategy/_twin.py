"""The same function as another object: a step of it is kept, and the function may go.

What was captured stays with the step, but neither the object that a method is of, nor
one that is called itself: whoever runs them has them.

Law of the file: a twin runs only while what it was made of lives.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

from zstrat.program import Function

from ._captured import is_partial

if TYPE_CHECKING:
    from collections.abc import Callable


def origin(fn: Callable[..., Any]) -> weakref.ref[Any] | None:
    """Whatever says whether the function is still in use."""
    held: Any = fn.__self__ if isinstance(fn, types.MethodType) else fn
    try:
        return weakref.ref(held)
    except TypeError:
        return None


def twin(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as another object, so that the first one may go."""
    match fn:
        case types.FunctionType():
            return _of_function(fn)
        case Function():
            return twin(fn.body)  # as which it runs in a step
        case types.MethodType():
            return _of_method(fn)
        case functools.partial() if is_partial(fn):
            return _of_partial(fn)
    return _of_object(fn)


def _of_partial(fn: functools.partial[Any]) -> functools.partial[Any]:
    part = functools.partial(twin(fn.func), *fn.args, **fn.keywords)
    functools.update_wrapper(part, part.func, updated=())  # it has no name of its own
    del part.__dict__["__wrapped__"]
    part.__dict__.update(fn.__dict__)
    return part


def _of_function(fn: types.FunctionType) -> types.FunctionType:
    made = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    if fn.__kwdefaults__ is not None:
        made.__kwdefaults__ = dict(fn.__kwdefaults__)
    made.__qualname__, made.__module__ = fn.__qualname__, fn.__module__
    made.__doc__ = fn.__doc__
    return made


def _of_method(method: types.MethodType) -> Callable[..., Any]:
    try:
        held = weakref.ref(method.__self__)
    except TypeError:
        return method
    fn = method.__func__

    @functools.wraps(fn)
    def made(*args: Any, **kwargs: Any) -> Any:
        return fn(held(), *args, **kwargs)

    del made.__wrapped__  # it has one argument more
    return made


def _of_object(called: Any) -> Callable[..., Any]:
    held: Callable[[], Any]
    try:
        held = weakref.ref(called)
    except TypeError:

        def held() -> Any:
            return called

    def made(*args: Any, **kwargs: Any) -> Any:
        living: Any = held()
        return living(*args, **kwargs)

    for names in (type(called), called):  # the object's own ones, if it has them
        functools.update_wrapper(made, names, updated=())
    del made.__dict__["__wrapped__"]
    return made
