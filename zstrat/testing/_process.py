"""Faults of processes and of their disks, and a check for leaked threads and processes.

Only for Linux: it uses signals, resource limits and ``/proc``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.launch import kept_fork_server

if TYPE_CHECKING:
    from collections.abc import Iterator

_ON_ITS_WAY: Final = 20.0
"""Seconds for a thread to end on a busy machine."""


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stops a process (SIGSTOP) and continues it after the block (SIGCONT). Meanwhile
    its peers receive nothing from it.

    Raises:
        ProcessLookupError: There is no such process. If it ends during the block, no
            error is raised.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def full_disk(size: int, *pids: int) -> Iterator[None]:
    """Limits the files of these processes, by default of this one, to ``size`` bytes.
    Larger writes fail with EFBIG, as with a full quota.

    Raises:
        ProcessLookupError, PermissionError: The limit of a process cannot be set.
    """
    with contextlib.ExitStack() as stack:
        for pid in pids or (0,):
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            stack.callback(_limit, pid, before)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
        yield


def _limit(pid: int, limits: tuple[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


class ProcessResources(NamedTuple):
    """The descriptors and threads of this process, to compare before and after."""

    descriptors: int
    threads: tuple[str, ...]

    @classmethod
    def held(cls) -> ProcessResources:
        """Reads the current resources, after a garbage collection; threads by name,
        sorted."""
        gc.collect()
        threads = sorted(thread.name for thread in threading.enumerate())
        return cls(len(os.listdir("/proc/self/fd")), tuple(threads))


@contextlib.contextmanager
def leak_check(timeout: float = _ON_ITS_WAY) -> Iterator[None]:
    """Fails a test that leaves a thread or a child process behind.

    Daemon threads of other libraries may stay; those of zstrat, all other threads, and
    all child processes have to end. Threads and processes from before are ignored.

    Args:
        timeout: Seconds for a thread to end.

    Raises:
        AssertionError: Names the leaked threads or processes, after the block.
    """
    threads, children = set(threading.enumerate()), _children()
    yield
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in threads
        if not thread.daemon or thread.name.startswith("zstrat")
    ]
    for thread in left:
        thread.join(timeout)  # it may be ending
    names = [thread.name for thread in left if thread.is_alive()]
    if names:
        raise AssertionError(f"the test left threads behind: {names}")
    if (kept := kept_fork_server()) is not None:
        children.add(kept.pid)  # is kept for the next cluster on purpose
    orphans = {pid: _command(pid) for pid in _children() - children}
    if orphans:
        raise AssertionError(f"the test left processes behind: {orphans}")


def _children() -> set[int]:
    try:  # a single system call, which avoids reading a file per thread
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in path.read_text().split())
        except OSError:  # the thread ended between the listing and the reading
            continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "(ended)"
