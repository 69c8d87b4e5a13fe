"""Ties a daemon to the program that started it, so that it never outlives it.

Two ropes, because each one alone can slip: the kernel kills us when the parent's
thread ends (even while we are stopped), and the end of the pipe at standard input says
so where the kernel's rope was not tied in time or does not exist.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def tie(parent: int) -> bool:
    """Asks the kernel to kill us when ``parent`` dies; false if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Looked at after the rope is tied: a parent that died before would not pull it.
    return os.getppid() == parent


def watch(loop: asyncio.AbstractEventLoop, on_gone: Callable[[], None]) -> None:
    """Calls ``on_gone`` once when the other end of standard input is closed."""
    stdin = sys.stdin.fileno()
    os.set_blocking(stdin, False)

    def look() -> None:
        try:
            gone = not os.read(stdin, 4096)
        except BlockingIOError:
            return
        if gone:
            loop.remove_reader(stdin)
            on_gone()

    loop.add_reader(stdin, look)
