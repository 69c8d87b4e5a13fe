"""Watches the program that started a daemon, so that the daemon never outlives it; or
any other process, such as the shell of an ssh client.

For the program that started it there are two ways to learn of its end, because each
alone can fail: the kernel kills the daemon when the parent's thread ends (even while
the daemon is stopped), and the pipe at standard input ends. The pipe is for parents
that were gone before the kernel was asked, and for systems without such a kernel.
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


def is_there(pid: int) -> bool:
    """Whether there is a process of that number, whoever's it is."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def watch_process(
    loop: asyncio.AbstractEventLoop, pid: int, end: Callable[[str], None]
) -> None:
    """Calls ``end`` with the reason once the process of that number is gone.

    Nothing of the daemon depends on whose child it is, so a shell may be in between.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:  # an old kernel, too: rather an end than an orphan
        end(f"the process {pid} of --parent cannot be watched: {error.strerror}")
        return

    def gone() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        end(f"the process {pid} of --parent is gone")

    loop.add_reader(descriptor, gone)


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
