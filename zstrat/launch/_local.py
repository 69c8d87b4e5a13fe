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
from ._run_folder import RunFolder, addresses_in
from ._started_tasks import (
    StartedTasks,
    daemon_environment,
    environments_with_gpus,
    share,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from zstrat.config import Settings

log = logging.getLogger("zstrat.launch")


class LocalCluster(StartedTasks[Child]):
    """Parameter servers and workers as processes of this machine.

    A context manager; without ``with`` the daemons end when the object is garbage
    collected, or when the program ends or is killed.

        with zs.LocalCluster(num_ps=2, num_workers=2) as cluster:
            strategy = zs.ParameterServerStrategy(cluster.resolver)

    ``sys.path[0]`` of this program is on the path of the daemons: they can import the
    modules in the folder of the script, for objects that cannot be sent, such as locks.

    Args:
        num_ps, num_workers: Number of parameter servers and workers; 0 workers for
            programs that train by themselves, as with `BetweenGraphStrategy`.
        transport: The transport: "tcp" (loopback ports, which every user of this
            machine can reach), "ipc" (sockets in a folder that only this user can
            enter), "shm" (like "ipc", with large bodies in shared memory) or "auto"
            (the last of these that the system supports). Default:
            ``ZSTRAT_TRANSPORT``.
        env: Variables for the daemons, in addition to those of this process. ``NPROC``
            is the number of threads of XLA; by default the workers share the cores.
            They divide the GPUs in ``CUDA_VISIBLE_DEVICES``, or all GPUs, equally.
        worker_devices: Virtual CPU devices per worker, with ``JAX_PLATFORMS=cpu``.
        logs: "files" in the cluster's folder, or "terminal".
        directory: Folder for sockets and logs, which is kept; default: a temporary
            folder of mode 0700. If a task fails, its log is moved out of the temporary
            folder, and a warning at the end names the path.
        settings: Timeouts of the daemons; default: from ``ZSTRAT_*``.
        coordinates: Whether this program makes strategies. If so, it imports jax while
            the daemons start. False: it only runs the cluster.

    Raises:
        ValueError: An argument is invalid.
        UnavailableError: A daemon ended before it was ready; quotes its log and names
            the path of the log.
        DeadlineExceededError: The daemons were not ready within ``timeouts.connect``.
        TypeError: A count is not a whole number.
        RuntimeError: nvidia-smi exists but fails; set ``CUDA_VISIBLE_DEVICES`` to avoid
            calling it.
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
        # Before any pipe is made, which might get the number of a closed stream.
        occupy_descriptors()
        num_ps = _count("num_ps", num_ps, 1)
        num_workers = _count("num_workers", num_workers, 0)
        if worker_devices is not None:
            worker_devices = _count("worker_devices", worker_devices, 1)
        if logs not in ("files", "terminal"):
            raise ValueError(f"logs={logs!r}: expected 'files' or 'terminal'")
        self._settings = settings or settings_from(environment())
        self.transport = transport or self._settings.transport
        self._coordinates = coordinates
        self._extra: tuple[str, ...] = ()
        if worker_devices is not None:
            self._extra = ("--platform", "cpu", "--devices", str(worker_devices))
        daemons = daemon_environment(self._settings, self.transport, env or {})
        workers = {"NPROC": str(share(max(1, num_workers))), **daemons}
        if self._extra:
            workers["JAX_PLATFORMS"] = "cpu"
        variables: dict[str, list[Mapping[str, str]]] = {
            "ps": [daemons] * num_ps,
            "worker": environments_with_gpus(workers, num_workers),
        }
        # First, as finalizers run at exit in reverse order: the daemons drain before
        # their fork server ends. It imports jax while the rest is prepared.
        fork_server(daemons)
        folder = RunFolder(directory)
        address = addresses_in(folder.path, self.transport)
        self.directory = folder.path
        # Empty when the finalizer is made, and filled below: Ctrl-C at any point ends
        # what was started until then.
        children: dict[str, Child] = {}
        drain = self._settings.timeouts.drain
        # A ps with a state folder writes its state after the drain.
        handover = (
            float(daemons["ZSTRAT_HANDOVER"]) if daemons.get("ZSTRAT_STATE") else 0
        )
        self._drains = {"worker": drain, "ps": drain + handover}
        remove = self.directory if directory is None else None
        super().__init__(
            children, f"over {self.transport}", _end, children, self._drains, remove
        )
        kept = KeptLogs(directory is None)
        try:
            folder.make()
            for job, environments in variables.items():
                for index, env in enumerate(environments):
                    name = f"{job}-{index}"
                    log_file = self.directory / f"{name}.log"
                    path = log_file if logs == "files" else None
                    child = Child(job, index, address(name), path, env, kept)
                    children[child.task] = child
            self._start(children.values())
        except BaseException:  # to the caller, who has no object to stop
            self.stop()
            raise

    @property
    def settings(self) -> Settings:
        """The settings with which a strategy connects to this cluster. A strategy that
        is made of this object uses them automatically."""
        return self._settings

    @property
    def resolver(self) -> SimpleClusterResolver:
        """A resolver for strategies, which also accept this object itself.

        The resolver names no task for this process, as the coordinating program is not
        among the tasks.

        Raises:
            ClosedError: The cluster is closed.
        """
        self._check_open()
        return SimpleClusterResolver(self.spec)

    def pid(self, task: str) -> int:
        """Process id of ``task``, such as "worker:1".

        Raises:
            ClosedError: The cluster is closed.
        """
        self._check_open()
        return self._task(task).pid

    def is_running(self, task: str) -> bool:
        return self._task(task).is_running

    def kill(self, task: str) -> None:
        """Ends ``task`` as a power cut does (SIGKILL); returns when it is gone.

        Raises:
            ClosedError: The cluster is closed.
        """
        self._check_open()
        self._task(task).kill()

    def terminate(self, task: str) -> int:
        """Drains and ends ``task`` (SIGTERM); returns its exit code.

        Raises:
            DeadlineExceededError: The task did not end within twice ``timeouts.drain``;
                for a ps with a state folder also ``timeouts.handover``.
        """
        child = self._task(task)
        child.signal(signal.SIGTERM)
        timeout = self._settings.timeouts.drain + self._drains[child.job]
        code = child.wait(time.monotonic() + timeout)
        if code is None:
            raise DeadlineExceededError(
                f"{task} did not end within {timeout:g} s; {child.tail()}"
            )
        return code

    def stop_task(self, task: str) -> None:
        """Freezes ``task`` (SIGSTOP), so that its peers receive nothing from it; waits
        until the task is frozen."""
        self._task(task).signal(signal.SIGSTOP)

    def continue_task(self, task: str) -> None:
        """Continues a frozen task (SIGCONT)."""
        self._task(task).signal(signal.SIGCONT)

    def restart(self, task: str) -> None:
        """Restarts ``task`` at its address; kills the task first if it runs.

        Returns when the task serves. Raises the errors of the constructor.

        Raises:
            ClosedError: The cluster is closed.
        """
        # Nobody would end a task that was started after that.
        self._check_open()
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
        # All are started before any is waited for.
        for child in fresh:
            extra = self._extra if child.job == "worker" else ()
            child.start(extra)
        # Meanwhile, on another core, this program imports what it needs next: jax and
        # the modules of a coordinator. No device is initialized.
        if self._coordinates:
            from zstrat.strategy import ParameterServerStrategy  # noqa: F401
        wait_ready(fresh, time.monotonic() + self._settings.timeouts.connect)


def _count(name: str, given: int, least: int) -> int:
    with contextlib.suppress(TypeError):
        count = operator.index(given)  # accepts integers of numpy as well
        if count < least:
            raise ValueError(f"{name}={given}: expected {least} or more")
        # True is an int, but hardly meant as a number of tasks.
        if not isinstance(given, bool):
            return count
    raise TypeError(f"{name}={given!r}: expected a whole number, {least} or more")


def _end(
    tasks: Mapping[str, Child], drains: Mapping[str, float], folder: Path | None
) -> None:
    """Ends all tasks, workers first, as their last pushes need the parameter servers;
    then removes the folder, if one is given.

    Args:
        drains: Seconds that a task of each job may take to drain.
    """
    children = list(tasks.values())
    for job in ("worker", "ps"):
        group = [child for child in children if child.job == job]
        for child in group:
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a frozen process would not see SIGTERM
        # Two graces: the task has one beyond its drain, and the process has to exit.
        deadline = time.monotonic() + drains[job] + 2 * GRACE
        for child in group:
            child.wait(deadline)
            # Kills it if it is late.
            child.close()
    # Before the folder goes, in which the logs are.
    for child in children:
        if child.failures and child.log is not None:
            child.keep_log()
            how = ", ".join(child.failures)
            log.warning("%s %s; its log is kept: %s", child.task, how, child.log)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
