"""What a process brings in: jax and a few hundred modules, and the variables that jax
reads then."""

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
    """What is made inside stays until this process ends, and no collection of garbage
    looks at it, neither meanwhile nor later.

    With jax, one collection takes a fifth of a second, for which the loop stands still.
    There are a dozen while it is imported, and another at the end of the process. What
    is garbage by the end of the block stays, too: of imports, less than a MiB. For
    processes that are ours alone: it is all objects of the process that are set aside.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_coordinator() -> None:
    """Imports what a program needs that coordinates, jax with it. Looks for no device.

    No garbage is collected meanwhile, as with all that a door fetches late.
    """
    from zstrat.strategy import ParameterServerStrategy  # noqa: F401


def choose_devices(variables: Mapping[str, str]) -> None:
    """Sets variables of this process that say which devices jax is to see.

    jax reads those of its own when it is imported. Where it is already, in a process
    that was forked, it is told; it must not have looked for devices yet.
    """
    for name, value in variables.items():
        set_environment(name, value)
    if (jax := sys.modules.get("jax")) is not None:
        for name, value in variables.items():
            if name.startswith("JAX_"):
                word = int(value) if value.isdecimal() else value
                jax.config.update(name.lower(), word)
