"""The parts that a `LocalCluster` and a `Fleet` share: the folder of a run with its
sockets, keys and logs, the environment of the daemons, and tasks that this program
starts and that end with it (`StartedTasks`)."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, final

from zstrat.cluster import GPUS_VARIABLE, ClusterSpec, parts_of
from zstrat.config import checked_transport, daemon_variables
from zstrat.errors import ClosedError
from zstrat.paths import explained
from zstrat.transport import generate_keys

from ._child import inherited

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.config import Settings


log = logging.getLogger("zstrat.launch")

LONGEST_SOCKET_PATH: Final = 100
"""Bytes of the path of an ``ipc://`` address; the kernel allows 107."""


def addresses_in(folder: Path, transport: str) -> Callable[[str], str]:
    """Returns a function that makes the address of a daemon from its name: a socket in
    the folder, which need not exist yet, or a free loopback port.

    Raises:
        ValueError: The transport is unknown, or the path is too long for its sockets.
    """
    checked_transport(transport)
    if _sockets(transport, folder) == "tcp":
        return lambda name: "127.0.0.1:0"
    return lambda name: f"ipc://{folder / name}"


def virtual(devices: int) -> tuple[str, ...]:
    """Returns the arguments of a worker with this many virtual CPU devices."""
    return ("--platform", "cpu", "--devices", str(devices))


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


def divided(env: Mapping[str, str], tasks: int) -> list[Mapping[str, str]]:
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
    """Makes the environment of the daemons: that of this process, its settings, and
    ``extra``, the later ones first in priority. The folder of the program is on their
    ``PYTHONPATH``, as for processes of `multiprocessing`.

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
    variables = {**defaults, **inherited(), **ours, **extra}
    if folder := own_folder():
        path = variables.get("PYTHONPATH")
        parts = [folder, path] if path else [folder]
        variables["PYTHONPATH"] = os.pathsep.join(parts)
    return variables


def own_folder() -> str:
    """Returns the folder of the script or notebook, the first entry of ``sys.path``; ""
    if Python was started with -P."""
    if sys.flags.safe_path or not sys.path:
        return ""
    return os.path.abspath(sys.path[0])


@final
class RunFolder:
    """The folder of a run: the given one, or a new temporary one. Its path is known
    before it exists, so that its owner can remove it after Ctrl-C.

    Raises:
        ValueError: ``directory`` is an empty string, as of an unset variable.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._is_new = directory is None
        if directory is None:
            # Not `mkdtemp`: after Ctrl-C in it nobody would know the name. Eight random
            # characters cannot be guessed, and `make` refuses a folder that exists.
            name = f"zstrat-{secrets.token_urlsafe(6)}"
            self.path = Path(tempfile.gettempdir(), name).absolute()
        elif not os.fspath(directory):
            raise ValueError("directory='': expected a folder or None")
        else:
            self.path = Path(os.fsdecode(directory)).absolute()

    def make(self) -> None:
        """Creates the folder with mode 0700, unless a given one exists.

        Raises:
            OSError: The folder cannot be created.
        """
        with explained("directory", self.path):
            self.path.mkdir(0o700, parents=True, exist_ok=not self._is_new)


class RunKeys:
    """A folder with new keys for one run, a pair for each role. `make` creates them.

    Raises:
        FileExistsError: The folder has files already. They would be removed with it at
            the end of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} is not empty, and the keys of a run are removed together "
                "with their folder: move it, or pass another directory"
            )

    def make(self) -> None:
        """Generates the keys.

        Raises:
            OSError: They cannot be written.
        """
        generate_keys(self.folder)

    def of(self, job: str) -> dict[str, str]:
        """Reads the files that a task of ``job`` needs: its secret key and all public
        keys."""
        files = [self.folder / f"{job}.secret", *sorted(self.folder.glob("*.public"))]
        return {file.name: file.read_text("ascii") for file in files}


def write_keys(folder: Path, keys: Mapping[str, str]) -> None:
    """Writes received keys, by file name, to a new folder (mode 0700, files 0600).

    Raises:
        ValueError: A name is not that of a key file.
        FileExistsError: The folder exists already.
    """
    for name in keys:
        if "/" in name or not name.endswith((".secret", ".public")):
            raise ValueError(f"{name!r:.80}: expected a name *.secret or *.public")
    folder.mkdir(mode=0o700)
    for name, text in keys.items():
        file = folder / name
        # Closed to others before it has contents.
        file.touch(mode=0o600)
        file.write_text(text, "ascii")


def _sockets(transport: str, folder: Path) -> str:
    # The longest name that a cluster on one machine may have.
    fits = len(os.fsencode(folder / "worker-1000")) <= LONGEST_SOCKET_PATH
    if transport == "tcp":
        return "tcp"
    if transport == "auto":
        return "ipc" if os.name == "posix" and fits else "tcp"
    if not fits:
        raise ValueError(
            f"{folder}: the path is too long for ipc sockets (over "
            f"{LONGEST_SOCKET_PATH} bytes): pass a shorter directory, or "
            "transport='tcp'"
        )
    return "ipc"


T = TypeVar("T")


class StartedTasks(ABC, Generic[T]):
    """Tasks by name, parameter servers first. Ends them once, and only in the process
    that made this object.

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
        """Returns the log file of the task; None: it logs to the terminal."""

    @property
    def spec(self) -> ClusterSpec:
        """The current addresses of the tasks."""
        jobs: dict[str, list[str]] = {}
        for task in self._tasks:
            jobs.setdefault(task.partition(":")[0], []).append(self._address(task))
        return ClusterSpec(jobs)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names such as "ps:0", parameter servers first."""
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
