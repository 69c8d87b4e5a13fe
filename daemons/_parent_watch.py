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


class ParentWatch:
    """Calls ``end`` once with the reason: the other end of standard input is closed, or
    nothing has come from there for ``timeout`` seconds, if that is above 0.

    ``is_late``: it was the silence.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[str], None],
        timeout: float,
    ) -> None:
        self._loop, self._end, self._timeout = loop, end, timeout
        self._stdin = sys.stdin.fileno()
        self._timer: asyncio.TimerHandle | None = None
        self.is_late = False
        os.set_blocking(self._stdin, False)
        loop.add_reader(self._stdin, self._look)
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._timeout:
            self._timer = self._loop.call_later(self._timeout, self._late)

    def _look(self) -> bool:
        """Reads what is there; whether it was anything, be it the end."""
        try:
            said = os.read(self._stdin, 4096)
        except BlockingIOError:
            return False
        if said:
            self._wait()
        else:
            self._over("the program that started me is gone")
        return True

    def _late(self) -> None:
        # Of a process that was stopped itself, what came meanwhile is still in there.
        if not self._look():
            self.is_late = True
            words = f"the program that started me said nothing for {self._timeout:g} s"
            self._over(words)

    def _over(self, reason: str) -> None:
        self._loop.remove_reader(self._stdin)
        if self._timer is not None:
            self._timer.cancel()
        self._end(reason)
