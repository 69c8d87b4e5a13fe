"""Parameter-server training for JAX, with the programming model of tf.distribute.

``import zstrat`` does not import jax: a daemon must choose devices and flags before jax
loads. Every public name is fetched from its package when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Final

__version__ = "0.1.0"

_EXPORTS: Final[dict[str, str]] = {}
"""Public name -> the package that defines it."""


def __getattr__(name: str) -> object:
    package = _EXPORTS.get(name)
    if package is None:
        raise AttributeError(f"module 'zstrat' has no attribute {name!r}")
    value = getattr(importlib.import_module(package), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
