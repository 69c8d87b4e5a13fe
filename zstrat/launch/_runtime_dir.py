"""Where the daemons of a local cluster live and what they find there: their folder,
their sockets, their environment."""

from __future__ import annotations

import dataclasses
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

from ._child import inherited

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zstrat.config import Settings

log = logging.getLogger("zstrat.launch")

LONGEST_SOCKET_PATH: Final = 100
"""Bytes; the kernel takes 107, and ``ipc://`` addresses are paths."""


@dataclasses.dataclass(frozen=True, slots=True)
class RuntimeDir:
    """A folder, and the kind of sockets ("tcp" or "ipc") that the daemons bind."""

    folder: Path
    sockets: str

    @classmethod
    def of(cls, transport: str, folder: Path) -> RuntimeDir:
        """That folder, which need not be there yet, for sockets of this transport.

        Raises:
            ValueError: There is no such transport, or the path is too long for its
                sockets.
        """
        checked_transport(transport)
        return cls(folder, _sockets(transport, folder))

    def address(self, name: str) -> str:
        """The address that a daemon of that name binds."""
        return "127.0.0.1:0" if self.sockets == "tcp" else f"ipc://{self.folder / name}"


def virtual(devices: int) -> tuple[str, ...]:
    """Arguments of a worker that has so many virtual CPU devices."""
    return ("--platform", "cpu", "--devices", str(devices))


def share(workers: int) -> int:
    """Cores for each of the workers. With threads for all cores in each of them, the
    parts of one program wait for cores on which another one runs: two workers on two
    cores take 5 % more processor time for a step of 4 ms."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // workers)


def divided(env: Mapping[str, str], tasks: int) -> list[Mapping[str, str]]:
    """The environment of each of several tasks of this machine, which divide its GPUs;
    the log says who has which.

    Raises:
        RuntimeError: nvidia-smi is there and fails.
    """
    parts = parts_of(env, tasks)
    for place, part in enumerate(parts):
        if part:
            log.info("task %d of %d here has GPU %s", place, tasks, ", ".join(part))
    return [{**env, GPUS_VARIABLE: ",".join(part)} if part else env for part in parts]


def daemon_environment(
    settings: Settings, transport: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """What the daemons find: our environment, our settings, then the caller's words;
    and our own modules, as the processes of `multiprocessing` do.

    Raises:
        TypeError: A word of the caller's is no text.
    """
    for name, value in extra.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"env: {name!r}: {value!r:.80}: expected texts, as '1'")
    # Several jax processes share this machine's accelerator if there is one.
    usual = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ours = {**daemon_variables(settings), "ZSTRAT_TRANSPORT": transport}
    told = {**usual, **inherited(), **ours, **extra}
    if folder := own_folder():
        path = told.get("PYTHONPATH")
        told["PYTHONPATH"] = os.pathsep.join([folder, path] if path else [folder])
    return told


def own_folder() -> str:
    """Where this program finds its own modules: the first place where Python looks, so
    that of the script, or of a notebook. "" if Python was told to look in none (-P)."""
    if sys.flags.safe_path or not sys.path:
        return ""
    return os.path.abspath(sys.path[0])


@final
class RunFolder:
    """The folder of a run: the one that is given, or a new one for temporary files. Its
    path is known before it is there, so that Ctrl-C finds somebody who removes it.

    Raises:
        ValueError: It is an empty text, as of a variable that is not set.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._is_new = directory is None
        if directory is None:
            name = f"zstrat-{secrets.token_urlsafe(6)}"
            self.path = Path(tempfile.gettempdir(), name).absolute()
        elif not os.fspath(directory):
            raise ValueError("directory: expected a folder, or None, got an empty text")
        else:
            self.path = Path(os.fsdecode(directory)).absolute()

    def make(self) -> None:
        """Makes it, with mode 0700, if it is not there.

        Raises:
            OSError: There can be no such folder; says why.
        """
        with explained("directory", self.path):
            self.path.mkdir(0o700, parents=True, exist_ok=not self._is_new)


def _sockets(transport: str, folder: Path) -> str:
    fits = len(os.fsencode(folder / "worker-1000")) <= LONGEST_SOCKET_PATH
    if transport == "tcp":
        return "tcp"
    if transport == "auto":
        return "ipc" if os.name == "posix" and fits else "tcp"
    if not fits:
        raise ValueError(
            f"{folder} is too long a path for ipc sockets (over {LONGEST_SOCKET_PATH} "
            "bytes): give a shorter directory, or transport='tcp'"
        )
    return "ipc"
