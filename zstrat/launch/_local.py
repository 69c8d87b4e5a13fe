"""A whole cluster on this machine: real daemons, started and ended by one object."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.config import LANES, environment, settings_from
from zstrat.errors import DeadlineExceededError

from ._child import Child, wait_ready
from ._keeper import Keeper
from ._task import GRACE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from zstrat.config import Settings

LONGEST_SOCKET_PATH: Final = 100
"""Bytes; the kernel takes 107, and ``ipc://`` addresses are paths."""


class LocalCluster:
    """Parameter servers and workers as processes of this machine.

    A context manager; without ``with`` the daemons end when the object is collected or
    the program ends, however it ends.

        with zs.LocalCluster(num_ps=2, num_workers=2) as cluster:
            strategy = zs.ParameterServerStrategy(cluster.resolver)

    Args:
        num_ps, num_workers: How many of each, at least one of each.
        lane: How bodies and messages travel: "tcp" (loopback ports, open to every user
            of this machine), "ipc" (sockets in a folder that only this user can
            enter), "shm" (the same, and large bodies through shared memory) or "auto"
            (the last one that the system has). Default: ``ZSTRAT_LANE``.
        env: Variables for the daemons, over those of this process. ``NPROC`` is the
            number of XLA's threads; if it is in neither, the workers share the cores.
        worker_devices: Virtual CPU devices per worker, with ``JAX_PLATFORMS=cpu``.
        logs: "files" in the cluster's folder, or "terminal".
        directory: Folder for sockets and logs, kept afterwards; default: a new one of
            mode 0700 that is removed at the end.
        settings: Timeouts that the daemons get; default: from ``ZSTRAT_*``.

    Raises:
        ValueError: An argument cannot be.
        UnavailableError: A daemon ended before it was ready; quotes the end of its log.
        DeadlineExceededError: The daemons were not ready in ``timeouts.connect``.
    """

    def __init__(
        self,
        num_ps: int = 1,
        num_workers: int = 1,
        *,
        lane: str | None = None,
        env: Mapping[str, str] | None = None,
        worker_devices: int | None = None,
        logs: Literal["files", "terminal"] = "files",
        directory: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        if num_ps < 1 or num_workers < 1:
            raise ValueError(
                f"num_ps={num_ps}, num_workers={num_workers}: expected 1 or more"
            )
        if logs not in ("files", "terminal"):
            raise ValueError(f"logs={logs!r}: expected 'files' or 'terminal'")
        self._settings = settings or settings_from(environment())
        self.directory = _folder(directory)
        self.lane = lane or self._settings.lane
        sockets = _sockets(self.lane, self.directory)
        self._extra = () if worker_devices is None else _virtual(worker_devices)
        daemons = _environment(self._settings, self.lane, env or {})
        workers = {"NPROC": str(_share(num_workers)), **daemons}
        self._children: dict[str, Child] = {}
        jobs = ("ps", num_ps, daemons), ("worker", num_workers, workers)
        for job, count, told in jobs:
            for index in range(count):
                log = self.directory / f"{job}-{index}.log" if logs == "files" else None
                bind = _address(sockets, self.directory, f"{job}-{index}")
                child = Child(job, index, bind, log, told)
                self._children[child.task] = child
        keeper = Keeper("zstrat local cluster")
        self._keeper = keeper
        self._end = weakref.finalize(
            self,
            _end,
            tuple(self._children.values()),
            keeper,
            self._settings.timeouts.drain,
            self.directory if directory is None else None,
        )
        try:
            self._start(self._children.values())
        except BaseException:
            self.stop()
            raise

    @property
    def spec(self) -> ClusterSpec:
        """Where the tasks are."""
        jobs: dict[str, list[str]] = {}
        for child in self._children.values():
            jobs.setdefault(child.job, []).append(child.address)
        return ClusterSpec(jobs)

    @property
    def resolver(self) -> SimpleClusterResolver:
        """What a strategy is given to reach this cluster.

        It names no task: the program that coordinates is not among the tasks.
        """
        return SimpleClusterResolver(self.spec)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names such as "ps:0", parameter servers first."""
        return tuple(self._children)

    def pid(self, task: str) -> int:
        """Process id of ``task``, such as "worker:1"."""
        return self._child(task).pid

    def log(self, task: str) -> str:
        """What ``task`` has logged so far; "" if the logs go to the terminal."""
        path = self._child(task).log
        return "" if path is None else path.read_text("utf-8", "replace")

    def is_running(self, task: str) -> bool:
        return self._child(task).is_running

    def kill(self, task: str) -> None:
        """Ends ``task`` as a power cut does (SIGKILL); returns when it is gone."""
        self._child(task).kill()

    def terminate(self, task: str) -> int:
        """Asks ``task`` to drain and end; returns its exit code.

        Raises:
            DeadlineExceededError: It did not end within twice ``timeouts.drain``.
        """
        child = self._child(task)
        child.signal(signal.SIGTERM)
        patience = 2 * self._settings.timeouts.drain
        code = child.wait(time.monotonic() + patience)
        if code is None:
            raise DeadlineExceededError(
                f"{task} did not end in {patience:g}s; {child.tail()}"
            )
        return code

    def stop_task(self, task: str) -> None:
        """Freezes ``task`` (SIGSTOP): alive for the kernel, silent for its peers."""
        self._child(task).signal(signal.SIGSTOP)

    def continue_task(self, task: str) -> None:
        """Lets a frozen task go on (SIGCONT)."""
        self._child(task).signal(signal.SIGCONT)

    def restart(self, task: str) -> None:
        """Starts ``task`` again at the address that it had; kills it if it runs.

        Returns when it serves. Raises as the constructor does.
        """
        child = self._child(task)
        if child.is_running:
            child.kill()
        self._start([child])

    def stop(self) -> None:
        """Drains and ends all daemons, workers first; kills what does not end in time.

        Calling it again does nothing.
        """
        self._end()

    close = stop

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self._end.alive else "stopped"
        return f"<LocalCluster {' '.join(self._children)} over {self.lane}, {state}>"

    def _start(self, children: Iterable[Child]) -> None:
        fresh = list(children)
        for child in fresh:
            extra = self._extra if child.job == "worker" else ()
            self._keeper.call(partial(child.start, extra))
        wait_ready(fresh, time.monotonic() + self._settings.timeouts.connect)

    def _child(self, task: str) -> Child:
        try:
            return self._children[task]
        except KeyError:
            known = ", ".join(self._children)
            raise ValueError(
                f"no task {task!r} in this cluster, only {known}"
            ) from None


def _end(
    children: tuple[Child, ...], keeper: Keeper, drain: float, folder: Path | None
) -> None:
    """Workers first: what they still push needs the parameter servers."""
    for job in ("worker", "ps"):
        group = [child for child in children if child.job == job]
        for child in group:
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a frozen one would sleep through it
        deadline = time.monotonic() + drain + 2 * GRACE
        for child in group:
            child.wait(deadline)
            child.close()
    keeper.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _folder(directory: str | os.PathLike[str] | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="zstrat-"))  # mkdtemp makes it 0700
    path = Path(directory).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _sockets(lane: str, folder: Path) -> str:
    """Whether the sockets are "tcp" or "ipc"."""
    if lane not in LANES:
        raise ValueError(f"lane={lane!r}: expected one of {', '.join(LANES)}")
    fits = len(os.fsencode(folder / "worker-1000")) <= LONGEST_SOCKET_PATH
    if lane == "tcp":
        return "tcp"
    if lane == "auto":
        return "ipc" if os.name == "posix" and fits else "tcp"
    if not fits:
        raise ValueError(
            f"{folder} is too long a path for ipc sockets (over {LONGEST_SOCKET_PATH} "
            "bytes): give a shorter directory, or lane='tcp'"
        )
    return "ipc"


def _address(sockets: str, folder: Path, name: str) -> str:
    return "127.0.0.1:0" if sockets == "tcp" else f"ipc://{folder / name}"


def _virtual(devices: int) -> tuple[str, ...]:
    return ("--platform", "cpu", "--devices", str(devices))


def _share(workers: int) -> int:
    """Cores for each of the workers. With threads for all cores in each of them, the
    parts of one program wait for cores on which another one runs: two workers on two
    cores take 5 % more processor time for a step of 4 ms."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // workers)


def _environment(
    settings: Settings, lane: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """What the daemons find: our environment, our settings, then the caller's words."""
    timeouts = dataclasses.asdict(settings.timeouts)
    told = {
        "ZSTRAT_PATIENCE": str(timeouts["patience"]),
        "ZSTRAT_CONNECT_TIMEOUT": str(timeouts["connect"]),
        "ZSTRAT_DRAIN": str(timeouts["drain"]),
        "ZSTRAT_LANE": lane,
        # Several jax processes share this machine's accelerator if there is one.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    inherited = {**environment()}
    for name in ("TF_CONFIG", "NOTIFY_SOCKET", "WATCHDOG_USEC"):
        inherited.pop(name, None)  # they speak of this process, not of its children
    preallocate = inherited.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    if preallocate is not None:
        told["XLA_PYTHON_CLIENT_PREALLOCATE"] = preallocate
    return {**inherited, **told, **extra}
