"""What a fleet asks of an engine, and what an engine tells a fleet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from zstrat.config import Timeouts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from zstrat.errors import ZstratError

LONGEST_SAID: Final = 2**16
"""Bytes of a log that are looked at for the reason of an end."""


@dataclass(frozen=True, slots=True)
class FleetTask:
    """One task, and where it is to run: a word of the engine, such as a host. ``port``
    is the one that it listens at there, 0 for any that is free."""

    job: str
    index: int
    where: str
    port: int = 0

    @property
    def name(self) -> str:
        """The name of the task, such as "worker:1"."""
        return f"{self.job}:{self.index}"


def distribute_tasks(
    num_ps: int, num_workers: int, places: Iterable[str]
) -> list[FleetTask]:
    """The tasks, each at the next of the places, parameter servers first."""
    names = [("ps", n) for n in range(num_ps)]
    names += [("worker", n) for n in range(num_workers)]
    pairs = zip(names, places, strict=False)
    return [FleetTask(job, index, where) for (job, index), where in pairs]


@dataclass(frozen=True, slots=True)
class TaskLaunch:
    """All that an engine is told to start a task.

    ``bind`` is the address that the task had before, "" the first time. ``keys`` are
    the files of its key folder, name -> text: the secret of its role and all public
    halves. ``env`` are variables for it. ``beside`` is how many tasks of its job are on
    the same host, which share its cores and GPUs, ``place`` its own number among them.
    ``log`` is the file that takes what it prints; None: it goes where this process's
    own errors go. ``logged`` is the size of that file, in bytes, when this attempt
    began: what is in it is of others. ``launcher_timeout``: the task ends if it has not
    heard of this program for so many seconds, as it may be cut off.
    """

    task: FleetTask
    bind: str
    keys: Mapping[str, str]
    env: Mapping[str, str]
    beside: int
    place: int
    log: Path | None
    logged: int = 0
    launcher_timeout: float = Timeouts().launcher

    def said(self) -> str:
        """The log of this attempt so far, its last 64 KiB; "" if it is elsewhere."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.logged, size - LONGEST_SAID))
            return file.read(LONGEST_SAID).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended.

    ``words`` go behind the name of the task: "ended with exit code 1". ``code`` is 0
    for a task that drained, None where nobody knows. ``why`` says more, and what to do.
    ``mistake`` is what is wrong with the run as a whole, for which no second try helps.
    """

    words: str
    code: int | None = None
    why: str = ""
    mistake: ZstratError | None = None


class TaskEvents(Protocol):
    """Who hears of one process. Takes any thread, and never blocks."""

    def bound(self, address: str) -> None:
        """The task serves, and others reach it there. Told once at most, and before its
        end."""
        ...

    def ended(self, end: End) -> None:
        """The task is gone. Told exactly once."""
        ...


class RunningTask(Protocol):
    """What ends a process. Both return at once; its end is heard of."""

    def drain(self) -> None:
        """Has it finish what it accepted, and end."""
        ...

    def kill(self) -> None:
        """Ends the task now, whatever it does."""
        ...


class Engine(Protocol):
    """Starts processes somewhere. Called on one thread, that of the fleet, which lives
    as long as they do."""

    name: str
    """For words to a person: "ssh"."""

    def start(self, launch: TaskLaunch, hear: TaskEvents) -> RunningTask:
        """Begins to start a task; returns at once.

        Raises:
            ZstratError, OSError: It cannot even begin; ``hear`` is not called. The
                fleet takes it for a mistake.
        """
        ...

    def close(self) -> None:
        """All processes have ended, or were given up."""
        ...
