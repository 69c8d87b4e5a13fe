"""The event loop of every zstrat process: uvloop where there is one, else asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

try:
    import uvloop
except ImportError:  # no wheel for this platform: slower, and nothing else
    new_event_loop = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``main`` to its end on a loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
