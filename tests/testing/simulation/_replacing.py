"""What mutations are made of: functions of zstrat, found by their names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def nothing(self: Any, *args: Any, **options: Any) -> None:
    """Does nothing."""


def method(path: str) -> Any:
    """The present one, before it is replaced."""
    module, name, attribute = path.rsplit(".", 2)
    return getattr(getattr(importlib.import_module(module), name), attribute)


def function(path: str) -> Any:
    """The present one, before it is replaced."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def around(path: str, wrapper: Callable[..., Any]) -> Any:
    """The method, given to ``wrapper`` with its arguments."""
    original = method(path)

    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        return wrapper(original, self, *args, **options)

    return wrapped
