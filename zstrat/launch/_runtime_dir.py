"""The folder of a run with its sockets, keys and logs, and the environment of the
daemons."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from zstrat.cluster import GPUS_VARIABLE, parts_of
from zstrat.config import checked_transport, daemon_variables
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
        file.touch(mode=0o600)
        file.write_text(text, "ascii")


def _sockets(transport: str, folder: Path) -> str:
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
