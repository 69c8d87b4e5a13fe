"""What a function of Python has captured: by what it is known, and in words.

Captured are the cells of its closure, its defaults, and the globals that it names: what
it loads by name, not the attributes of the same name. Laws: values always come in the
same order, and with the same length as their words.

A function is known by its place in the source, which is the identity of its code, and
by *marks* of what it has captured. What is no more than its value is known by that:
numbers, also those of numpy, text, and what is made of parts that never change (tuples,
slices, functions, methods, partials). Anything else is known by which object it is. So
a lambda that is made anew at each call is the same one. Law of marks: they are made at
each call of ``run``, and ask nothing of what they find but its type.

Beneath a function are those of its module that it may call: helpers, whatever decorates
them, and the methods of classes.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.program import Function

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    Module = dict[str, Any]

PLAIN: Final = frozenset((int, float, str, bytes, bool, type(None), complex))
"""Types of what is compared by what it is, and never by which object."""

NOT_BOUND: Final = object()
"""Stands for the value of a name, or of a cell, that nothing is bound to."""

_MAX_ITEMS: Final = 32
"""Items of a tuple that are compared at a call: a shape has fewer."""

_DEPTH: Final = 3
"""How deep functions that capture functions are looked into; the objects themselves are
compared beneath."""

MAX_FUNCTIONS: Final = 1000
"""How many are looked into beneath one."""

_OF_PARTS: Final = frozenset(
    (types.FunctionType, types.MethodType, functools.partial, tuple, slice)
)

_LASTING: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
)
"""Types of what lives as long as its module, mostly: there is less to ask at a call."""

_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})

_MAX_NAMED: Final = 1024
"""Codes of which the names are kept."""


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
        # By the identity of the code, which closures made anew share; `FunctionCache`
        # holds the code, so that its number is nobody else's meanwhile.
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
    called = innermost(fn)
    if called is None:  # it is written in C, say
        return id(fn), ()
    captured.append(called.__code__)
    return id(called.__code__), (id(fn),)


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
    """The mark of a value that may be made anew of the same parts at each call."""
    kind = type(value)
    parts: tuple[Any, ...]
    if kind is tuple and len(value) <= _MAX_ITEMS:
        parts = value
    elif kind is slice:
        parts = value.start, value.stop, value.step
    # Identity serves both: a long tuple would take too long to compare, and a function
    # of a module is not made anew at each call.
    elif kind is tuple or (kind is types.FunctionType and is_global(value)):
        captured.append(value)
        return id(value)
    else:
        return named(value, captured, compared, depth)
    return kind, *[_mark(part, captured, compared, depth) for part in parts]


def captured_values(fn: types.FunctionType) -> list[Any]:
    """What the function has captured, always in the same order."""
    found = own_values(fn)
    known = fn.__globals__
    for name in global_names(fn.__code__):
        value = known.get(name, NOT_BOUND)
        if value is not NOT_BOUND:
            found.append(value)
    return found


def own_values(fn: types.FunctionType) -> list[Any]:
    """What a function has captured but for globals: cells and defaults."""
    found: list[Any] = []
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(NOT_BOUND)
    if fn.__defaults__:
        found += fn.__defaults__
    if fn.__kwdefaults__:
        found += fn.__kwdefaults__.values()
    return found


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that may be globals, in the function and those defined in it."""
    found = _named.get(id(code))
    if found is None or found[0] is not code:
        if len(_named) >= _MAX_NAMED:
            _named.clear()
        found = _named[id(code)] = code, _global_names(code)
    return found[1]


# By identity: the hash of a code is that of all its instructions, at each call.
_named: Final[dict[int, tuple[types.CodeType, tuple[str, ...]]]] = {}


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    names = [
        each.argval for each in dis.get_instructions(code) if each.opname in _LOADS
    ]
    names += [name for x in inner for name in _global_names(x)]
    return tuple(dict.fromkeys(names))


def innermost(fn: Any) -> types.FunctionType | None:
    """The function of Python that a callable comes down to: what it wraps or binds, or
    the method that its class has for calls; None: there is none."""
    match fn:
        case Function():
            return innermost(fn.body)
        case types.MethodType():
            return innermost(fn.__func__)
        case functools.partial():
            return innermost(fn.func)
    wrapped = wrapped_in(fn)
    if wrapped is not None:
        return innermost(wrapped)
    call = fn if isinstance(fn, types.FunctionType) else type(fn).__call__
    if isinstance(call, Function):
        call = call.body
    return call if isinstance(call, types.FunctionType) else None


def wrapped_in(value: Any) -> Any:
    """What ``functools.wraps`` was told, as jax does, too."""
    try:
        wrapped = vars(value).get("__wrapped__")
    except TypeError:  # no __dict__
        return None
    return wrapped if callable(wrapped) and wrapped is not value else None


def is_global(fn: types.FunctionType) -> bool:
    """Whether it is the very function that its module has under its name."""
    return fn.__globals__.get(fn.__name__) is fn


def is_partial(fn: Any) -> bool:
    """Whether it is a partial that calls as any other, such as one of jax."""
    partial = functools.partial
    return isinstance(fn, partial) and type(fn).__call__ is partial.__call__


def captured_words(fn: types.FunctionType) -> Iterator[tuple[str, str]]:
    """What the function has captured, and what that is, for a person."""
    for place, value in zip(_places(fn), captured_values(fn), strict=True):
        yield place, in_words(value)


def in_words(value: Any) -> str:
    """A captured value in words. Two values have the same words only where they count
    as the same."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, np.generic):
        return f"{value!r:.60}"
    if value is NOT_BOUND:
        return "not bound"
    if isinstance(value, types.FunctionType) and not is_global(value):
        return f"<function {value.__qualname__}>"  # may be made anew at each call
    if kind is tuple:
        return f"({', '.join(map(in_words, value[:_MAX_ITEMS]))})"
    if kind is slice:
        return f"slice{in_words((value.start, value.stop, value.step))}"
    if kind is types.MethodType:
        return f"{in_words(value.__func__)} of {in_words(value.__self__)}"
    if kind is functools.partial:
        given = *value.args, *value.keywords.values()
        return f"partial({in_words(value.func)}, {in_words(given)})"
    return f"<{kind.__qualname__} at {id(value):#x}>"


def _places(fn: types.FunctionType) -> Iterator[str]:
    code, of = fn.__code__, f"of {fn.__qualname__}"
    for name in code.co_freevars:
        yield f"captured name {name!r} {of}"
    first = code.co_argcount - len(fn.__defaults__ or ())
    given = code.co_varnames[first : code.co_argcount]
    for name in itertools.chain(given, fn.__kwdefaults__ or ()):
        yield f"the default of {name!r} {of}"
    for name in global_names(code):
        if name in fn.__globals__:
            yield f"global {name!r} of {fn.__globals__.get('__name__')}"


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
        # Its own globals are those of a library (functools.wraps): what it names there
        # is no matter of the user's module.
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


class CapturedObjects:
    """Objects that are known by their identity: an object that is gone has given it to
    any other.

    They are held weakly where they can be, so that nothing lives longer because a
    function has seen it.
    """

    __slots__ = ("_gone", "_strongly", "_weakly")

    def __init__(self, objects: Iterable[Any]) -> None:
        self._weakly: list[weakref.ref[Any]] = []
        self._strongly: list[Any] = []
        self._gone: list[weakref.ref[Any]] = []
        for each in objects:
            if isinstance(each, _LASTING):
                self._strongly.append(each)
                continue
            try:
                # Who is gone says so: there is nothing to ask at a call.
                self._weakly.append(weakref.ref(each, self._gone.append))
            except TypeError:
                self._strongly.append(each)

    def are_there(self) -> bool:
        """Whether all objects are still there."""
        return not self._gone
