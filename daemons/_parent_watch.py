"""Watches the program that started a daemon, so that the daemon never outlives it.

There are two ways to learn of its end, because each alone can fail: the kernel kills
the daemon when the parent's thread ends (even while the daemon is stopped), and the
pipe at standard input ends. The pipe is for parents that were gone before the kernel
was asked, and for systems whose kernel cannot be asked.
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


def die_with(parent: int) -> bool:
    """Asks the kernel to kill us when ``parent`` dies; false if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # After the request: of a parent that died before it the kernel says nothing.
    return os.getppid() == parent


def watch_parent(loop: asyncio.AbstractEventLoop, on_gone: Callable[[], None]) -> None:
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
