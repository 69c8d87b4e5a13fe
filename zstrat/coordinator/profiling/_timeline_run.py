"""`TimelineRun`: records the time line of a session with all its tasks. On the loop.

A recording ends after a number of steps or seconds, or when the block or the session
ends. Then the spans of the tasks are collected, so that tasks keep none for long.

The program asks each task for its clock, before and after the recording, and for its
spans, over its usual link. It sends nothing in between.
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
"""Number of round trips to a clock, of which the shortest counts: on a busy network
most of them wait somewhere."""


@final
class CapturedTask:
    """Records the spans of one task of the session, or of a backup. On the loop.

    Args:
        session: The session number of the task.
    """

    def __init__(self, task: AnyTask, session: int) -> None:
        self.task: Final = task
        self.name: Final = short(task.name)
        self.session: Final = session
        self._incarnation: int | None = None
        self._first: ClockReading | None = None
        self._problem = ""

    async def begin(self, request: BeginCapture, deadline: float) -> None:
        """Reads the clock of the task, and makes it record spans. If the task does not
        answer until ``deadline`` (loop time), `end` reports that.

        Cancellation: the task may record, for as long as the message says.
        """
        try:
            await self.task.wait_ready(deadline)
            hello = self.task.hello
            self._incarnation = None if hello is None else hello.incarnation
            # Before it records, and again afterwards: two readings show how far its
            # clock drifts.
            self._first = await self._clock(deadline)
            await self.task.link.submit(request, deadline=deadline)
        except ZstratError as error:
            self._problem = f"it did not start: {error}"

    async def end(self, deadline: float) -> TaskNotes:
        """Collects the spans of the task; returns what is known if the task does not
        answer."""
        notes = TaskNotes(self.name, problem=self._problem or self._loss())
        # Without its clock its spans have no place on the line.
        if self._first is None or notes.problem:
            return notes
        notes.clock = ClockLine(self._first)
        try:
            end = EndCapture(self.session)
            captured = await self.task.link.submit(end, deadline=deadline)
            assert isinstance(captured, Captured), captured
            own, of_jax = captured.arrays[:4], captured.arrays[4:]
            notes.spans, notes.traffic = from_columns(captured.phases, own)
            notes.is_cut = captured.is_cut
            notes.profile, notes.problem = captured.profile, captured.problem
            notes.jax = from_jax_columns(of_jax) if of_jax else None
            notes.clock = ClockLine(self._first, await self._clock(deadline))
        except (ZstratError, ValueError) as error:
            notes.problem = f"it did not send all of its spans: {error}"
        return notes

    def _loss(self) -> str:
        """Returns why the spans of the task are lost, or ""."""
        hello = self.task.hello
        if not self.task.is_ready:
            return f"it was lost meanwhile: {self.task.state}"
        if hello is not None and hello.incarnation != self._incarnation:
            return "it was restarted meanwhile, and lost its spans"
        return ""

    async def _clock(self, deadline: float) -> ClockReading:
        return read_clock([await self._trip(deadline) for _ in range(CLOCK_TRIPS)])

    async def _trip(self, deadline: float) -> RoundTrip:
        sent = time.monotonic()
        answer = await self.task.link.submit(AskClock(self.session), deadline=deadline)
        received = time.monotonic()
        assert isinstance(answer, ClockTime), answer
        return RoundTrip(sent, answer.now, received)


CAPTURE_SECONDS: Final = 10.0
"""Seconds for all tasks together to start, and again to end. Slower tasks are left out.
"""
PROFILE_SECONDS: Final = 60.0
"""Seconds to start, and again to end, if jax's own profile is recorded, too: a worker
starts and ends that profile between two steps."""
BYTES_OF_SPAN: Final = 200
"""Bytes of a span in a file that is not compressed, about."""


class TimedCluster(ClusterTasks, Protocol):
    """The part of `Cluster` that `TimelineRun` uses."""

    timeline: TimelineRun | None
    """The time line that is being recorded; None if none is."""

    def backups(self) -> Sequence[ProbedTask]:
        """Returns connections to the stores' backups that are complete."""


@dataclass(frozen=True, slots=True)
class TimelineBounds:
    """Bounds of a time line: its number of ``steps`` (None: any), its ``seconds``, and
    the approximate size of its file in bytes, beyond which the oldest spans are left
    out."""

    steps: int | None
    seconds: float
    nbytes: int
    profile: bool


@dataclass(slots=True)
class CollectedRun:
    """A recorded time line. ``reason`` says what ended the recording."""

    notes: ProgramNotes
    tasks: list[TaskNotes]
    ended: float
    reason: str


@final
class TimelineRun:
    """Records one time line. On the loop.

    Args:
        yields: This recording ends as soon as another one is requested.
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
        """An event, set when another recording may start."""
        self._tasks: list[CapturedTask] = []
        self._backups: Sequence[ProbedTask] = ()
        self._enough = asyncio.Event()
        self._reason = "the end of the block"
        self._timeout = PROFILE_SECONDS if bounds.profile else CAPTURE_SECONDS
        self._collecting: asyncio.Task[CollectedRun] | None = None

    async def begin(self) -> None:
        """Starts to record, on all connected tasks and in the program.

        Raises:
            RuntimeError: Another time line is being recorded.

        Cancellation: nothing is recorded.
        """
        other = self._cluster.timeline
        # A sample of `OpenTelemetryExport`: a user's profile goes before it.
        if other is not None and other._yields:
            other.enough()
            await other.wait_over()
        if self._cluster.timeline is not None:
            # Looked at again, as two may have waited for the same sample.
            raise RuntimeError(
                "another time line of this session is being recorded; wait until its "
                "block has ended"
            )
        # Before the first await: others see that it is taken.
        self._cluster.timeline = self
        try:
            await self._begin_tasks()
            # Last, when all tasks record: the first step that the program notes has its
            # run.
            self._engine.notes = notes = self._new_notes()
        except BaseException:  # to the caller
            self.give_up()
            await self._finish()
            raise
        loop = asyncio.get_running_loop()
        collecting = self._collect(notes)
        self._collecting = loop.create_task(collecting, name="time line")  # see `end`

    async def end(self) -> None:
        """Ends the time line, and waits until the spans are collected. Idempotent.

        Cancellation: the time line ends all the same.
        """
        assert self._collecting is not None, "begin() comes first"
        self._enough.set()
        # Shielded: a cancelled caller must not leave tasks that record.
        await asyncio.shield(self._collecting)

    def enough(self) -> None:
        """Ends the recording soon; does not wait for its end."""
        self._enough.set()

    def give_up(self) -> None:
        """Ends this recording soon, for another one, which waits until it has ended."""
        self._yields = True
        self.enough()

    async def wait_over(self) -> None:
        """Waits until another recording may start. Cancellation: changes nothing."""
        await self._over.wait()

    async def close(self, timeout: float) -> None:
        """Ends the recording with the session; tasks have ``timeout`` seconds to send
        their spans."""
        self._timeout = timeout
        if self._collecting is not None:
            await self.end()

    @property
    def collected(self) -> CollectedRun | None:
        """The recorded time line; None until the recording has ended, or if it
        failed."""
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
                request = BeginCapture(
                    task.session,
                    self._room,
                    # Longer than the time line: a task stops by itself if the program
                    # dies.
                    bounds.seconds + CAPTURE_SECONDS,
                    bounds.profile,
                )
                group.create_task(task.begin(request, deadline), name=task.name)

    def _new_notes(self) -> ProgramNotes:
        queue, bounds = self._engine.queue, self._bounds
        with self._engine.lock:
            waiting, running = queue.queued, queue.running
        done = partial(self._is_enough, f"{bounds.steps} steps")
        now, steps = time.monotonic(), bounds.steps
        return ProgramNotes(now, waiting, running, self._room, steps=steps, done=done)

    @property
    def _room(self) -> int:
        """The most spans that each task, and the program, may keep. With a profile,
        each task may keep as many events of jax as well."""
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
        # Before the tasks are asked, which may take seconds: the program notes nothing
        # more.
        self._engine.notes = None
        deadline = self._deadline()
        try:
            async with asyncio.TaskGroup() as group:
                # A task that does not answer does not end this: its notes say what they
                # lack.
                asking = [
                    group.create_task(task.end(deadline), name=task.name)
                    for task in self._tasks
                ]
        finally:
            await self._finish()
        tasks = [*(each.result() for each in asking), *self._newcomers()]
        return CollectedRun(notes, tasks, ended, self._reason)

    async def _finish(self) -> None:
        """Lets another recording start, and disconnects from the backups."""
        # First, as closing links to backups may be interrupted.
        self._cluster.timeline = None
        self._over.set()
        await asyncio.gather(*(backup.link.close() for backup in self._backups))

    def _newcomers(self) -> list[TaskNotes]:
        known = {id(task.task) for task in self._tasks}
        problem = "it joined after the start"
        return [
            TaskNotes(short(task.name), problem=problem)
            for task in (*self._cluster.ps, *self._cluster.workers)
            if task.is_ready and id(task) not in known
        ]

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout
