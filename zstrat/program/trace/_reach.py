"""Searches the objects that a function can reach when it is called.

The search follows functions (cells, defaults, globals by name), modules by the names
that functions use, classes, and the references that the garbage collector reports. It
skips packages that hold no objects of users.
"""

from __future__ import annotations

import dis
import gc
import inspect
import os
import sys
import sysconfig
import weakref
from collections import deque
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from zstrat.variables import AbstractVariable, Module

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_OURS: Final = ("jax", "jaxlib", "numpy", "optax", "zstrat")
"""Packages whose objects are skipped, except modules and step functions."""

_OTHERS: Final = frozenset(
    (
        "absl",
        "chex",
        "einops",
        "equinox",
        "flax",
        "grain",
        "haiku",
        "jaxtyping",
        "keras",
        "orbax",
        "scipy",
        "tensorflow",
        "torch",
        "treescope",
    )
)
"""Packages that hold variables of zstrat in objects at most, not in their own modules
and classes."""

_LEAVES: Final = frozenset(
    {str, bytes, int, float, complex, bool, type(None), CodeType}
)

_CONTAINERS: Final = (
    Module,
    partial,
    dict,
    list,
    tuple,
    set,
    frozenset,
    deque,
)
"""Types of containers that are searched, whichever package has made them."""

_OF_PYTHON: Final = ("builtins", "collections", "functools")
"""Modules of the types of functions and containers."""

_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep

_MAX_ITEMS: Final = 1000
"""Limit of items of a container of functions; one with more is data."""


def reached(
    roots: Iterable[Any], *, only_code: bool = False, classes: bool = True
) -> Iterator[Any]:
    """Yields the roots and the objects that they hold, each once, the nearest first.
    Not looked into are variables.

    Args:
        only_code: Of an object only its class counts, and what it wraps; large
            containers do not.
        classes: Search the methods of classes, whether the roots call them or not.
    """
    seen: dict[int, Any] = {}  # they stay, or others would get their ids
    waiting = deque(roots)
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        yield thing
        kind = type(thing)
        if isinstance(thing, type) and not classes:
            continue
        if kind in _LEAVES or isinstance(thing, AbstractVariable):
            continue
        held = _held(thing)
        if only_code and not isinstance(thing, type):
            is_code = kind.__module__ in _OF_PYTHON or issubclass(kind, partial)
            if not (_is_ours(kind) or (is_code and len(held) <= _MAX_ITEMS)):
                held = [kind, inspect.getattr_static(thing, "__wrapped__", None)]
        waiting += held


def captured_values(fn: Any, *, classes: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the cells and globals that the functions of users
    read, which a function reaches; without ``classes`` not those of methods."""
    for thing in reached([fn], only_code=True, classes=classes):
        if not isinstance(thing, FunctionType) or is_known(thing.__module__):
            continue
        code, known = thing.__code__, thing.__globals__
        for name, cell in zip(code.co_freevars, thing.__closure__ or (), strict=True):
            yield from [(name, x) for x in gc.get_referents(cell)]
        for name in dict.fromkeys(_globals(code)):
            if name in known:
                yield name, known[name]


def _globals(code: CodeType) -> Iterator[str]:
    """Yields the names of globals; ``co_names`` has those of attributes, too."""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _held(thing: Any) -> list[Any]:
    """Returns what an object refers to, as far as variables are there."""
    if isinstance(thing, FunctionType):
        apart = thing.__globals__, getattr(thing, "__builtins__", None)
        parts = [x for x in gc.get_referents(thing) if not any(x is y for y in apart)]
        return parts if is_known(thing.__module__) else [*parts, *_named_by(thing)]
    if isinstance(thing, weakref.ref):
        return [thing()]
    if isinstance(thing, ModuleType):
        return []  # by the names of functions alone
    if isinstance(thing, type):
        return [] if is_known(thing.__module__) else gc.get_referents(thing)
    if not isinstance(thing, _CONTAINERS) and _is_ours(type(thing)):
        # Of a step function in the body, and of one that jax has wrapped.
        return [getattr(thing, name, None) for name in ("body", "__wrapped__")]
    return [type(thing), *gc.get_referents(thing)]


def _named_by(thing: FunctionType) -> list[Any]:
    """Finds globals, and attributes of modules that a global or an ``import`` in the
    body names."""
    names = dict.fromkeys(_names(thing.__code__))
    cells = [x for cell in thing.__closure__ or () for x in gc.get_referents(cell)]
    objects = [
        known[x]
        for known in (thing.__globals__, sys.modules)
        for x in names
        if x in known
    ]
    modules = [x for x in (*objects, *cells) if isinstance(x, ModuleType)]
    seen = set()
    while modules:
        module = modules.pop()
        if module.__name__ in seen or is_known(module.__name__):
            continue
        seen.add(module.__name__)
        here = [vars(module)[name] for name in names if name in vars(module)]
        modules += [x for x in here if isinstance(x, ModuleType)]
        objects += here
    return objects


def _is_ours(kind: type) -> bool:
    return _package(kind.__module__) in _OURS


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def is_known(module: str | None) -> bool:
    """Returns whether a module is not a user's, so that it holds no variables."""
    package = _package(module)
    if package in _OURS or package in _OTHERS:
        return True
    if package not in sys.stdlib_module_names or package == "__main__":
        return False
    # A user's file may have the name of one: test.py, code.py, profile.py.
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
