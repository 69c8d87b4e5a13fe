"""Globals beneath a function: those that functions of its module name, which it calls.

The function itself and what it has captured are compared at each call (`_kept_steps`).
What is beneath them is only watched, in one flat list: whether each name still has the
object that it had when the function was traced. Beneath are helpers of the module,
whatever decorates them, and the methods of its classes.

Law of the file: a helper is looked into when a step is made, and never at a call.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, Final

from zstrat.program import Function

from ._captured import PLAIN, captured_values, global_names, is_global, own_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Module = dict[str, Any]

MAX_FUNCTIONS: Final = 1000
"""How many are looked into beneath one."""

_GONE: Final = object()
_LASTING: Final = (*PLAIN, types.FunctionType, types.ModuleType, type)


class Watched:
    """The globals of some functions, with the objects that they had."""

    __slots__ = ("_names", "_weakly")

    def __init__(self, functions: Iterable[types.FunctionType]) -> None:
        self._names: list[tuple[Module, str, Any]] = []
        self._weakly: list[tuple[Module, str, weakref.ref[Any]]] = []
        found = {(id(fn.__globals__), name): fn for fn in functions for name in _of(fn)}
        for (_, name), fn in found.items():
            self._watch(fn.__globals__, name)

    def are_same(self) -> bool:
        """Whether each name has what it had."""
        for known, name, value in self._names:
            found = known.get(name, _GONE)
            if found is not value and not _are_alike(found, value):
                return False
        for known, name, ref in self._weakly:
            held = ref()
            if held is None or known.get(name) is not held:
                return False
        return True

    def are_there(self) -> bool:
        """Whether they can ever be the same again."""
        return all(ref() is not None for _, _, ref in self._weakly)

    def _watch(self, known: Module, name: str) -> None:
        value = known[name]
        if not isinstance(value, _LASTING):
            try:
                self._weakly.append((known, name, weakref.ref(value)))
            except TypeError:
                pass  # as the others
            else:
                return
        self._names.append((known, name, value))


def beneath(fn: Any) -> list[types.FunctionType]:
    """The function and those that it may call, as far as they are of one module.

    A wrapper that another module has made counts for what it wraps.
    """
    home = _home(fn)
    found: dict[tuple[int, int], types.FunctionType] = {}
    left = [(each, home) for each in _functions(fn, home)]
    while left and len(found) < MAX_FUNCTIONS:
        each, caller = left.pop()
        is_wrapper = each.__globals__ is not caller and "__wrapped__" in vars(each)
        known = caller if is_wrapper else each.__globals__
        if (id(each), id(known)) in found:
            continue
        found[id(each), id(known)] = each
        for value in own_values(each) if is_wrapper else captured_values(each):
            left += [
                (inner, known)
                for inner in _functions(value, known)
                if not is_global(inner) or inner.__globals__ is known
            ]
    homes = {known for _, known in found}
    return [each for each in found.values() if id(each.__globals__) in homes]


def _of(fn: types.FunctionType) -> list[str]:
    return [name for name in global_names(fn.__code__) if name in fn.__globals__]


def _home(fn: Any) -> Module:
    """The globals of the module that the innermost function is of."""
    match fn:
        case Function():
            return _home(fn.body)
        case types.MethodType():
            return _home(fn.__func__)
        case functools.partial():
            return _home(fn.func)
    wrapped = _wrapped(fn)
    if wrapped is not None:
        return _home(wrapped)
    call = fn if isinstance(fn, types.FunctionType) else type(fn).__call__
    return call.__globals__ if isinstance(call, types.FunctionType) else {}


def _functions(value: Any, known: Module) -> Iterator[types.FunctionType]:
    """The functions of Python that a value is made of; beneath what wraps them, and in
    classes, those of one module."""
    match value:
        case types.FunctionType():
            yield value
        case Function():
            yield from _functions(value.body, known)
        case types.MethodType():
            yield from _functions(value.__func__, known)
            yield from _methods(type(value.__self__), known)
        case functools.partial():
            for each in (value.func, *value.args, *value.keywords.values()):
                yield from _functions(each, known)
        case type():
            yield from _methods(value, known)
        case _:
            yield from _methods(type(value), known)
    wrapped = _wrapped(value)
    if wrapped is not None:
        for each in _functions(wrapped, known):
            if each.__globals__ is known:
                yield each


def _wrapped(value: Any) -> Any:
    """What ``functools.wraps`` was told, as jax does, too."""
    try:
        wrapped = vars(value).get("__wrapped__")
    except TypeError:  # no __dict__
        return None
    return wrapped if callable(wrapped) and wrapped is not value else None


def _methods(kind: type, known: Module) -> Iterator[types.FunctionType]:
    home = known.get("__name__")
    for each in kind.__mro__:
        if each.__module__ != home:
            continue
        for member in vars(each).values():
            for value in _accessors(member):
                for fn in _functions(value, known) if callable(value) else ():
                    if fn.__globals__ is known:
                        yield fn


def _accessors(member: Any) -> tuple[Any, ...]:
    match member:
        case staticmethod() | classmethod():
            return (member.__func__,)
        case property():
            return member.fget, member.fset
        case functools.cached_property():
            return (member.func,)
        case type():
            return ()  # of its own
    return (member,)


def _are_alike(found: Any, value: Any) -> bool:
    """Whether it is the same number or text, if another object."""
    kind = type(value)
    return type(found) is kind and kind in PLAIN and repr(found) == repr(value)
