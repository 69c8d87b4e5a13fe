"""Reads the statistics of a running cluster without a program.

An observer opens a link with the role "observer" to each task and requests statistics;
it opens no session on a task, so that it does not disturb the training run.

`ObservedRun` serves these statistics in the format of `ClusterCoordinator.metrics`, for
the status page and other readers, when the program itself serves no page. It lacks what
only the program knows: scalars, queued closures and the output of steps. Its log has
the changes of state that the observer noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import ZstratError
from zstrat.telemetry import TaskReport, report
from zstrat.transport import Link, Security, hello, new_incarnation
from zstrat.transport.health import register, unregister
from zstrat.wire import Inspect, Job, Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import NoReturn, Self

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.wire import PlainTree


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The answer of one task, or in ``problem`` why there was none.

    ``values`` is the result of `zstrat.launch.Task.statistics`; ``round_trip`` is in
    seconds.
    """

    task: str
    address: str
    problem: str = ""
    round_trip: float = 0.0
    values: Mapping[str, PlainTree] = field(default_factory=dict)

    def number(self, *path: str) -> float:
        """Returns the number at ``path`` in ``values``; 0 if it is missing."""
        value = self._at(path)
        return float(value) if isinstance(value, int | float) else 0.0

    def text(self, *path: str) -> str:
        """Returns the text at ``path`` in ``values``; "" if it is missing."""
        value = self._at(path)
        return value if isinstance(value, str) else ""

    def _at(self, path: tuple[str, ...]) -> PlainTree:
        value: PlainTree = dict(self.values)
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


class Observer:
    """Links to all tasks of a cluster; an async context manager."""

    def __init__(self, spec: ClusterSpec, settings: Settings) -> None:
        # Never a job of the cluster: a second worker:0 would be taken for a restart of
        # the first one.
        me = hello(Job.OBSERVER, 0, new_incarnation())
        keys = settings.keys
        security = None if keys is None else Security.load(keys, Job.OBSERVER)
        self._links: dict[tuple[str, int], Link] = {
            (job, index): Link(
                spec.task_address(job, index),
                me,
                name=f"{job}:{index}",
                settings=settings,
                security=security,
                expect=(job, index),
            )
            # Other jobs are programs, which listen at no address.
            for job in (Job.PS, Job.WORKER)
            if job in spec.jobs
            for index in spec.task_indices(job)
        }
        self._spec = spec

    async def __aenter__(self) -> Observer:
        for link in self._links.values():
            link.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.TaskGroup() as group:
            for (job, index), link in self._links.items():
                group.create_task(link.close(), name=f"close {job}:{index}")

    async def inspect(self, timeout: float) -> list[TaskStatus]:
        """Requests the statistics of all tasks at once; returns them in task order,
        parameter servers first.

        Cancellation: discards the answers; the links stay open.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        async with asyncio.TaskGroup() as group:
            requests = [
                group.create_task(
                    self._request(job, index, deadline), name=f"ask {job}:{index}"
                )
                for job, index in self._links
            ]
        return [request.result() for request in requests]

    async def _request(self, job: str, index: int, deadline: float) -> TaskStatus:
        link = self._links[job, index]
        task, address = f"{job}:{index}", self._spec.task_address(job, index)
        try:
            # Measured without the handshake: `doctor` reports the round trip.
            await link.wait_open(deadline)
            began = time.perf_counter()
            reply = await link.request(Inspect(), deadline=deadline)
        # Reported as a status, so that the other tasks are shown all the same.
        except ZstratError as error:
            return TaskStatus(task, address, problem=str(error))
        took = time.perf_counter() - began
        if not isinstance(reply, Statistics):
            problem = f"unexpected answer {type(reply).__name__}"
            return TaskStatus(task, address, problem=problem)
        return TaskStatus(task, address, round_trip=took, values=reply.values)


async def observe(
    spec: ClusterSpec, settings: Settings, timeout: float
) -> list[TaskStatus]:
    """Requests the statistics of all tasks of a cluster once; returns a status for each
    task. That of a task which does not answer in time says so."""
    async with Observer(spec, settings) as observer:
        return await observer.inspect(timeout)


EVERY: Final = 1.0
"""Seconds between two requests to a task; also the timeout of each request."""
LINES: Final = 200
"""Number of log lines that are kept, the newest ones."""


def report_of(status: TaskStatus) -> TaskReport:
    """Converts a status to the report of a task."""
    # An observer has no session, so it knows only these two states.
    state = "lost" if status.problem else "open"
    return TaskReport(state, status.address, status.problem, status.values)


@final
class ObservedRun:
    """Metrics of the tasks of one cluster, updated once a second by an observer. A
    context manager, used on the loop: inside the block this process serves the metrics.

    Args:
        timeout: Seconds without an answer after which a task counts as lost, equal to
            the liveness timeout of its peers.
    """

    def __init__(
        self,
        observer: Observer,
        timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer, self._timeout, self._clock = observer, timeout, clock
        self._began = clock()
        self._reports: dict[str, TaskReport] = {}
        self._answered: dict[str, float] = {}
        """Time of the last answer of each task."""
        self._lines: deque[PlainTree] = deque(maxlen=LINES)

    def readiness(self) -> str:
        """Names the tasks that do not answer; "" if all do."""
        lost = [name for name, task in self._reports.items() if task.state != "open"]
        return f"no answer from {', '.join(lost)}" if lost else ""

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the metrics under ``coordinator``, as a program's session returns
        them. From any thread."""
        metrics: dict[str, PlainTree] = {
            "seconds": self._clock() - self._began,
            # A copy: the HTTP server calls this on its own thread.
            **report(dict(self._reports)),
            "logs": list(self._lines),
        }
        return {"coordinator": metrics}

    def update(self, statuses: Iterable[TaskStatus]) -> None:
        """Updates the metrics from one status of each task."""
        for status in statuses:
            task, before = report_of(status), self._reports.get(status.task)
            if not status.problem:
                self._answered[status.task] = self._clock()
            elif self._clock() - self._answered.get(status.task, -inf) < self._timeout:
                continue  # not lost yet: the last report stays
            # Lost: its numbers are outdated, but its log may say why.
            elif before is not None:
                task = replace(task, values={"log": before.values.get("log")})
            if before is None or before.state != task.state:
                self._log_state(status.task, task)
            self._reports[status.task] = task

    async def watch(self) -> NoReturn:
        """Updates the metrics once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self.update(await self._observer.inspect(EVERY))
            # Not a full second: tasks that do not answer may have used most of it.
            await asyncio.sleep(began + EVERY - loop.time())

    def __enter__(self) -> Self:
        register(self, "observer:0", asyncio.get_running_loop(), anywhere=True)
        return self

    def __exit__(self, *_: object) -> None:
        unregister(self)

    def _log_state(self, name: str, task: TaskReport) -> None:
        level = "INFO" if task.state == "open" else "ERROR"
        words = f"{name} is {task.state}: {task.last_error or task.address}"
        self._lines.append([self._clock() - self._began, "observer", level, words])
