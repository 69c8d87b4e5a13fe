"""Lazy packages: they import a module when one of its names is first used.

A process uses few names of a package: a daemon needs neither fleets nor the doctor,
whose imports would take a sixth of its start.

The stub of a package, ``__init__.pyi``, lists its names, one import per line, for type
checkers, editors and `fetched_late`. Tools that freeze programs must include stubs
(``--collect-data zstrat``).

Garbage collection is off during such an import: imports leave little garbage, and
hundreds of collections would take a tenth of the time to import jax.
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
    """Makes ``__getattr__`` and ``__dir__`` for a package, whose names are then
    imported on first use, and sets its ``__all__``.

    Args:
        package: The ``__name__`` of the package.
    """
    namespace = vars(sys.modules[package])
    homes = homes_of(package)
    namespace["__all__"] = list(homes)

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
        namespace[name] = value  # later uses do not call this function
        return value

    return fetch, lambda: sorted({*namespace, *homes})


def install_integration(library: str, has: str) -> bool:
    """Installs zstrat's hooks for another library, if the program has imported that
    library. Returns whether the hooks were installed by this call. For packages on
    lower layers, which cannot import the integration themselves.

    Args:
        has: A name that the library has once it is imported completely.
    """
    if getattr(sys.modules.get(library), has, None) is None:
        return False
    hooks = importlib.import_module(f"zstrat.integrations.{library}.hooks")
    return bool(hooks.install())


def homes_of(package: str) -> dict[str, tuple[str, str]]:
    """Reads the stub of a package. Returns for each public name its module and its name
    in that module."""
    # By its loader, because the package may be in an archive.
    spec: Any = sys.modules[package].__spec__
    # From __init__.py, or __init__.pyc, to __init__.pyi.
    stub = spec.loader.get_data(f"{spec.origin.removesuffix('c')}i").decode()
    homes: dict[str, tuple[str, str]] = {}
    for line in _LINE.finditer(stub):
        if line["alias"]:
            homes[line["alias"]] = homes[line["of"]]
        else:
            homes[line["name"]] = (line["module"], line["name"])
    return homes


_OF_PYTHON: Final = 1000
"""Upper bound of the number of objects that Python 3.12 freezes when it starts."""


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Turns off garbage collection in the block. If several threads are in the block,
    the thread that entered first turns collection on again when it leaves."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            is_much = gc.get_count()[0] > gc.get_threshold()[0]
            # Moves all objects to the oldest generation, or the next collection would
            # traverse them. Not if the program itself froze objects, which `unfreeze`
            # would undo (counting those takes milliseconds).
            if is_much and gc.get_freeze_count() < _OF_PYTHON:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
