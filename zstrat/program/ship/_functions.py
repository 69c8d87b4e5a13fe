"""The user's functions, made in two steps: first what the class statement needs.

A function's globals and cells may hold the class that it is a method of. So it is made
empty, the class is made of such functions, and then they are filled. What cannot lead
back to a class is there from the start, because code that runs when a class is made
(a metaclass, ``__init_subclass__``) looks at names, defaults and marks of methods, and
may call them.

Functions that Python's library makes around one of the user's, and that refer to
things of their process (a cache, a lock), are made again by calling it.

``jax.checkpoint(f)``, ``jax.vmap(f)`` or ``contextlib.contextmanager(f)`` return a
function that cannot be imported: its code is the package's and what it closes over is
the user's. It is made again over the globals of the package's module where it arrives.
By value those globals would travel too, and some of them cannot. A function with a
custom gradient is an object of jax that holds such functions. It answers for any
attribute from one of its own, so that pickle must not ask it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any, Final

import jax

from zstrat.program.trace._where import is_installed
from zstrat.variables import is_machinery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


Reduced = tuple[Any, ...]

_PLAIN: Final = (str, bytes, bool, int, float, complex, type(None), type(...))
_LRU: Final = type(functools.lru_cache(lambda: None))
_dispatching: Final[Any] = functools.singledispatch(lambda _: None)
_OF_DISPATCH: Final = ("register", "dispatch", "registry", "_clear_cache")


def early(fn: types.FunctionType, at_hand: Callable[[object], bool]) -> dict[str, Any]:
    """What a function is given when it is made, by attribute.

    Args:
        at_hand: Whether a global can be there that early: it goes by reference.
    """

    def keep(value: object) -> bool:
        return _is_plain(value) or at_hand(value)

    found: dict[str, Any] = {
        "__name__": fn.__name__,
        "__qualname__": fn.__qualname__,
        "__module__": fn.__module__,
        "__doc__": fn.__doc__,
        "__dict__": {key: value for key, value in vars(fn).items() if _is_plain(value)},
    }
    if _is_plain(fn.__defaults__):
        found["__defaults__"] = fn.__defaults__
    names = fn.__code__.co_names
    given = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    kept = {name: value for name, value in given.items() if keep(value)}
    return {"__globals__": kept, **found}


def empty(reduced: Reduced, found: Mapping[str, Any]) -> Reduced:
    """The first step, of what cloudpickle makes of the function."""
    return _made, (reduced[0], reduced[1], found)


def whole(reduced: Reduced, found: Mapping[str, Any]) -> Reduced:
    """How a function is made in both steps at once."""
    return (*empty(reduced, found), (reduced[5], reduced[2]), None, None, fill)


def remaining(reduced: Reduced) -> Reduced:
    """What the second step needs: the arguments of `fill`."""
    return reduced[5], reduced[2]


def fill(fn: types.FunctionType, state: Any) -> None:
    """Gives an empty function its globals, cells and attributes."""
    setstate, given = state
    setstate(fn, (given[0], dict(given[1])))


def inner_functions(value: object) -> Iterator[types.FunctionType]:
    """The functions that something in the body of a class consists of."""
    match value:
        case types.FunctionType():
            yield value
        case property():
            for part in (value.fget, value.fset, value.fdel):
                yield from inner_functions(part)
        case classmethod() | staticmethod():
            yield from inner_functions(value.__func__)
        case functools.cached_property():
            yield from inner_functions(value.func)


def is_dispatching(fn: types.FunctionType) -> bool:
    """Whether `functools.singledispatch` made it."""
    return fn.__code__ is _dispatching.__code__


def reduced_dispatch(fn: Any) -> Reduced:
    """A function made by `functools.singledispatch`, with its implementations."""
    implementations = dict(fn.registry)
    base = implementations.pop(object)
    own = {key: vars(fn)[key] for key in vars(fn) if key not in _OF_DISPATCH}
    return functools.singledispatch, (base,), (implementations, own), None, None, _teach


def remade(obj: object) -> Reduced | None:
    """How Python's library makes the object again, None if it does not have to."""
    match obj:
        case functools.cached_property():  # Python 3.11 keeps a lock in it
            state = {k: v for k, v in vars(obj).items() if k != "lock"}
            return functools.cached_property, (obj.func,), state
        case _LRU():
            inner: Any = obj
            parameters = inner.cache_parameters()
            arguments = (inner.__wrapped__, parameters["maxsize"], parameters["typed"])
            return _cached, arguments, vars(inner)
    return None


def is_cached(obj: object) -> bool:
    """Whether it is a function with a cache of Python's library."""
    return isinstance(obj, _LRU)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _made(
    make: Callable[..., types.FunctionType], args: Any, found: Mapping[str, Any]
) -> types.FunctionType:
    fn = make(*args)
    attributes = dict(found)
    fn.__globals__.update(attributes.pop("__globals__"))
    vars(fn).update(attributes.pop("__dict__"))
    for name, value in attributes.items():
        setattr(fn, name, value)
    return fn


def _cached(fn: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(fn)


def _teach(dispatch: Any, state: Any) -> None:
    implementations, own = state
    for kind, implementation in implementations.items():
        dispatch.register(kind, implementation)
    vars(dispatch).update(own)


_COPIED = (
    "__annotations__",
    "__defaults__",
    "__dict__",
    "__doc__",
    "__kwdefaults__",
    "__module__",
    "__name__",
    "__qualname__",
)


def reduced(fn: types.FunctionType) -> tuple[Any, ...] | None:
    """What pickle needs of such a function, None for any other."""
    module = sys.modules.get(fn.__globals__.get("__name__", ""))
    if module is None or fn.__globals__ is not vars(module) or _is_importable(fn):
        return None
    filename = getattr(module, "__file__", None) or ""
    if not is_installed(filename) and not is_machinery(filename):
        return None
    attributes = {name: getattr(fn, name) for name in _COPIED}
    state = (fn.__closure__ or (), attributes)
    return _blank, (module.__name__, fn.__code__), state, None, None, _fill


def reduced_vjp(fn: jax.custom_vjp[Any]) -> tuple[Callable[..., Any], Any, Any]:
    """What pickle needs of a function with a custom gradient."""
    return _blank_vjp, (), vars(fn)


def _is_importable(fn: types.FunctionType) -> bool:
    found: Any = sys.modules.get(fn.__module__ or "")
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is fn


def _blank(module: str, code: types.CodeType) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(
        code, vars(importlib.import_module(module)), closure=cells
    )


def _fill(fn: types.FunctionType, state: Any) -> None:
    cells, attributes = state
    for own, given in zip(fn.__closure__ or (), cells, strict=True):
        try:
            own.cell_contents = given.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name, value in attributes.items():
        setattr(fn, name, value)


def _blank_vjp() -> jax.custom_vjp[Any]:
    return object.__new__(jax.custom_vjp)
