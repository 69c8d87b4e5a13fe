"""Finds what the body of a step captures, and warns of captured values that stay as
they are.

The search for the objects that a call can reach (`reached`) follows functions (cells,
defaults, globals by name), modules by the names that functions use, classes, and the
references that the garbage collector reports. It skips packages that hold no objects of
users.

A captured value is a constant of the trace. Two kinds of captured values cause
warnings, because they do not do what they seem to do: integers of 64 bits, of which jax
keeps the lower half, and Keras models. A Keras model reads its own variables when it is
called: in a step these are the values at the time of the trace, and on a worker those
of the model that was sent with the step. Keras is not imported here: its method is
wrapped when a step is traced in a program that has imported Keras.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import os
import sys
import sysconfig
import warnings
import weakref
from collections import deque
from contextvars import ContextVar
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from zstrat.variables import (
    AbstractVariable,
    DowncastWarning,
    Module,
    recorder,
    user_stacklevel,
)

from ._eager import Immediate
from ._int32_checks import fits, misfit
from ._signature import worker_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_OURS: Final = ("jax", "jaxlib", "numpy", "optax", "zstrat")
"""Packages of zstrat, and those that it builds on, whose objects the search skips,
except modules and step functions."""

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
"""Packages that may hold variables of zstrat in their objects, but not in their own
modules and classes."""

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
"""Types of containers that are searched, whichever package has defined them."""

_OF_PYTHON: Final = ("builtins", "collections", "functools")
"""Modules of Python in which the types of functions and containers are defined."""

_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep

_MAX_ITEMS: Final = 1000
"""Most items of a container that is searched for functions; one with more items is
data."""


def reached(
    roots: Iterable[Any], *, only_code: bool = False, classes: bool = True
) -> Iterator[Any]:
    """Yields the roots and the objects that they reference, directly or indirectly,
    each once, the nearest first. Does not search inside of variables.

    Args:
        only_code: Of an object, search only its class and what it wraps, not its
            attributes; skip large containers.
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
        # What a variable holds, such as its storage, would lead to all others.
        if kind in _LEAVES or isinstance(thing, AbstractVariable):
            continue
        held = _held(thing)
        if only_code and not isinstance(thing, type):
            is_code = kind.__module__ in _OF_PYTHON or issubclass(kind, partial)
            if not (_is_ours(kind) or (is_code and len(held) <= _MAX_ITEMS)):
                held = [kind, inspect.getattr_static(thing, "__wrapped__", None)]
        waiting += held


def captured_values(fn: Any, *, classes: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the cells and globals that a function reads, and
    those of all users' functions that it reaches. Without ``classes``, methods are left
    out."""
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
    """Yields the names of the globals that the code reads; ``co_names`` also has those
    of attributes."""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _held(thing: Any) -> list[Any]:
    """Returns those objects to which an object refers that may hold variables."""
    # Not all of its globals, which are the whole module: those that it names follow.
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
    """Returns the globals that a function's body names, and the attributes that it
    names of modules (from globals or ``import`` statements in the body)."""
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
    # Names of the body may be attributes at any depth (``a.b.c``), so each of them is
    # looked up in each module.
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
    """Returns whether a module belongs to Python or to an installed package, and not to
    a user's program, so that it holds no variables."""
    package = _package(module)
    if package in _OURS or package in _OTHERS:
        return True
    if package not in sys.stdlib_module_names or package == "__main__":
        return False
    # A user's file may have the name of one: test.py, code.py, profile.py.
    # A module without a file is built into Python.
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def warn_of_numbers(step: str, fn: Any) -> None:
    """Warns of captured integers of 64 bits in a step that looks up rows of a hash
    table: jax keeps only the lower half of them, also where they are combined with ids.
    (Arguments keep all bits.)

    Warns:
        DowncastWarning: A global or a cell has such a number; names it.
    """
    # Methods of a class may never be called: what they read is no reason to warn.
    for name, value in captured_values(fn, classes=False):
        if fits(value):
            continue
        warnings.warn(
            f"{name!r}, which the step function {step!r} takes from outside, contains "
            f"{misfit(np.asarray(value))}. jax computes with the lower 32 bits of it, "
            "also where it meets ids of a zs.HashTable: pass it as an argument of the "
            "step, or switch on jax_enable_x64 (JAX_ENABLE_X64=1, on the workers, too)",
            DowncastWarning,
            stacklevel=user_stacklevel(),
        )


class KerasWarning(UserWarning):
    """A step computes with the values that a Keras model had at the trace, or a model
    trains without the strategy that is current."""


_WORDS: Final = (
    "the Keras model {name!r} is called in a step, which keeps the values that the "
    "model has now: they are constants of the step, whatever is trained later. Call "
    "model.stateless_call(params, state, x) with variables of zs.create_variables: "
    "docs/libraries.md of zstrat shows it"
)

_watched: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Layer classes of Keras that warn already."""
_inside: Final[ContextVar[bool]] = ContextVar("zstrat_inside_keras", default=False)
"""Whether a Keras layer is being called; layers called inside belong to the same
model."""


def watch_keras_models() -> None:
    """Makes Keras' layers warn if they are called in a step with their own variables'
    values."""
    layer: Any = getattr(sys.modules.get("keras"), "Layer", None)
    # The class and not a model: models exist already, and all of them get calls here.
    if layer is not None and layer not in _watched:
        _watched.add(layer)
        layer.__call__ = _warning(layer.__call__)


def _warning(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def warning(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Only in steps, and once for a model: its layers are called inside of its own
        # call.
        if _inside.get() or recorder.get() is None:
            return method(self, *args, **kwargs)
        token = _inside.set(True)
        try:
            if _keeps_values(self):
                words = _WORDS.format(name=self.name)
                warnings.warn(words, KerasWarning, stacklevel=2)
            return method(self, *args, **kwargs)
        finally:
            _inside.reset(token)

    return warning


def _keeps_values(layer: Any) -> bool:
    """Returns whether a layer computes with arrays from before the step. (In
    ``stateless_call`` it computes with values from the step.)"""
    if isinstance(recorder.get(), Immediate) and worker_context.get() is None:
        return False  # an eager step of this process: it has the model itself
    values = [variable.value for variable in layer.variables]
    return any(
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in values
    )
