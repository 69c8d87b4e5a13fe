"""What the tasks of a running cluster say about themselves.

An observer opens a link of its own role to each task and asks; it never owns a task,
so it can watch a training run without touching it.

`ObservedRun` is that in the form in which a program tells of its run, so that the page,
and whatever else reads `ClusterCoordinator.metrics`, can be had where no program offers
it. What only a program knows is absent: scalars, what waits to be given out, what steps
print. The log has what the observer noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
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
    """One task as it was seen, or why it was not.

    ``values`` is what `zstrat.launch.Task.statistics` gives; ``round_trip`` seconds.
    """

    task: str
    address: str
    problem: str = ""
    round_trip: float = 0.0
    values: Mapping[str, PlainTree] = field(default_factory=dict)

    def number(self, *path: str) -> float:
        """The number at ``path`` of the values; 0 if it is not there."""
        value = self._at(path)
        return float(value) if isinstance(value, int | float) else 0.0

    def text(self, *path: str) -> str:
        """The text at ``path`` of the values; "" if it is not there."""
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

    async def look(self, timeout: float) -> list[TaskStatus]:
        """Asks every task at once; parameter servers first, in task order.

        Cancellation: loses the answers; the links stay.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(
                    self._ask(job, index, deadline), name=f"ask {job}:{index}"
                )
                for job, index in self._links
            ]
        return [task.result() for task in asking]

    async def _ask(self, job: str, index: int, deadline: float) -> TaskStatus:
        link = self._links[job, index]
        task, address = f"{job}:{index}", self._spec.task_address(job, index)
        try:
            await link.wait_open(deadline)
            began = time.perf_counter()
            reply = await link.request(Inspect(), deadline=deadline)
        except ZstratError as error:
            return TaskStatus(task, address, problem=str(error))
        took = time.perf_counter() - began
        if not isinstance(reply, Statistics):
            return TaskStatus(task, address, problem=f"answered {type(reply).__name__}")
        return TaskStatus(task, address, round_trip=took, values=reply.values)


async def observe(
    spec: ClusterSpec, settings: Settings, timeout: float
) -> list[TaskStatus]:
    """One look at all tasks of a cluster; who does not answer in time is named."""
    async with Observer(spec, settings) as observer:
        return await observer.look(timeout)


EVERY: Final = 1.0
"""Seconds between two looks, and for each task to answer one."""
LINES: Final = 200
"""Words about tasks that are kept, the newest ones."""


def told_by(status: TaskStatus) -> TaskReport:
    """What a task said of itself, or why it said nothing."""
    # An observer has no session, so it knows no other phases than these two.
    state = "lost" if status.problem else "open"
    return TaskReport(state, status.address, status.problem, status.values)


@final
class ObservedRun:
    """The tasks of one cluster, looked at once a second by an observer. A context
    manager, on the loop: in the block whoever asks this process is answered.

    Args:
        timeout: Seconds of silence after which a task that has answered is lost, as
            its peers would take it.
    """

    def __init__(
        self,
        observer: Observer,
        timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer, self._timeout, self._clock = observer, timeout, clock
        self._began = clock()
        self._seen: dict[str, TaskReport] = {}
        self._answered: dict[str, float] = {}
        """When each task has done so last."""
        self._lines: deque[PlainTree] = deque(maxlen=LINES)

    def readiness(self) -> str:
        """Which tasks do not answer; "" if all do."""
        gone = [name for name, told in self._seen.items() if told.state != "open"]
        return f"no answer from {', '.join(gone)}" if gone else ""

    def statistics(self) -> dict[str, PlainTree]:
        """What a program's session would tell: ``coordinator`` has its metrics. From
        any thread."""
        metrics: dict[str, PlainTree] = {
            "seconds": self._clock() - self._began,
            **report(dict(self._seen)),
            "logs": list(self._lines),
        }
        return {"coordinator": metrics}

    def take(self, seen: Iterable[TaskStatus]) -> None:
        """Takes over what one look has found."""
        for status in seen:
            told, before = told_by(status), self._seen.get(status.task)
            if not status.problem:
                self._answered[status.task] = self._clock()
            elif self._has_time(status.task):
                continue
            elif before is not None:
                told = replace(told, values={"log": before.values.get("log")})
            if before is None or before.state != told.state:
                self._line(status.task, told)
            self._seen[status.task] = told

    def _has_time(self, task: str) -> bool:
        answered = self._answered.get(task)
        return answered is not None and self._clock() - answered < self._timeout

    async def look_on(self) -> NoReturn:
        """Looks once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self.take(await self._observer.look(EVERY))
            # From begin to begin: a look at tasks that do not answer takes as long as
            # one may.
            await asyncio.sleep(began + EVERY - loop.time())

    def __enter__(self) -> Self:
        register(self, "observer:0", asyncio.get_running_loop(), anywhere=True)
        return self

    def __exit__(self, *_: object) -> None:
        unregister(self)

    def _line(self, task: str, told: TaskReport) -> None:
        level = "INFO" if told.state == "open" else "ERROR"
        words = f"{task} is {told.state}: {told.last_error or told.address}"
        self._lines.append([self._clock() - self._began, "observer", level, words])
