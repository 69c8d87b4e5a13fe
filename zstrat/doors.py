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


def fetched_late(
    door: str, behind: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        door: Its ``__name__``.
        behind: The names that are fetched from each module of the package, with spaces
            between them, by the name of the module within the package.
    """
    known = {name: module for module, names in behind.items() for name in names.split()}
    mine = vars(sys.modules[door])

    def fetch(name: str) -> object:
        if name not in known:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        module = importlib.import_module(f"{door}.{known[name]}")
        value = mine[name] = getattr(module, name)
        return value

    return fetch, lambda: sorted({*mine, *known})
