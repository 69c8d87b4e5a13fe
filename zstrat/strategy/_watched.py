"""Globals beneath a function: those that functions of its module name, which it calls.

The function itself and what it has captured are compared at each call (`_kept_steps`).
What the helpers of its module name is only watched, in one flat list: whether each name
still has the object that it had when the function was traced.

Law of the file: a helper is looked into when a step is made, and never at a call.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import TYPE_CHECKING, Any, Final, Self

from zstrat.program import Function

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPARED: Final = (int, float, str, bytes, bool, type(None), complex)
_GONE: Final = object()
_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


class Watched:
    """The globals beneath one function, with the objects that they had."""

    __slots__ = ("_names",)

    def __init__(self, names: list[tuple[dict[str, Any], str, Any]]) -> None:
        self._names = names

    @classmethod
    def of(cls, fn: Any) -> Self:
        """As they are now."""
        names: list[tuple[dict[str, Any], str, Any]] = []
        seen: set[int] = set()
        left = [*_functions(fn)]
        while left:
            each = left.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            known = each.__globals__
            if is_global(each):
                here = [name for name in global_names(each.__code__) if name in known]
                names += [(known, name, known[name]) for name in here]
            for value in captured_values(each):
                left += [
                    inner
                    for inner in _functions(value)
                    if not is_global(inner) or inner.__globals__ is known
                ]
        return cls(names)

    def are_same(self) -> bool:
        """Whether each name has what it had."""
        for known, name, value in self._names:
            found = known.get(name, _GONE)
            if found is not value and not _are_alike(found, value):
                return False
        return True


def is_global(fn: types.FunctionType) -> bool:
    """Whether it is the very function that its module has under its name."""
    return fn.__globals__.get(fn.__name__) is fn


def captured_values(fn: types.FunctionType) -> Iterator[Any]:
    """What the function has captured, always in the same order."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None  # not bound yet
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    known = fn.__globals__
    for name in global_names(fn.__code__):
        if name in known:
            yield known[name]


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that may be globals, in the function and those defined in it."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    names = [
        each.argval for each in dis.get_instructions(code) if each.opname in _LOADS
    ]
    names += [name for x in inner for name in global_names(x)]
    return tuple(dict.fromkeys(names))


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions of Python that a callable is made of."""
    match value:
        case types.FunctionType():
            yield value
        case Function():
            yield from _functions(value.body)
        case types.MethodType():
            yield from _functions(value.__func__)
        case functools.partial():
            for each in (value.func, *value.args, *value.keywords.values()):
                yield from _functions(each)


def _are_alike(found: Any, value: Any) -> bool:
    """Whether it is the same number or text, if another object."""
    kind = type(value)
    return type(found) is kind and kind in _COMPARED and repr(found) == repr(value)
