"""The base class of `LocalCluster` and `Fleet`: tasks that this program starts and that
end with it."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from zstrat.cluster import ClusterSpec
from zstrat.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
