"""Doors whose names are fetched when they are first used.

A process imports a door for a few of its names: a daemon is one task, and needs neither
fleets nor doctors. What stands behind the others would be a sixth of its start.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
            value = importlib.import_module(whole[name], door)
        elif name in names:
            value = getattr(importlib.import_module(names[name], door), name)
        else:
            words = f"module {door!r} has no attribute {name!r}"
            raise AttributeError(words, name=name, obj=sys.modules[door])
        mine[name] = value  # the next look at it finds it without us
        return value

    return fetch, lambda: sorted({*mine, *names, *whole})
