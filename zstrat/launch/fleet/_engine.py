"""The interface between a fleet and the engines that start its tasks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from zstrat.config import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from zstrat.errors import ZstratError

LOG_TAIL: Final = 2**16
"""Bytes at the end of a log that are searched for the cause of a failure."""


@dataclass(frozen=True, slots=True)
class FleetTask:
    """A task and the place where it runs: ``where`` is a name that the engine knows,
    such as a host; ``port`` is the port it listens on, 0 for a free one."""

    job: str
    index: int
    where: str
    port: int = 0

    @property
    def name(self) -> str:
        """The name of the task, such as "worker:1"."""
        return f"{self.job}:{self.index}"


def assign(num_ps: int, num_workers: int, hosts: Iterable[str]) -> list[FleetTask]:
    """Assigns each task to the next of the hosts, parameter servers first."""
    names = [("ps", n) for n in range(num_ps)]
    names += [("worker", n) for n in range(num_workers)]
    pairs = zip(names, hosts, strict=False)
    return [FleetTask(job, index, where) for (job, index), where in pairs]


@dataclass(frozen=True, slots=True)
class TaskLaunch:
    """Everything that an engine needs to start a task.

    Args:
        bind: The last address of the task, "" the first time.
        keys: The files of its key folder, name -> text: the secret key of its role and
            all public keys.
        env: Environment variables of the task.
        on_host: Number of tasks of its job on its host, which share cores and GPUs.
        rank: Its rank among them.
        log: The file for its output; None: standard error of this process.
        logged: Size of that file in bytes when this attempt began; the bytes before are
            of earlier attempts.
        launcher_timeout: Seconds without a heartbeat of this program after which the
            task ends.
    """

    task: FleetTask
    bind: str
    keys: Mapping[str, str]
    env: Mapping[str, str]
    on_host: int
    rank: int
    log: Path | None
    logged: int = 0
    launcher_timeout: float = Timeouts().launcher

    def log_tail(self) -> str:
        """Reads the last 64 KiB that this attempt logged; "" without a log file."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.logged, size - LOG_TAIL))
            return file.read(LOG_TAIL).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """The end of a process.

    Args:
        words: Follow the name of the task in messages: "ended with exit code 1".
        code: The exit code, 0 for a task that drained; None if it is unknown.
        why: The cause and a remedy, if known.
        mistake: An error of the whole run, which a restart does not fix.
    """

    words: str
    code: int | None = None
    why: str = ""
    mistake: ZstratError | None = None


@dataclass(frozen=True, slots=True)
class TaskEvents:
    """Takes the events of one process, from any thread; never blocks."""

    bound: Callable[[str], None]
    """Call it with the address when the task serves; at most once, and before
    `ended`."""
    ended: Callable[[TaskEnd], None]
    """Call it exactly once, when the process has ended."""


class RunningTask(Protocol):
    """Ends a process. Both methods return at once; `TaskEvents.ended` follows."""

    def drain(self) -> None:
        """Makes the task finish its accepted requests and end."""
        ...

    def kill(self) -> None:
        """Kills the task."""
        ...


class Engine(Protocol):
    """Starts processes on machines. Called only on the thread of the fleet, which lives
    as long as the processes."""

    name: str
    """The name of the engine in messages, such as "ssh"."""

    def start(self, launch: TaskLaunch, events: TaskEvents) -> RunningTask:
        """Begins to start a task; returns at once.

        Raises:
            ZstratError, OSError: The start failed at once; ``events`` is not called,
                and the fleet does not try again.
        """
        ...

    def close(self) -> None:
        """Frees resources, after all processes have ended or were given up."""
        ...
