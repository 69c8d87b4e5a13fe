"""Taking the time line of a session, on its loop: from all tasks, until that is enough.

It ends by itself: after so many steps, so many seconds, or when who wanted it, or the
session, is done. What the tasks have noted is asked for then, so that a program which
goes on for days keeps none of it there.

A task is asked for its clock, before and after, and its spans, over the link that the
program has to it anyway; nothing is asked in between.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, final

from zstrat.coordinator._run_status import short
from zstrat.coordinator.connecting import ClusterTasks
from zstrat.errors import ZstratError
from zstrat.telemetry.timeline import (
    ClockLine,
    ClockReading,
    ProgramNotes,
    RoundTrip,
    TaskNotes,
    from_columns,
    from_jax_columns,
    read_clock,
)
from zstrat.wire import AskClock, BeginCapture, Captured, ClockTime, EndCapture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.coordinator._engine import ClosureEngine
    from zstrat.coordinator.connecting import AnyTask, ProbedTask


CLOCK_TRIPS: Final = 8
"""Round trips of which the shortest counts: on a network that is busy most of them wait
somewhere, and one that did not says all there is to know."""


@final
class CapturedTask:
    """One task of the session, or a second copy, on the loop.

    Args:
        session: The number that the task knows its session by.
    """

    def __init__(self, task: AnyTask, session: int) -> None:
        self.task: Final = task
        self.name: Final = short(task.name)
        self.session: Final = session
        self._incarnation: int | None = None
        self._first: ClockReading | None = None
        self._problem = ""

    async def begin(self, order: BeginCapture, deadline: float) -> None:
        """Reads its clock, and has it keep its spans. That it does not answer until
        ``deadline`` (loop time) is told by `end`.

        Cancellation: it may keep spans, for as long as it was told to.
        """
        try:
            await self.task.wait_ready(deadline)
            hello = self.task.hello
            self._incarnation = None if hello is None else hello.incarnation
            self._first = await self._clock(deadline)
            await self.task.link.submit(order, deadline=deadline)
        except ZstratError as error:
            self._problem = f"it did not begin: {error}"

    async def end(self, deadline: float) -> TaskNotes:
        """What it has noted; or what is known if it does not answer."""
        notes = TaskNotes(self.name, problem=self._problem or self._loss())
        if self._first is None or notes.problem:
            return notes
        notes.clock = ClockLine(self._first)
        try:
            end = EndCapture(self.session)
            told = await self.task.link.submit(end, deadline=deadline)
            assert isinstance(told, Captured), told
            own, of_jax = told.arrays[:4], told.arrays[4:]
            notes.spans, notes.traffic = from_columns(told.phases, own)
            notes.is_cut = told.is_cut
            notes.profile, notes.problem = told.profile, told.problem
            notes.jax = from_jax_columns(of_jax) if of_jax else None
            notes.clock = ClockLine(self._first, await self._clock(deadline))
        except (ZstratError, ValueError) as error:
            notes.problem = f"it did not tell all of it: {error}"
        return notes

    def _loss(self) -> str:
        """Why there is nobody who knows what it has noted."""
        hello = self.task.hello
        if not self.task.is_ready:
            return f"it was lost meanwhile: {self.task.state}"
        if hello is not None and hello.incarnation != self._incarnation:
            return "it was started again meanwhile, and has forgotten what it had noted"
        return ""

    async def _clock(self, deadline: float) -> ClockReading:
        return read_clock([await self._trip(deadline) for _ in range(CLOCK_TRIPS)])

    async def _trip(self, deadline: float) -> RoundTrip:
        asked = time.monotonic()
        answer = await self.task.link.submit(AskClock(self.session), deadline=deadline)
        heard = time.monotonic()
        assert isinstance(answer, ClockTime), answer
        return RoundTrip(asked, answer.now, heard)


CAPTURE_SECONDS: Final = 10.0
"""Seconds for all tasks together to begin, and again to end: who takes longer hangs,
and is left out."""
PROFILE_SECONDS: Final = 60.0
"""The same with jax's own profile, which a worker begins and ends between two steps."""
BYTES_OF_SPAN: Final = 200
"""What one becomes in a file that is not compressed."""


class TimedCluster(ClusterTasks, Protocol):
    """All tasks of a session (`Cluster`)."""

    timeline: TimelineRun | None
    """The one that is taken now."""

    def backups(self) -> Sequence[ProbedTask]:
        """A way to each second copy that has all."""
        ...


@dataclass(frozen=True, slots=True)
class TimelineBounds:
    """When it ends: after so many ``steps`` (None: these do not count) or ``seconds``;
    and how large its file may become, about, before the oldest is left out."""

    steps: int | None
    seconds: float
    nbytes: int
    profile: bool


@dataclass(slots=True)
class CollectedRun:
    """All that became of it. ``reason``: what has ended it."""

    notes: ProgramNotes
    tasks: list[TaskNotes]
    ended: float
    reason: str


@final
class TimelineRun:
    """One time line, from its begin to its end. Belongs to the loop.

    Args:
        yields: It ends as soon as another one is wanted.
    """

    def __init__(
        self,
        cluster: TimedCluster,
        engine: ClosureEngine,
        bounds: TimelineBounds,
        *,
        yields: bool = False,
    ) -> None:
        self._cluster, self._engine, self._bounds = cluster, engine, bounds
        self._yields = yields
        self._over = asyncio.Event()
        """Set when another one may begin."""
        self._tasks: list[CapturedTask] = []
        self._backups: Sequence[ProbedTask] = ()
        self._enough = asyncio.Event()
        self._reason = "the end of the block"
        self._timeout = PROFILE_SECONDS if bounds.profile else CAPTURE_SECONDS
        self._collecting: asyncio.Task[CollectedRun] | None = None

    async def begin(self) -> None:
        """Has all tasks that are there begin; from then on the program notes, too.

        Raises:
            RuntimeError: Another one is taken just now.

        Cancellation: nothing is taken.
        """
        other = self._cluster.timeline
        if other is not None and other._yields:
            other.enough()
            await other.wait_over()
        if self._cluster.timeline is not None:
            raise RuntimeError(
                "a time line of this session is taken already: one at a time; let that "
                "block end"
            )
        self._cluster.timeline = self
        try:
            await self._begin_tasks()
            self._engine.notes = notes = self._new_notes()
        except BaseException:  # to whoever wanted it
            self.give_up()
            await self._part()
            raise
        loop = asyncio.get_running_loop()
        collecting = self._collect(notes)
        self._collecting = loop.create_task(collecting, name="time line")  # see `end`

    async def end(self) -> None:
        """Ends it, if it has not ended yet. Idempotent.

        Cancellation: it ends all the same.
        """
        assert self._collecting is not None, "it has not begun"
        self._enough.set()
        await asyncio.shield(self._collecting)

    def enough(self) -> None:
        """The time line is to end; this does not wait until it has."""
        self._enough.set()

    def give_up(self) -> None:
        """Nobody wants it any more: whoever wants another one waits for its end."""
        self._yields = True
        self.enough()

    async def wait_over(self) -> None:
        """Waits until another one may begin. Cancellation: nothing changes."""
        await self._over.wait()

    async def close(self, timeout: float) -> None:
        """Ends it, as the session does; tasks have ``timeout`` seconds to tell."""
        self._timeout = timeout
        if self._collecting is not None:
            await self.end()

    @property
    def collected(self) -> CollectedRun | None:
        """What became of it; None while, and if, it did not come to its end."""
        collecting = self._collecting
        if collecting is None or not collecting.done() or collecting.cancelled():
            return None
        return None if collecting.exception() else collecting.result()

    async def _begin_tasks(self) -> None:
        cluster, bounds = self._cluster, self._bounds
        ready = [task for task in (*cluster.ps, *cluster.workers) if task.is_ready]
        self._tasks = [CapturedTask(task, task.session) for task in ready]
        self._backups = cluster.backups()
        for backup in self._backups:
            backup.start()
        self._tasks += [CapturedTask(task, cluster.session) for task in self._backups]
        deadline = self._deadline()
        async with asyncio.TaskGroup() as group:
            for task in self._tasks:
                order = BeginCapture(
                    task.session,
                    self._room,
                    bounds.seconds + CAPTURE_SECONDS,
                    bounds.profile,
                )
                group.create_task(task.begin(order, deadline), name=task.name)

    def _new_notes(self) -> ProgramNotes:
        queue, bounds = self._engine.queue, self._bounds
        with self._engine.lock:
            waiting, running = queue.queued, queue.running
        done = partial(self._is_enough, f"{bounds.steps} steps")
        now, steps = time.monotonic(), bounds.steps
        return ProgramNotes(now, waiting, running, self._room, steps=steps, done=done)

    @property
    def _room(self) -> int:
        """Spans that each of the tasks, and the program, may have; of jax's events a
        task may have as many again."""
        spans = self._bounds.nbytes // BYTES_OF_SPAN
        parts = len(self._tasks) * (2 if self._bounds.profile else 1) + 1
        return max(1, spans // parts)

    def _is_enough(self, reason: str) -> None:
        self._reason = reason
        self._enough.set()

    async def _collect(self, notes: ProgramNotes) -> CollectedRun:
        try:
            async with asyncio.timeout(self._bounds.seconds):
                await self._enough.wait()
        except TimeoutError:
            self._reason = f"{self._bounds.seconds:g} seconds"
        ended = time.monotonic()
        self._engine.notes = None
        deadline = self._deadline()
        try:
            async with asyncio.TaskGroup() as group:
                asking = [
                    group.create_task(task.end(deadline), name=task.name)
                    for task in self._tasks
                ]
        finally:
            await self._part()
        tasks = [*(each.result() for each in asking), *self._newcomers()]
        return CollectedRun(notes, tasks, ended, self._reason)

    async def _part(self) -> None:
        """Another one may begin. There is no session with the backups."""
        self._cluster.timeline = None
        self._over.set()
        await asyncio.gather(*(each.link.close() for each in self._backups))

    def _newcomers(self) -> list[TaskNotes]:
        known = {id(task.task) for task in self._tasks}
        words = "it joined after the begin"
        return [
            TaskNotes(short(task.name), problem=words)
            for task in (*self._cluster.ps, *self._cluster.workers)
            if task.is_ready and id(task) not in known
        ]

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout
