"""Imports jax and the modules of a task, without garbage collections, and sets the
variables that jax reads when it is imported."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

from zstrat.config import set_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """Runs the block without garbage collections, and excludes all objects that exist
    at its end from later ones.

    With jax loaded, one collection takes 0.2 s, which blocks the event loop; there are
    a dozen while jax is imported, and one at exit. Garbage of the block is never freed
    (for imports less than 1 MiB). Only for processes of our own, such as daemons: it
    affects all objects of the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_coordinator() -> None:
    """Imports jax and the modules of a coordinator, without initializing a device."""
    from zstrat.strategy import ParameterServerStrategy  # noqa: F401


def choose_devices(variables: Mapping[str, str]) -> None:
    """Sets environment variables that select the devices of jax.

    If jax is imported already, as in a forked daemon, its configuration is updated as
    well; it must not have initialized its devices yet.
    """
    for name, value in variables.items():
        set_environment(name, value)
    if (jax := sys.modules.get("jax")) is not None:
        for name, value in variables.items():
            if name.startswith("JAX_"):
                word = int(value) if value.isdecimal() else value
                jax.config.update(name.lower(), word)
