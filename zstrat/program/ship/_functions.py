"""Pickles the user's functions in two steps: first the part that class statements need.

A function's globals and cells may refer to the class that it is a method of. So the
receiver makes empty functions, then the class, and then fills the functions. Attributes
that cannot refer to a class are set from the start, because code that runs when a class
is made (a metaclass, ``__init_subclass__``) reads names, defaults and attributes of
methods, and may call them.

Wrappers of Python's library that refer to objects of their process (a cache, a lock)
are made again by calling the library.

``jax.checkpoint(f)``, ``jax.vmap(f)`` or ``contextlib.contextmanager(f)`` return a
function that cannot be imported: its code belongs to the package, and its closure to
the user. The receiver makes it over the globals of the package's module; by value these
globals would be pickled, too, which fails for some. A function with a custom gradient
is an object of jax that holds such functions. It forwards any attribute to one of them,
so pickle must not read its attributes.
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
    """Returns the attributes that a function has from the start.

    Args:
        at_hand: Whether a global can be set that early, because it is imported.
    """

    def keep(value: object) -> bool:
        return _is_plain(value) or at_hand(value)

    attributes: dict[str, Any] = {
        "__name__": fn.__name__,
        "__qualname__": fn.__qualname__,
        "__module__": fn.__module__,
        "__doc__": fn.__doc__,
        "__dict__": {key: value for key, value in vars(fn).items() if _is_plain(value)},
    }
    if _is_plain(fn.__defaults__):
        attributes["__defaults__"] = fn.__defaults__
    names = fn.__code__.co_names
    given = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    kept = {name: value for name, value in given.items() if keep(value)}
    return {"__globals__": kept, **attributes}


def empty(reduced: Reduced, attributes: Mapping[str, Any]) -> Reduced:
    """Makes the first step from cloudpickle's reduction of a function."""
    return _made, (reduced[0], reduced[1], attributes)


def whole(reduced: Reduced, attributes: Mapping[str, Any]) -> Reduced:
    """Makes both steps at once."""
    return (*empty(reduced, attributes), (reduced[5], reduced[2]), None, None, fill)


def remaining(reduced: Reduced) -> Reduced:
    """Returns the arguments of `fill`, the second step."""
    return reduced[5], reduced[2]


def fill(fn: types.FunctionType, state: Any) -> None:
    """Sets globals, cells and attributes of an empty function."""
    setstate, given = state
    setstate(fn, (given[0], dict(given[1])))


def inner_functions(value: object) -> Iterator[types.FunctionType]:
    """Iterates over the functions in an attribute of a class."""
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
    """Returns whether `functools.singledispatch` made the function."""
    return fn.__code__ is _dispatching.__code__


def reduced_dispatch(fn: Any) -> Reduced:
    """Reduces a function of `functools.singledispatch`, with its implementations."""
    implementations = dict(fn.registry)
    base = implementations.pop(object)
    own = {key: vars(fn)[key] for key in vars(fn) if key not in _OF_DISPATCH}
    return functools.singledispatch, (base,), (implementations, own), None, None, _teach


def remade(obj: object) -> Reduced | None:
    """Reduces a wrapper of Python's library to a call of it; None for other objects."""
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
    """Returns whether this is a function of `functools.lru_cache`."""
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
    """Reduces a function that an installed package made; None for other functions."""
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
    """Reduces a function with a custom gradient."""
    return _blank_vjp, (), vars(fn)


def _is_importable(fn: types.FunctionType) -> bool:
    attribute: Any = sys.modules.get(fn.__module__ or "")
    for name in fn.__qualname__.split("."):
        attribute = getattr(attribute, name, None)
    return attribute is fn


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
