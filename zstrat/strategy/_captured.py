"""What a function of Python has captured.

That is the cells of its closure, its defaults, and the globals that it names: what it
loads by name, not the attributes of the same name.

Law of the file: values always come in the same order.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN: Final = (int, float, str, bytes, bool, type(None), complex)
"""Types of what is compared by what it is, and never by which object."""

_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def is_global(fn: types.FunctionType) -> bool:
    """Whether it is the very function that its module has under its name."""
    return fn.__globals__.get(fn.__name__) is fn


def captured_values(fn: types.FunctionType) -> Iterator[Any]:
    """What the function has captured, always in the same order."""
    yield from own_values(fn)
    known = fn.__globals__
    for name in global_names(fn.__code__):
        if name in known:
            yield known[name]


def own_values(fn: types.FunctionType) -> Iterator[Any]:
    """The same without the globals."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None  # not bound yet
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that may be globals, in the function and those defined in it."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    names = [
        each.argval for each in dis.get_instructions(code) if each.opname in _LOADS
    ]
    names += [name for x in inner for name in global_names(x)]
    return tuple(dict.fromkeys(names))
