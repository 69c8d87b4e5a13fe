"""Blocking calls in a thread that runs an event loop: they hold up all of its tasks."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from pathlib import Path
from typing import Final

_OURS: Final = f"{Path(__file__).parents[1]}{os.sep}"

_said: Final[set[str]] = set()


def warn_of_blocking(twin: str) -> None:
    """Warns, once for each ``twin``, of a call that is about to block the event loop
    that runs in this thread. Says nothing in a notebook, whose kernel runs each cell in
    a loop that has nothing else to do.

    Args:
        twin: What to await instead.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if twin in _said or "ipykernel" in sys.modules:
        return
    warnings.warn(
        "this call blocks the event loop of its thread, and all tasks of it, until the "
        f"answer is there: await {twin} instead, or call it by asyncio.to_thread",
        RuntimeWarning,
        stacklevel=_outside(),
    )
    _said.add(twin)  # not where warnings are errors: those are raised each time


def _outside() -> int:
    """How far the first line that is not of zstrat is from the caller of this."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level
