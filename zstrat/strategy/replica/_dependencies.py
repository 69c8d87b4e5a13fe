"""What lies beneath a function: the functions of its module that it may call.

The function itself and what it has captured are compared at each call, in
`_function_cache`. What is beneath them is only watched, in one flat list: whether each
name and each cell still has the object that it had when the function was traced, and
each function its code and defaults. Beneath are helpers of the module, whatever
decorates them, and the methods of its classes.

Law of the file: a helper is looked into when a step is made, and never at a call.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, Final

from zstrat.program import Function

from ._captured import (
    NOT_BOUND,
    PLAIN,
    CapturedObjects,
    captured_values,
    global_names,
    innermost,
    is_global,
    own_values,
    wrapped_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, KeysView

    Module = dict[str, Any]

MAX_FUNCTIONS: Final = 1000
"""How many are looked into beneath one."""


class Watched:
    """Some functions: what their names and cells are bound to, their code and defaults.

    A name that nothing is bound to counts, too: one may hide a builtin, later.
    """

    __slots__ = ("_absent", "_cells", "_functions", "_given", "_held", "_names")

    def __init__(self, functions: Iterable[types.FunctionType]) -> None:
        of_one = {id(fn): fn for fn in functions}.values()
        self._functions = [(fn, fn.__code__, fn.__defaults__) for fn in of_one]
        # A function without such arguments has no use for what is set there.
        with_keywords = [fn for fn in of_one if fn.__code__.co_kwonlyargcount]
        self._given = [(fn, fn.__kwdefaults__) for fn in with_keywords]
        cells = {id(x): x for fn in of_one for x in fn.__closure__ or ()}
        named = {(id(x[0]), x[1]): x for fn in of_one for x in _places(fn)}
        values = [known.get(name, NOT_BOUND) for known, name in named.values()]
        contents = [_contents(cell) for cell in cells.values()]
        self._names = [
            (known.get, name, id(value), _plain(value))
            for (known, name), value in zip(named.values(), values, strict=True)
            if value is not NOT_BOUND
        ]
        self._cells = [
            (cell, id(value), _plain(value))
            for cell, value in zip(cells.values(), contents, strict=True)
        ]
        # Apart from the others and by module: mostly these are names of builtins, and
        # one call in C looks for all of them.
        self._absent = _by_module(
            place
            for place, value in zip(named.values(), values, strict=True)
            if value is NOT_BOUND
        )
        self._held = CapturedObjects([*values, *contents])

    def are_same(self) -> bool:
        """Whether all is as it was."""
        if not self._functions:
            return True
        for fn, code, defaults in self._functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults:
                return False
        for get, name, known, value in self._names:
            found = get(name, NOT_BOUND)
            # Nearly always it is the very object. Another one is no change either if it
            # is an equal number or text, as in `_captured`.
            if id(found) != known and not _are_alike(found, value):
                return False
        for cell, known, value in self._cells:
            found = _contents(cell)
            if id(found) != known and not _are_alike(found, value):
                return False
        for names, absent in self._absent:
            if not names.isdisjoint(absent):
                return False
        if self._given and not self._are_given_the_same():
            return False
        # Last: had an object gone meanwhile, its number may have been met above.
        return self._held.are_there()

    def are_there(self) -> bool:
        """Whether it can ever be so again."""
        return self._held.are_there()

    def _are_given_the_same(self) -> bool:
        return all(fn.__kwdefaults__ is given for fn, given in self._given)


def _places(fn: types.FunctionType) -> Iterator[tuple[Module, str]]:
    """The globals that a function may name, and those of its defaults that are in a
    dict."""
    code = fn.__code__
    for name in global_names(code):
        yield fn.__globals__, name
    if fn.__kwdefaults__ is not None:
        first = code.co_argcount
        for name in code.co_varnames[first : first + code.co_kwonlyargcount]:
            yield fn.__kwdefaults__, name


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NOT_BOUND


def _by_module(
    places: Iterable[tuple[Module, str]],
) -> list[tuple[KeysView[str], set[str]]]:
    found: dict[int, tuple[KeysView[str], set[str]]] = {}
    for known, name in places:
        found.setdefault(id(known), (known.keys(), set()))[1].add(name)
    return list(found.values())


def _plain(value: Any) -> Any:
    return value if type(value) in PLAIN else NOT_BOUND


def beneath(fn: Any) -> list[types.FunctionType]:
    """The function and those that it may call, as far as they are of one module.

    A wrapper that another module has made counts for what it wraps.
    """
    called = innermost(fn)
    home = {} if called is None else called.__globals__
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
    wrapped = wrapped_in(value)
    if wrapped is not None:
        for each in _functions(wrapped, known):
            if each.__globals__ is known:
                yield each


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
