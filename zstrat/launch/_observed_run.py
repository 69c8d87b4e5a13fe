"""A cluster as an observer sees it, in the form in which a program tells of its run.

So that the page, and whatever else reads `ClusterCoordinator.metrics`, can be had where
no program offers it. What only a program knows is absent: scalars, what waits to be
given out, what steps print. The log has what the observer noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final, final

from zstrat.telemetry import TaskTold, report
from zstrat.transport.health import register, unregister

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import NoReturn, Self

    from zstrat.wire import PlainTree

    from ._observe import Observer, TaskStatus

EVERY: Final = 1.0
"""Seconds between two looks, and for each task to answer one."""
LINES: Final = 200


def told_by(status: TaskStatus) -> TaskTold:
    """What a task said of itself, or why it said nothing."""
    state = "lost" if status.problem else "open"
    return TaskTold(state, status.address, status.problem, status.values)


@final
class ObservedRun:
    """The tasks of one cluster, looked at once a second by an observer. A context
    manager, on the loop: in the block whoever asks this process is answered.

    Args:
        patience: Seconds of silence after which a task that has answered is lost, as
            its peers would take it.
    """

    def __init__(
        self,
        observer: Observer,
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer, self._patience, self._clock = observer, patience, clock
        self._began = clock()
        self._seen: dict[str, TaskTold] = {}
        self._answered: dict[str, float] = {}
        """When each task has done so last."""
        self._lines: deque[PlainTree] = deque(maxlen=LINES)

    def readiness(self) -> str:
        """Which tasks do not answer; "" if all do."""
        gone = [name for name, told in self._seen.items() if told.state != "open"]
        return f"no answer from {', '.join(gone)}" if gone else ""

    def statistics(self) -> dict[str, PlainTree]:
        """As of the session of a program: ``coordinator`` has its metrics. From any
        thread."""
        metrics: dict[str, PlainTree] = {
            "seconds": self._clock() - self._began,
            **report(dict(self._seen)),
            "logs": list(self._lines),
        }
        return {"coordinator": metrics}

    def take(self, seen: Iterable[TaskStatus]) -> None:
        """What one look has found."""
        for status in seen:
            told, before = told_by(status), self._seen.get(status.task)
            if not status.problem:
                self._answered[status.task] = self._clock()
            elif self._is_patient(status.task):
                continue
            if before is None or before.state != told.state:
                self._line(status.task, told)
            self._seen[status.task] = told

    def _is_patient(self, task: str) -> bool:
        answered = self._answered.get(task)
        return answered is not None and self._clock() - answered < self._patience

    async def look_on(self) -> NoReturn:
        """Looks until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self.take(await self._observer.look(EVERY))
            await asyncio.sleep(began + EVERY - loop.time())

    def __enter__(self) -> Self:
        register(self, "observer:0", asyncio.get_running_loop(), anywhere=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        unregister(self)

    def _line(self, task: str, told: TaskTold) -> None:
        level = "INFO" if told.state == "open" else "ERROR"
        words = f"{task} is {told.state}: {told.last_error or told.address}"
        self._lines.append([self._clock() - self._began, "observer", level, words])
