"""Functions that an installed package made around one of the user's.

``jax.checkpoint(f)``, ``jax.vmap(f)`` or ``contextlib.contextmanager(f)`` return a
function that cannot be imported: its code is the package's and what it closes over is
the user's. It is made again over the globals of the package's module where it arrives.
By value those globals would travel too, and some of them cannot.

A function with a custom gradient is an object of jax that holds such functions. It
answers for any attribute from one of its own, so that pickle must not ask it.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

import jax

from zstrat.program.trace._where import is_installed
from zstrat.variables import is_machinery

if TYPE_CHECKING:
    from collections.abc import Callable

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
