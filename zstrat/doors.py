"""Doors whose names are fetched when they are first used.

A process imports a door for a few of its names: a daemon is one task, and needs neither
fleets nor doctors. What stands behind the others would be a sixth of its start.

What a name brings with it is imported without collections of garbage: imports leave
next to none, and there would be hundreds, a tenth of the time that jax takes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def by_name(behind: Mapping[str, str]) -> dict[str, str]:
    """The module of each name. ``behind``: the names that a module has, with spaces
    between them, by the name of the module."""
    return {name: module for module, names in behind.items() for name in names.split()}


def fetched_late(
    door: str, names: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package; ``import *`` takes what is fetched
    late.

    Args:
        door: Its ``__name__``.
        names: The module from which each name is fetched; one that begins with a dot is
            within the package.
        modules: Names that stand for modules themselves.
    """
    whole = modules or {}
    mine = vars(sys.modules[door])
    mine["__all__"] = [*names, *whole]

    def fetch(name: str) -> object:
        value: object
        if name in whole:
            with _no_collections():
                value = importlib.import_module(whole[name], door)
        elif name in names:
            with _no_collections():
                value = getattr(importlib.import_module(names[name], door), name)
        else:
            words = f"module {door!r} has no attribute {name!r}"
            raise AttributeError(words, name=name, obj=sys.modules[door])
        mine[name] = value  # the next look at it finds it without us
        return value

    return fetch, lambda: sorted({*mine, *names, *whole})


_OF_PYTHON: Final = 1000
"""Objects that an interpreter of version 3.12 sets aside at its start are fewer."""


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collections of garbage are off inside, for the thread that comes first. When it
    leaves they are on again, also for one that came meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            is_much = gc.get_count()[0] > gc.get_threshold()[0]
            # All that is there counts as old: else the next collection, of what is new,
            # goes through all of it. What a program has set aside itself stays so (it
            # takes milliseconds to count that).
            if is_much and gc.get_freeze_count() < _OF_PYTHON:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
