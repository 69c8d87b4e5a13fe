"""A whole cluster on this machine: real daemons, started and ended by one object."""

from __future__ import annotations

import contextlib
import logging
import operator
import shutil
import signal
import time
from typing import TYPE_CHECKING, Literal

from zstrat.cluster import SimpleClusterResolver
from zstrat.config import GRACE, environment, settings_from
from zstrat.errors import DeadlineExceededError
from zstrat.streams import occupy_descriptors

from ._child import Child, KeptLogs, wait_ready
from ._fork_server import fork_server
from ._imports import import_coordinator
from ._runtime_dir import (
    RunFolder,
    RuntimeDir,
    daemon_environment,
    divided,
    share,
    virtual,
)
from ._started_tasks import StartedTasks

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from zstrat.config import Settings

log = logging.getLogger("zstrat.launch")


class LocalCluster(StartedTasks[Child]):
    """Parameter servers and workers as processes of this machine.

    A context manager; without ``with`` the daemons end when the object is collected or
    the program ends, however it ends.

        with zs.LocalCluster(num_ps=2, num_workers=2) as cluster:
            strategy = zs.ParameterServerStrategy(cluster.resolver)

    The daemons look for modules where this program does first, ``sys.path[0]``: files
    beside the script are there, for what cannot travel and is imported (a lock).

    Args:
        num_ps, num_workers: How many of each. No workers: for programs that train by
            themselves, as with `BetweenGraphStrategy`.
        transport: How bodies and messages travel: "tcp" (loopback ports, open to every
            user of this machine), "ipc" (sockets in a folder that only this user can
            enter), "shm" (the same, and large bodies through shared memory) or "auto"
            (the last one that the system has). Default: ``ZSTRAT_TRANSPORT``.
        env: Variables for the daemons, over those of this process. The folder of the
            program comes before a ``PYTHONPATH``. ``NPROC`` is the number of XLA's
            threads; if it is in neither, the workers share the cores. They divide the
            GPUs that ``CUDA_VISIBLE_DEVICES`` lists, or all, equally.
        worker_devices: Virtual CPU devices per worker, with ``JAX_PLATFORMS=cpu``.
        logs: "files" in the cluster's folder, or "terminal".
        directory: Folder for sockets and logs, kept afterwards; default: a new one of
            mode 0700 that is removed at the end. The log of a task that has ended with
            an error, or by a signal that is not of this object, is kept elsewhere, and
            a warning at the end says where.
        settings: Timeouts that the daemons get; default: from ``ZSTRAT_*``.
        coordinates: This program will make strategies: it imports what they need, jax
            with it, while the daemons do the same. False: it only keeps the cluster.

    Raises:
        ValueError: An argument cannot be.
        UnavailableError: A daemon ended before it was ready; quotes the end of its log,
            and says where it is kept.
        DeadlineExceededError: The daemons were not ready in ``timeouts.connect``.
        TypeError: A count is not a whole number.
        RuntimeError: nvidia-smi is there and fails; ``CUDA_VISIBLE_DEVICES`` is what
            it would be asked for.
    """

    def __init__(
        self,
        num_ps: int = 1,
        num_workers: int = 1,
        *,
        transport: str | None = None,
        env: Mapping[str, str] | None = None,
        worker_devices: int | None = None,
        logs: Literal["files", "terminal"] = "files",
        directory: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        coordinates: bool = True,
    ) -> None:
        occupy_descriptors()
        num_ps = _count("num_ps", num_ps, 1)
        num_workers = _count("num_workers", num_workers, 0)
        if logs not in ("files", "terminal"):
            raise ValueError(f"logs={logs!r}: expected 'files' or 'terminal'")
        self._settings = settings or settings_from(environment())
        self.transport = transport or self._settings.transport
        self._coordinates = coordinates
        self._extra = () if worker_devices is None else virtual(worker_devices)
        daemons = daemon_environment(self._settings, self.transport, env or {})
        workers = {"NPROC": str(share(max(1, num_workers))), **daemons}
        if self._extra:
            workers["JAX_PLATFORMS"] = "cpu"
        found: dict[str, list[Mapping[str, str]]] = {
            "ps": [daemons] * num_ps,
            "worker": divided(workers, num_workers),
        }
        fork_server(daemons)  # so that it ends behind us when the program does
        folder = RunFolder(directory)
        place = RuntimeDir.of(self.transport, folder.path)
        self.directory = place.folder
        children: dict[str, Child] = {}
        drain = self._settings.timeouts.drain
        remove = self.directory if directory is None else None
        super().__init__(
            children, f"over {self.transport}", _end, children, drain, remove
        )
        kept = KeptLogs(directory is None)
        try:
            folder.make()
            for job, environments in found.items():
                for index, variables in enumerate(environments):
                    name = f"{job}-{index}"
                    path = place.folder / f"{name}.log" if logs == "files" else None
                    bind = place.address(name)
                    child = Child(job, index, bind, path, variables, kept)
                    children[child.task] = child
            self._start(children.values())
        except BaseException:  # to the caller, who has no cluster that he could stop
            self.stop()
            raise

    @property
    def settings(self) -> Settings:
        """What a strategy is given to be let in; it takes them by itself if it is given
        this object."""
        return self._settings

    @property
    def resolver(self) -> SimpleClusterResolver:
        """What a strategy is given to reach this cluster, if not the object itself.

        It names no task: the program that coordinates is not among the tasks.

        Raises:
            ClosedError: The cluster was closed.
        """
        self._check_open()
        return SimpleClusterResolver(self.spec)

    def pid(self, task: str) -> int:
        """Process id of ``task``, such as "worker:1"."""
        return self._task(task).pid

    def is_running(self, task: str) -> bool:
        return self._task(task).is_running

    def kill(self, task: str) -> None:
        """Ends ``task`` as a power cut does (SIGKILL); returns when it is gone."""
        self._task(task).kill()

    def terminate(self, task: str) -> int:
        """Asks ``task`` to drain and end; returns its exit code.

        Raises:
            DeadlineExceededError: It did not end within twice ``timeouts.drain``.
        """
        child = self._task(task)
        child.signal(signal.SIGTERM)
        timeout = 2 * self._settings.timeouts.drain
        code = child.wait(time.monotonic() + timeout)
        if code is None:
            raise DeadlineExceededError(
                f"{task} did not end in {timeout:g}s; {child.tail()}"
            )
        return code

    def stop_task(self, task: str) -> None:
        """Freezes ``task`` (SIGSTOP): alive for the kernel, silent for its peers.
        Returns when it is."""
        self._task(task).signal(signal.SIGSTOP)

    def continue_task(self, task: str) -> None:
        """Lets a frozen task go on (SIGCONT)."""
        self._task(task).signal(signal.SIGCONT)

    def restart(self, task: str) -> None:
        """Starts ``task`` again at the address that it had; kills it if it runs.

        Returns when it serves. Raises as the constructor does.
        """
        child = self._task(task)
        if child.is_running:
            child.kill()
        self._start([child])

    def _address(self, task: str) -> str:
        return self._task(task).address

    def _log_file(self, task: str) -> Path | None:
        return self._task(task).log

    def _start(self, children: Iterable[Child]) -> None:
        fresh = list(children)
        for child in fresh:
            extra = self._extra if child.job == "worker" else ()
            child.start(extra)
        if self._coordinates:
            import_coordinator()
        wait_ready(fresh, time.monotonic() + self._settings.timeouts.connect)


def _count(name: str, given: int, least: int) -> int:
    with contextlib.suppress(TypeError):
        count = operator.index(given)  # one of numpy is one, too
        if count < least:
            raise ValueError(f"{name}={given}: expected {least} or more")
        if not isinstance(given, bool):
            return count
    raise TypeError(f"{name}={given!r}: expected a whole number, {least} or more")


def _end(tasks: Mapping[str, Child], drain: float, folder: Path | None) -> None:
    """Workers first: what they still push needs the parameter servers."""
    children = list(tasks.values())
    for job in ("worker", "ps"):
        group = [child for child in children if child.job == job]
        for child in group:
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a frozen one would sleep through it
        deadline = time.monotonic() + drain + 2 * GRACE
        for child in group:
            child.wait(deadline)
            child.close()
    for child in children:
        if child.failures and child.log is not None:
            child.keep_log()
            how = ", ".join(child.failures)
            log.warning("%s %s; its log is kept: %s", child.task, how, child.log)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
