"""Clusters on this machine, with faults of tasks, processes and disks.

The program under test and the workers reach every task through its relay.
`DaemonCluster` has real daemons, which can be killed and frozen. `ThreadCluster` has
servers on threads of this process: it starts faster and is easy to debug, but only its
connections can fail.

Faults of processes and disks, and the check for leaked threads and processes, are only
for Linux: they use signals, resource limits and ``/proc``.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import gc
import os
import resource
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar, final

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.config import environment, settings_from
from zstrat.launch import LocalCluster, Server, kept_fork_server
from zstrat.transport import on_own_thread

from ._network import Relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from contextlib import AbstractContextManager

    from zstrat.config import Settings


_ON_ITS_WAY: Final = 20.0
"""Seconds that a thread has to end on a busy machine."""


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
        # Python ignores SIGXFSZ, so that a write fails and the process lives.
        for pid in pids or (0,):
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            stack.callback(_limit, pid, before)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
        yield


def _limit(pid: int, limits: tuple[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


class ProcessResources(NamedTuple):
    """The file descriptors and threads of this process, to compare before and after a
    test."""

    descriptors: int
    threads: tuple[str, ...]

    @classmethod
    def held(cls) -> ProcessResources:
        """Reads the resources that this process has now, after a garbage collection.
        Threads by name, sorted."""
        gc.collect()  # of cycles that hold sockets or files
        threads = sorted(thread.name for thread in threading.enumerate())
        return cls(len(os.listdir("/proc/self/fd")), tuple(threads))


@contextlib.contextmanager
def leak_check(timeout: float = _ON_ITS_WAY) -> Iterator[None]:
    """Fails a test that leaves a thread or a child process behind.

    Daemon threads of other libraries may stay; those of zstrat, all other threads, and
    all child processes have to end. Threads and processes from before are ignored.

    Args:
        timeout: Seconds that threads and processes have to end.

    Raises:
        AssertionError: Threads or processes have leaked in the block; the error names
            them.
    """
    threads, children = set(threading.enumerate()), _children()
    yield
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in threads
        # Daemons of jax and its kin stay for as long as the process.
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
    # By thread: the kernel lists a child with the thread that made it.
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


T = TypeVar("T")


@contextlib.asynccontextmanager
async def in_thread(
    context: contextlib.AbstractContextManager[T],
) -> AsyncIterator[T]:
    """Adapts a blocking context manager to ``async with``: it is entered and left on a
    thread, while the loop continues.

        async with in_thread(DaemonCluster()) as cluster:
            async with in_thread(cluster.killed("worker:0")):
                ...

    Cancellation: while entering, waits until the context is entered, and leaves it;
    while leaving, the context is left nevertheless.
    """
    stack = contextlib.ExitStack()
    # Shielded: a thread cannot be cancelled, and what it enters has to be left.
    entering = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, context))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:
        await asyncio.wait([entering])
        await on_own_thread(stack.close)
        raise
    try:
        yield value
    except BaseException as error:  # the context may suppress it, as in a `with`
        if not await _leave(stack, error):
            raise
    else:
        await _leave(stack, None)


async def _leave(stack: contextlib.ExitStack, error: BaseException | None) -> bool:
    kind = None if error is None else type(error)
    trace = None if error is None else error.__traceback__
    # A cancelled test leaves it, too, and to the end: on a thread that nobody cancels.
    return bool(await on_own_thread(partial(stack.__exit__, kind, error, trace)))


class RelayedCluster(abc.ABC):
    """Parameter servers and workers behind relays, started on entry of ``with``.

        with DaemonCluster(num_ps=2, num_workers=2) as cluster:
            strategy = zs.ParameterServerStrategy(cluster.resolver)
            ...
            with cluster.blackholed("ps:1"):
                ...

    Args:
        num_ps, num_workers: Number of parameter servers and workers.
        settings: Timeouts of the tasks; default: from ``ZSTRAT_*``. A test that waits
            for a loss should use short ones, also for its strategy.
    """

    def __init__(
        self,
        num_ps: int = 1,
        num_workers: int = 1,
        *,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or settings_from(environment())
        self._counts = {"ps": num_ps, "worker": num_workers}
        self._relays: dict[str, Relay] = {}
        self._stack = contextlib.ExitStack()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, such as "ps:0", parameter servers first."""
        return tuple(self._relays)

    @property
    def spec(self) -> ClusterSpec:
        """The addresses of the relays."""
        jobs: dict[str, list[str]] = {}
        for task, relay in self._relays.items():
            jobs.setdefault(task.partition(":")[0], []).append(relay.address)
        return ClusterSpec(jobs)

    @property
    def resolver(self) -> SimpleClusterResolver:
        """A resolver with the addresses of the relays, for strategies."""
        return SimpleClusterResolver(self.spec)

    def relay(self, task: str) -> Relay:
        """Returns the relay in front of ``task``, such as "worker:1".

        Raises:
            ValueError: There is no such task.
        """
        try:
            return self._relays[task]
        except KeyError:
            known = ", ".join(self._relays) or "none, as it is not started"
            raise ValueError(
                f"no task {task!r} in this cluster; its tasks: {known}"
            ) from None

    def reset(self, task: str) -> None:
        """Resets all connections of a task; peers may reconnect at once."""
        self.relay(task).reset()

    def blackholed(self, task: str) -> AbstractContextManager[None]:
        """Silently drops all traffic between a task and the other tasks during the
        block."""
        return self.relay(task).blackholed()

    @abc.abstractmethod
    def _start(self, stack: contextlib.ExitStack) -> Mapping[str, str]:
        """Starts all tasks, ps first, and registers their end on the stack. Returns
        "host:port" of each task by its name."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for task, address in self._start(stack).items():
                self._relays[task] = stack.enter_context(Relay(address))
            # Only when all relays are open: else this block ends what was started.
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._relays.clear()


@final
class DaemonCluster(RelayedCluster):
    """Parameter servers and workers as real daemons of a `zstrat.launch.LocalCluster`.

    ``local`` is the `LocalCluster`, with logs, process ids, and faults without a relay.
    """

    local: LocalCluster

    def _start(self, stack: contextlib.ExitStack) -> Mapping[str, str]:
        # Relays forward TCP only; traffic through shared memory cannot be cut.
        self.local = stack.enter_context(
            LocalCluster(
                self._counts["ps"],
                self._counts["worker"],
                transport="tcp",
                settings=self.settings,
            )
        )
        return {task: self._address(task) for task in self.local.tasks}

    def _address(self, task: str) -> str:
        job, _, index = task.partition(":")
        return str(self.local.spec.task_address(job, int(index)))

    @contextlib.contextmanager
    def killed(self, task: str) -> Iterator[None]:
        """Kills a task (SIGKILL), and restarts it after the block at its address and
        without its state.

        Raises:
            UnavailableError, DeadlineExceededError: The task does not restart.
        """
        # Restarted whatever the block raises: other faults of the test may follow.
        self.local.kill(task)
        try:
            yield
        finally:
            self.local.restart(task)

    def frozen(self, task: str) -> AbstractContextManager[None]:
        """Stops a task (SIGSTOP), and continues it after the block."""
        return frozen(self.local.pid(task))


@final
class ThreadCluster(RelayedCluster):
    """Parameter servers and workers as servers on threads of this process
    (`zstrat.launch.Server`)."""

    def _start(self, stack: contextlib.ExitStack) -> Mapping[str, str]:
        addresses: dict[str, str] = {}
        for job, count in self._counts.items():
            for index in range(count):
                # Others reach it by its relay, so its spec need not name them.
                any_port = ClusterSpec({job: {index: "127.0.0.1:0"}})
                server = Server(any_port, job, index, config=self.settings)
                stack.enter_context(server)
                addresses[f"{job}:{index}"] = server.target.rpartition("/")[2]
        return addresses
