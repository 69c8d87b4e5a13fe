"""Packages whose names are fetched when they are first used.

A process imports a package for a few of its names: a daemon is one task, and needs
neither fleets nor doctors. What stands behind the others would be a sixth of its start.

The names stand in the stub beside the package, ``__init__.pyi``, one import a line.
Type checkers and editors read it, as imports that happen, and so does `fetched_late`.
What freezes programs is told to take stubs along (``--collect-data zstrat``).

What a name brings with it is imported without collections of garbage: imports leave
next to none, and there would be hundreds, a tenth of the time that jax takes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LINE: Final = re.compile(
    r"^from (?P<module>\S+) import \(?\s*(?P<name>\w+) as \w+"
    r"|^(?P<alias>\w+) = (?P<of>\w+)\r?$",
    re.MULTILINE,
)


def fetched_late(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package; ``import *`` takes what is fetched
    late.

    Args:
        package: Its ``__name__``.
    """
    mine = vars(sys.modules[package])
    homes = homes_of(package)
    mine["__all__"] = list(homes)

    def fetch(name: str) -> object:
        if name not in homes:
            words = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(words, name=name, obj=sys.modules[package])
        module, inner = homes[name]
        value: object
        with _no_collections():
            if module == ".":
                value = importlib.import_module(f".{inner}", package)
            else:
                value = getattr(importlib.import_module(module, package), inner)
        mine[name] = value  # the next look at it finds it without us
        return value

    return fetch, lambda: sorted({*mine, *homes})


def homes_of(package: str) -> dict[str, tuple[str, str]]:
    """By name that is fetched late: the module that has it, and its name there. The
    stub is read by the loader, as the package may be in an archive."""
    spec: Any = sys.modules[package].__spec__
    stub = spec.loader.get_data(f"{spec.origin.removesuffix('c')}i").decode()
    homes: dict[str, tuple[str, str]] = {}
    for line in _LINE.finditer(stub):
        if line["alias"]:
            homes[line["alias"]] = homes[line["of"]]
        else:
            homes[line["name"]] = (line["module"], line["name"])
    return homes


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
