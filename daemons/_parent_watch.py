"""Ends a daemon together with the program that started it, or with another process,
such as the shell of an ssh client.

The end of the launching program is noticed in two ways, because each alone can fail:
the kernel kills the daemon when the parent's thread ends (even while the daemon is
stopped), and the pipe at standard input closes. The pipe covers a parent that ended
before the kernel was asked, and systems other than Linux.
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
    """Asks the kernel to kill this process when ``parent`` dies; False if it is dead
    already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # After the request: the kernel sends no signal for a parent that died before it.
    return os.getppid() == parent


def is_running(pid: int) -> bool:
    """Returns whether a process with this id exists, of any user."""
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
    """Calls ``end`` with the reason once the process has ended.

    It need not be the parent of this daemon: a shell may be in between.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:  # also on kernels before 5.3: better to end than to leak
        end(f"cannot watch the process {pid} of --parent: {error.strerror}")
        return

    def gone() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        end(f"the process {pid} of --parent has ended")

    loop.add_reader(descriptor, gone)


class ParentWatch:
    """Calls ``end`` once, with the reason, when standard input closes, or when it
    received nothing for ``timeout`` seconds (0: no limit).

    ``is_late``: the timeout was the reason.
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
        loop.add_reader(self._stdin, self._read)
        self._restart_timer()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._timeout:
            self._timer = self._loop.call_later(self._timeout, self._late)

    def _read(self) -> bool:
        """Reads the pending bytes; False if there were none, and no end of file."""
        try:
            data = os.read(self._stdin, 4096)
        except BlockingIOError:
            return False
        if data:
            self._restart_timer()
        else:
            self._finish("the launching program has ended")
        return True

    def _late(self) -> None:
        # If this process itself was stopped, the heartbeats of that time are unread.
        if not self._read():
            self.is_late = True
            self._finish(
                f"no heartbeat from the launching program for {self._timeout:g} s"
            )

    def _finish(self, reason: str) -> None:
        self._loop.remove_reader(self._stdin)
        if self._timer is not None:
            self._timer.cancel()
        self._end(reason)
