"""Decisions of a fleet, and the interface of the engines that carry them out.

`FleetState` decides: `event, now -> orders`, without I/O and without a clock.

A task is waiting, starting, serving, or down:

    WAITING --> STARTING --> SERVING --> DOWN
       ^                                  |
       +------------- restart ------------+

While the fleet starts, the first task that ends fails the whole fleet, because a task
that cannot start needs its user. Later, a task that ends is restarted on its host: at
once the first time, then after growing pauses. A task that ended more than ``restarts``
times within ``window`` seconds is not restarted, and the others continue. A task that
drained (exit code 0) was ended on purpose, and is not restarted either.

A fleet ends in two waves, parameter servers last, as the last pushes of the workers
need them. A wave that does not end in time is killed; if even that is not reported in
time, it counts as ended.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from zstrat.config import Timeouts
from zstrat.errors import DeadlineExceededError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from zstrat.errors import ZstratError


LOG_TAIL: Final = 2**16
"""Bytes at the end of a log that are searched for the cause of a failure."""


@dataclass(frozen=True, slots=True)
class FleetTask:
    """A task and where it runs: ``where`` is a name that the engine knows, such as a
    host; ``port`` is the port on which the task listens, 0 for a free one."""

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
    # Not strict: the hosts may go on endlessly, or be more than the tasks.
    pairs = zip(names, hosts, strict=False)
    return [FleetTask(job, index, where) for (job, index), where in pairs]


@dataclass(frozen=True, slots=True)
class TaskLaunch:
    """All data that an engine needs to start a task.

    Args:
        bind: The last address of the task, "" the first time.
        keys: The files of its key folder, name -> text: the secret key of its role and
            all public keys.
        env: Environment variables of the task.
        on_host: Number of tasks of its job on its host, which share cores and GPUs.
        rank: The task's number among these, from 0.
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
        """Returns the last 64 KiB that this attempt logged; "" without a log file."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # Not before this attempt: the cause of an earlier failure may be gone.
            file.seek(max(self.logged, size - LOG_TAIL))
            return file.read(LOG_TAIL).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How the process of a task ended.

    Args:
        words: Text that follows the name of the task in messages: "ended with exit code
            1".
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
    """Callbacks to which an engine reports the events of one process, from any thread;
    they never block."""

    bound: Callable[[str], None]
    """To be called with the address when the task serves; at most once, and before
    `ended`."""
    ended: Callable[[TaskEnd], None]
    """To be called exactly once, when the process has ended."""


class RunningTask(Protocol):
    """The process of a task, which these methods end. Both return at once;
    `TaskEvents.ended` follows."""

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
        """Frees the engine's resources, after all processes have ended or were given
        up."""
        ...


FIRST_PAUSE: Final = 1.0
"""Seconds before the second restart of a task within the period in which restarts are
counted (``window``); doubled with each further restart."""
LONGEST_PAUSE: Final = 30.0
"""The most seconds of that pause, so that a machine that came back is used soon."""
KILL_TIMEOUT: Final = 5.0
"""Seconds within which the end of a killed task has to be reported."""


@dataclass(frozen=True, slots=True)
class StartTask:
    """An order to start a task; ``bind`` is its last address, "" the first time."""

    task: str
    attempt: int
    bind: str


@dataclass(frozen=True, slots=True)
class DrainTask:
    task: str


@dataclass(frozen=True, slots=True)
class KillTask:
    task: str


@dataclass(frozen=True, slots=True)
class LogTask:
    """An order to log a message about a task; ``is_failure``: the task ended with an
    error."""

    message: str
    task: str
    is_failure: bool = True


@dataclass(frozen=True, slots=True)
class FleetReady:
    """Reports that all tasks have served."""


@dataclass(frozen=True, slots=True)
class BeginFailed:
    """Reports that the fleet could not start; its tasks are ending."""

    error: ZstratError
    task: str


FleetOrder = StartTask | DrainTask | KillTask | LogTask | FleetReady | BeginFailed


class TaskPhase(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    DOWN = "down"


class FleetStage(Enum):
    BEGINNING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"
    """No task runs, and none will be started."""


@dataclass(frozen=True, slots=True)
class FleetTimeouts:
    """Timeouts of a fleet in seconds, and the most ``restarts`` of a task within
    ``window`` seconds."""

    start: float
    drain: float
    restarts: int
    window: float

    def __post_init__(self) -> None:
        for name in ("start", "drain", "window"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected seconds above 0"
                )
        if self.restarts < 0:
            raise ValueError(f"restarts={self.restarts}: expected 0 or more")


@dataclass(slots=True)
class _TaskState:
    """The state of a task. ``due``: the time when it is to be started, or has to
    serve."""

    phase: TaskPhase = TaskPhase.WAITING
    attempt: int = 0
    address: str = ""
    due: float = 0.0
    is_killed: bool = False
    failures: deque[float] = field(default_factory=deque)


class FleetState:
    """The states of the tasks of a fleet, by name, and the decisions that follow from
    events."""

    def __init__(self, tasks: Iterable[str], timeouts: FleetTimeouts) -> None:
        self._tasks = {task: _TaskState() for task in tasks}
        if not self._tasks:
            raise ValueError("tasks=[]: expected one task or more")
        self._timeouts = timeouts
        self.stage = FleetStage.BEGINNING
        self._wave: list[str] = []
        """The tasks that have to end by ``_deadline``."""
        self._deadline = 0.0

    def phase(self, task: str) -> TaskPhase:
        return self._tasks[task].phase

    def address(self, task: str) -> str:
        """Returns the last address of a task; "" if it never served."""
        return self._tasks[task].address

    def attempt(self, task: str) -> int:
        return self._tasks[task].attempt

    def next_look(self) -> float | None:
        """Returns the time at which to call `tick`; None: no call is needed before the
        next event."""
        if self.stage is FleetStage.OVER:
            return None
        if self.stage is FleetStage.ENDING:
            return self._deadline
        # A task that serves has no deadline, one that is down is not looked at again.
        timed = (TaskPhase.WAITING, TaskPhase.STARTING)
        dues = [known.due for known in self._tasks.values() if known.phase in timed]
        return min(dues, default=None)

    def begin(self, now: float) -> list[FleetOrder]:
        """Starts all tasks."""
        return [self._start(task, now) for task in self._tasks]

    def bound(self, task: str, attempt: int, address: str) -> list[FleetOrder]:
        """Handles the report that a task serves; the fleet is ready when all do."""
        known = self._tasks[task]
        # A late report of an earlier attempt is ignored.
        if attempt != known.attempt or known.phase is not TaskPhase.STARTING:
            return []
        # Its next attempt binds the same address, so that peers find it again.
        known.phase, known.address = TaskPhase.SERVING, address
        if self.stage is not FleetStage.BEGINNING:
            return []
        if any(other.phase is not TaskPhase.SERVING for other in self._tasks.values()):
            return []
        self.stage = FleetStage.RUNNING
        return [FleetReady()]

    def ended(
        self, task: str, attempt: int, end: TaskEnd, now: float
    ) -> list[FleetOrder]:
        """Handles the end of a task's process."""
        known = self._tasks[task]
        # DOWN: it was given up, and its end is reported after all.
        if attempt != known.attempt or known.phase is TaskPhase.DOWN:
            return []
        was_ready, known.phase = known.phase is TaskPhase.SERVING, TaskPhase.DOWN
        match self.stage:
            case FleetStage.BEGINNING:
                moment = "" if was_ready else " before it was ready"
                words = f"{task} {end.words}{moment}{_reason(end)}"
                # A mistake has its own words, such as both versions.
                error = end.mistake or UnavailableError(words)
                return self._fail(task, error, now)
            case FleetStage.RUNNING:
                return self._restart_or_give_up(task, known, end, now)
        return self._advance(now)

    def tick(self, now: float) -> list[FleetOrder]:
        """Starts tasks that are due, and handles those that missed a deadline."""
        if self.stage is FleetStage.OVER:
            return []
        if self.stage is FleetStage.ENDING:
            return self._kill_late_wave(now)
        timed = (TaskPhase.WAITING, TaskPhase.STARTING)
        due = [
            (task, known)
            for task, known in self._tasks.items()
            if known.phase in timed and known.due <= now
        ]
        # A program waits for the whole fleet, so the first one that is late ends it.
        if self.stage is FleetStage.BEGINNING and due:
            task = due[0][0]
            words = f"{task} was not ready within {self._timeouts.start:g} s"
            return self._fail(task, DeadlineExceededError(words), now)
        orders: list[FleetOrder] = []
        for task, known in due:
            if known.phase is TaskPhase.WAITING:
                orders.append(self._start(task, now))
            else:
                orders += self._kill_late_task(task, known, now)
        return orders

    def stop(self, now: float) -> list[FleetOrder]:
        """Ends all tasks, in two waves. Idempotent."""
        if self.stage in (FleetStage.ENDING, FleetStage.OVER):
            return []
        self.stage = FleetStage.ENDING
        # These have no process, whose end would be reported.
        for known in self._tasks.values():
            if known.phase is TaskPhase.WAITING:
                known.phase = TaskPhase.DOWN
        return self._advance(now)

    def _start(self, task: str, now: float) -> StartTask:
        known = self._tasks[task]
        known.phase, known.is_killed = TaskPhase.STARTING, False
        # From here on events of earlier attempts are ignored.
        known.attempt += 1
        known.due = now + self._timeouts.start
        return StartTask(task, known.attempt, known.address)

    def _kill_late_task(
        self, task: str, known: _TaskState, now: float
    ) -> list[FleetOrder]:
        """Kills a task whose restart took too long; its end is reported as usual."""
        words = f"{task} was not ready within {self._timeouts.start:g} s"
        known.due = now + KILL_TIMEOUT
        # Killed at the last look, and its end was not reported since: the engine does
        # not reach its machine, on which it may still run, so it is not started again.
        if known.is_killed:
            known.phase = TaskPhase.DOWN
            return self._over_if_all_down([LogTask(f"{words}; giving up", task)])
        known.is_killed = True
        return [LogTask(words, task), KillTask(task)]

    def _restart_or_give_up(
        self, task: str, known: _TaskState, end: TaskEnd, now: float
    ) -> list[FleetOrder]:
        # Not by `stop`: that changes the stage of the fleet first.
        if end.code == 0:
            words = f"{task} {end.words}: it drained on request; not restarting it"
            return self._over_if_all_down([LogTask(words, task, is_failure=False)])
        # A restart would fail in the same way.
        if end.mistake is not None:
            words = f"{task} {end.words}; not restarting it: {end.mistake}"
            return self._over_if_all_down([LogTask(words, task)])
        window, most = self._timeouts.window, self._timeouts.restarts
        known.failures.append(now)
        # Ends at the latest at the failure that was just added.
        while known.failures[0] < now - window:
            known.failures.popleft()
        count = len(known.failures)
        if count > most:
            words = f"{task} {end.words}, failure {count} within {window:g} s"
            words += f"{_reason(end)}; not restarting it"
            return self._over_if_all_down([LogTask(words, task)])
        pause = _pause(count)
        when = f" in {pause:g} s" if pause else ""
        log = LogTask(f"{task} {end.words}{_reason(end)}; restarting it{when}", task)
        if not pause:
            return [log, self._start(task, now)]
        # `tick` starts it; `next_look` says when.
        known.phase, known.due = TaskPhase.WAITING, now + pause
        return [log]

    def _over_if_all_down(self, orders: list[FleetOrder]) -> list[FleetOrder]:
        if all(known.phase is TaskPhase.DOWN for known in self._tasks.values()):
            self.stage = FleetStage.OVER
        return orders

    def _fail(self, task: str, error: ZstratError, now: float) -> list[FleetOrder]:
        """Fails the fleet, and kills all tasks without a drain, as no program has used
        them yet."""
        self.stage, self._wave = FleetStage.ENDING, self._up(self._tasks)
        return self._over_if_all_down([BeginFailed(error, task), *self._kill(now)])

    def _up(self, tasks: Iterable[str]) -> list[str]:
        up = (TaskPhase.STARTING, TaskPhase.SERVING)
        return [task for task in tasks if self._tasks[task].phase in up]

    def _advance(self, now: float) -> list[FleetOrder]:
        """Drains the next wave of tasks (workers, then parameter servers) if the wave
        before has ended."""
        if self._up(self._wave):
            return []
        # Workers first, as their last pushes need the parameter servers.
        first = [task for task in self._tasks if not task.startswith("ps:")]
        self._wave = self._up(first) or self._up(self._tasks)
        self._deadline = now + self._timeouts.drain
        return self._over_if_all_down([DrainTask(task) for task in self._wave])

    def _kill_late_wave(self, now: float) -> list[FleetOrder]:
        """Kills the wave of tasks at its deadline; tasks that were killed before count
        as ended."""
        if now < self._deadline:
            return []
        lost = [task for task in self._up(self._wave) if self._tasks[task].is_killed]
        for task in lost:
            self._tasks[task].phase = TaskPhase.DOWN
        words = f"was killed, but its end was not reported within {KILL_TIMEOUT:g} s"
        logs: list[FleetOrder] = [LogTask(f"{task} {words}", task) for task in lost]
        # The first time kills the wave and sets its second deadline; then nothing of it
        # is up, and `_advance` begins the next wave.
        return logs + self._kill(now) + self._advance(now)

    def _kill(self, now: float) -> list[FleetOrder]:
        self._deadline = now + KILL_TIMEOUT
        alive = [t for t in self._up(self._wave) if not self._tasks[t].is_killed]
        for task in alive:
            self._tasks[task].is_killed = True
        return [KillTask(task) for task in alive]


def _reason(end: TaskEnd) -> str:
    return f": {end.why}" if end.why else ""


def _pause(count: int) -> float:
    """Returns the seconds before the restart after this many failures."""
    # Bounded: larger powers of 2 do not fit into a float.
    longer: float = FIRST_PAUSE * 2 ** min(count - 2, 30)
    return 0.0 if count == 1 else min(longer, LONGEST_PAUSE)
