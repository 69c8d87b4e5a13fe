"""Tasks that this program starts, and that end with it: their environment, and their
end.

Base of `LocalCluster` and `Fleet`.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from zstrat.cluster import GPUS_VARIABLE, ClusterSpec, parts_of
from zstrat.config import daemon_variables
from zstrat.errors import ClosedError

from ._child import inherited_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from zstrat.config import Settings


log = logging.getLogger("zstrat.launch")


def share(workers: int) -> int:
    """Returns the number of cores for each worker of this machine. If each worker had
    threads for all cores, they would wait for each other: two workers on two cores take
    5 % more processor time for a step of 4 ms."""
    # In a container or under taskset a process may have fewer cores than the machine.
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // workers)


def environments_with_gpus(
    env: Mapping[str, str], tasks: int
) -> list[Mapping[str, str]]:
    """Divides the GPUs of this machine among tasks; returns the environment of each,
    and logs its GPUs.

    Raises:
        RuntimeError: nvidia-smi exists but fails.
    """
    parts = parts_of(env, tasks)
    for index, part in enumerate(parts):
        if part:
            log.info("task %d of %d here uses GPU %s", index, tasks, ", ".join(part))
    return [{**env, GPUS_VARIABLE: ",".join(part)} if part else env for part in parts]


def daemon_environment(
    settings: Settings, transport: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """Makes the environment of the daemons: the variables of this process, those for
    the settings, and ``extra``, of which later ones take precedence. The folder of the
    program is on their ``PYTHONPATH``, as for processes of `multiprocessing`.

    Raises:
        TypeError: A name or value of ``extra`` is not a string.
    """
    for name, value in extra.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(
                f"env: expected strings, such as '1', got {name!r}: {value!r:.80}"
            )
    # Several jax processes may share one accelerator of this machine.
    defaults = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ours = {**daemon_variables(settings), "ZSTRAT_TRANSPORT": transport}
    variables = {**defaults, **inherited_environment(), **ours, **extra}
    if folder := script_folder():
        path = variables.get("PYTHONPATH")
        parts = [folder, path] if path else [folder]
        variables["PYTHONPATH"] = os.pathsep.join(parts)
    return variables


def script_folder() -> str:
    """Returns the folder of the script or notebook, the first entry of ``sys.path``; ""
    if Python was started with -P."""
    if sys.flags.safe_path or not sys.path:
        return ""
    return os.path.abspath(sys.path[0])


T = TypeVar("T")


class StartedTasks(ABC, Generic[T]):
    """Tasks by name, parameter servers first. Ends the tasks once, and only in the
    process that made this object.

    Args:
        by: How the tasks were started or are reached, for `repr`.
        end: Ends the tasks, called with ``parts``; called again after Ctrl-C.
    """

    def __init__(
        self, tasks: dict[str, T], by: str, end: Callable[..., None], *parts: Any
    ) -> None:
        self._tasks, self._by = tasks, by
        # The finalizer must not refer to this object, which would never be collected;
        # hence a function of the module and parts.
        self._parts = os.getpid(), end, parts
        self._end = weakref.finalize(self, _end, *self._parts)

    @abstractmethod
    def _address(self, task: str) -> str:
        """Returns the last address of the task; "" if it never served."""

    @abstractmethod
    def _log_file(self, task: str) -> Path | None:
        """Returns the log file of the task; None if the task logs to the terminal."""

    @property
    def spec(self) -> ClusterSpec:
        """The current addresses of the tasks, as a cluster spec."""
        jobs: dict[str, list[str]] = {}
        for task in self._tasks:
            jobs.setdefault(task.partition(":")[0], []).append(self._address(task))
        return ClusterSpec(jobs)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, such as "ps:0", parameter servers first."""
        return tuple(self._tasks)

    def log(self, task: str) -> str:
        """Returns the log of ``task`` so far; "" if the logs go to the terminal."""
        path = self._log_file(task)
        if path is None or not path.exists():
            return ""
        return path.read_text("utf-8", "replace")

    def stop(self) -> None:
        """Drains and ends all tasks, workers first; kills those that do not end in
        time. Idempotent; a call after Ctrl-C finishes an interrupted one."""
        # Called directly, not through the finalizer, which counts as done when it is
        # called: after Ctrl-C the next call would do nothing.
        if self._end.alive:
            _end(*self._parts)
            self._end.detach()

    close = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self._end.alive else "stopped"
        return f"<{type(self).__name__} {' '.join(self._tasks)} {self._by}, {state}>"

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ClosedError(
                f"{self!r} is closed and its tasks have ended; create a new "
                f"{type(self).__name__}"
            )

    def _task(self, name: str) -> T:
        try:
            return self._tasks[name]
        except KeyError:
            known = ", ".join(self._tasks)
            raise ValueError(f"no task {name!r}: expected one of {known}") from None


def _end(program: int, end: Callable[..., None], parts: tuple[Any, ...]) -> None:
    """Ends the tasks, unless this is a forked process of the program."""
    if os.getpid() == program:
        end(*parts)
