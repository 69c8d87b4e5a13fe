"""Decides what a fleet does: `message, now -> orders`, without I/O and without a clock.

A task waits, is started, serves, and ends. Until all have served once the fleet is
beginning: the first that ends then fails the whole fleet, because what cannot start is
for its user to mend. Later a task that ends is started again where it was, at once the
first time, then after longer and longer pauses; one that ended more than ``restarts``
times within ``window`` seconds is given up, with words, and the others go on. A task
that drained (exit code 0) was told to by somebody who may, and stays down, with words.

An end is decided in two waves, workers and whatever is not a parameter server first:
what they still push needs the servers. A wave that does not end in time is killed, and
one that even then is not gone is given up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from zstrat.errors import DeadlineExceededError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.errors import ZstratError

    from ._engine import End

FIRST_PAUSE: Final = 1.0
"""Seconds before the second restart within a window; each one after it waits twice as
long as the one before."""
LONGEST_PAUSE: Final = 30.0
"""Seconds beyond which it grows no more: a machine that came back is used soon."""
GONE: Final = 5.0
"""Seconds that a killed task has to be gone."""


@dataclass(frozen=True, slots=True)
class StartTask:
    """Start this task, as this attempt of it, at the address that it had."""

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
class FleetNote:
    """Something that whoever looks after the run should read."""

    words: str
    task: str
    is_failure: bool = True


@dataclass(frozen=True, slots=True)
class FleetReady:
    """All tasks have served."""


@dataclass(frozen=True, slots=True)
class BeginFailed:
    """The fleet could not begin; its tasks are being ended."""

    error: ZstratError
    task: str


@dataclass(frozen=True, slots=True)
class FleetOver:
    """No task runs, and none will be started."""


FleetOrder = (
    StartTask | DrainTask | KillTask | FleetNote | FleetReady | BeginFailed | FleetOver
)


class TaskPhase(Enum):
    WAITING = "waits to be started"
    STARTING = "is being started"
    SERVING = "serves"
    DOWN = "ended"


class FleetStage(Enum):
    BEGINNING = "begins"
    RUNNING = "runs"
    ENDING = "ends"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class FleetTimeouts:
    """How long a fleet waits, in seconds, and how often it tries again."""

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
    """What is known of a task. ``due``: when it is to start or to have started."""

    phase: TaskPhase = TaskPhase.WAITING
    attempt: int = 0
    address: str = ""
    due: float = 0.0
    is_killed: bool = False
    failures: deque[float] = field(default_factory=deque)


class FleetState:
    """The tasks of a fleet, by name, and how far each is."""

    def __init__(self, tasks: Iterable[str], timeouts: FleetTimeouts) -> None:
        self._tasks = {task: _TaskState() for task in tasks}
        if not self._tasks:
            raise ValueError("a fleet of no tasks: expected one or more")
        self._timeouts = timeouts
        self._stage = FleetStage.BEGINNING
        self._wave: list[str] = []
        """The tasks whose turn it is to end, by the deadline."""
        self._deadline = 0.0

    @property
    def stage(self) -> FleetStage:
        return self._stage

    def phase(self, task: str) -> TaskPhase:
        return self._tasks[task].phase

    def address(self, task: str) -> str:
        """Where it served last; "" if it never did."""
        return self._tasks[task].address

    def attempt(self, task: str) -> int:
        return self._tasks[task].attempt

    def next_look(self) -> float | None:
        """When `tick` has something to decide; None: not before something happens."""
        if self._stage is FleetStage.OVER:
            return None
        if self._stage is FleetStage.ENDING:
            return self._deadline
        timed = (TaskPhase.WAITING, TaskPhase.STARTING)
        dues = [known.due for known in self._tasks.values() if known.phase in timed]
        return min(dues, default=None)

    def begin(self, now: float) -> list[FleetOrder]:
        """Starts all tasks."""
        return [self._start(task, now) for task in self._tasks]

    def bound(self, task: str, attempt: int, address: str) -> list[FleetOrder]:
        """A process serves at an address: the fleet is ready when all do."""
        known = self._tasks[task]
        # Word of a process that was started before: its task is another one by now.
        if attempt != known.attempt or known.phase is not TaskPhase.STARTING:
            return []
        known.phase, known.address = TaskPhase.SERVING, address
        if self._stage is not FleetStage.BEGINNING:
            return []
        if any(each.phase is not TaskPhase.SERVING for each in self._tasks.values()):
            return []
        self._stage = FleetStage.RUNNING
        return [FleetReady()]

    def ended(self, task: str, attempt: int, end: End, now: float) -> list[FleetOrder]:
        """A process is gone: decides what follows."""
        known = self._tasks[task]
        if attempt != known.attempt or known.phase is TaskPhase.DOWN:
            return []
        was_ready, known.phase = known.phase is TaskPhase.SERVING, TaskPhase.DOWN
        match self._stage:
            case FleetStage.BEGINNING:
                moment = "" if was_ready else " before it was ready"
                words = f"{task} {end.words}{moment}{_because(end)}"
                error = end.mistake or UnavailableError(words)
                return self._fail(task, error, now)
            case FleetStage.RUNNING:
                return self._judge(task, known, end, now)
        return self._advance(now)

    def tick(self, now: float) -> list[FleetOrder]:
        """Orders what is due by now."""
        if self._stage is FleetStage.OVER:
            return []
        if self._stage is FleetStage.ENDING:
            return self._press(now)
        timed = (TaskPhase.WAITING, TaskPhase.STARTING)
        due = [
            (task, known)
            for task, known in self._tasks.items()
            if known.phase in timed and known.due <= now
        ]
        if self._stage is FleetStage.BEGINNING and due:
            task, words = due[0][0], self._late_words()
            return self._fail(task, DeadlineExceededError(f"{task} {words}"), now)
        orders: list[FleetOrder] = []
        for task, known in due:
            if known.phase is TaskPhase.WAITING:
                orders.append(self._start(task, now))
            else:
                orders += self._late(task, known, now)
        return orders

    def stop(self, now: float) -> list[FleetOrder]:
        """Ends all tasks, in waves; again: nothing."""
        if self._stage in (FleetStage.ENDING, FleetStage.OVER):
            return []
        self._stage = FleetStage.ENDING
        for known in self._tasks.values():
            if known.phase is TaskPhase.WAITING:
                known.phase = TaskPhase.DOWN
        return self._advance(now)

    def _start(self, task: str, now: float) -> StartTask:
        known = self._tasks[task]
        known.phase, known.is_killed = TaskPhase.STARTING, False
        known.attempt += 1
        known.due = now + self._timeouts.start
        return StartTask(task, known.attempt, known.address)

    def _late_words(self) -> str:
        return f"was not ready in {self._timeouts.start:g} s"

    def _late(self, task: str, known: _TaskState, now: float) -> list[FleetOrder]:
        """A restart took too long: it is killed, and its end heard of as any other."""
        words = f"{task} {self._late_words()}"
        known.due = now + GONE
        if known.is_killed:  # and nobody told of its end
            known.phase = TaskPhase.DOWN
            return self._over_if_all_down([FleetNote(f"{words}: given up", task)])
        known.is_killed = True
        return [FleetNote(words, task), KillTask(task)]

    def _judge(
        self, task: str, known: _TaskState, end: End, now: float
    ) -> list[FleetOrder]:
        """Whether a task of a fleet that runs is started again."""
        # Nobody of ours: who stops a fleet has it in another stage.
        if end.code == 0:
            words = f"{task} {end.words}: somebody had it drain; not started again"
            return self._over_if_all_down([FleetNote(words, task, is_failure=False)])
        if end.mistake is not None:
            words = f"{end.words}; not started again: {end.mistake}"
            note = FleetNote(f"{task} {words}", task)
            return self._over_if_all_down([note])
        window, most = self._timeouts.window, self._timeouts.restarts
        known.failures.append(now)
        # The one just noted stops it.
        while known.failures[0] < now - window:
            known.failures.popleft()
        count = len(known.failures)
        if count > most:
            often = f"for the {_nth(count)} time in {window:g} s{_because(end)}"
            note = FleetNote(f"{task} {end.words} {often}; not started again", task)
            return self._over_if_all_down([note])
        pause = _pause(count)
        words = f"{task} {end.words}{_because(end)}"
        note = FleetNote(f"{words}; started again{_in(pause)}", task)
        if not pause:
            return [note, self._start(task, now)]
        known.phase, known.due = TaskPhase.WAITING, now + pause
        return [note]

    def _over_if_all_down(self, orders: list[FleetOrder]) -> list[FleetOrder]:
        if all(known.phase is TaskPhase.DOWN for known in self._tasks.values()):
            self._stage = FleetStage.OVER
            orders.append(FleetOver())
        return orders

    def _fail(self, task: str, error: ZstratError, now: float) -> list[FleetOrder]:
        """Nothing is worth a drain: nobody has used it."""
        self._stage, self._wave = FleetStage.ENDING, self._up(self._tasks)
        return self._over_if_all_down([BeginFailed(error, task), *self._kill(now)])

    def _up(self, tasks: Iterable[str]) -> list[str]:
        up = (TaskPhase.STARTING, TaskPhase.SERVING)
        return [task for task in tasks if self._tasks[task].phase in up]

    def _advance(self, now: float) -> list[FleetOrder]:
        """The next wave, if the one before has ended."""
        if self._up(self._wave):
            return []
        # Workers first: what they push on their way out still finds its servers.
        first = [task for task in self._tasks if not task.startswith("ps:")]
        self._wave = self._up(first) or self._up(self._tasks)
        self._deadline = now + self._timeouts.drain
        return self._over_if_all_down([DrainTask(task) for task in self._wave])

    def _press(self, now: float) -> list[FleetOrder]:
        """The wave is late: killed, or given up if that was done."""
        if now < self._deadline:
            return []
        deaf = [task for task in self._up(self._wave) if self._tasks[task].is_killed]
        for task in deaf:
            self._tasks[task].phase = TaskPhase.DOWN
        words = "was killed, and nobody says that it ended"
        notes: list[FleetOrder] = [FleetNote(f"{task} {words}", task) for task in deaf]
        return notes + self._kill(now) + self._advance(now)

    def _kill(self, now: float) -> list[FleetOrder]:
        self._deadline = now + GONE
        alive = [t for t in self._up(self._wave) if not self._tasks[t].is_killed]
        for task in alive:
            self._tasks[task].is_killed = True
        return [KillTask(task) for task in alive]


def _because(end: End) -> str:
    return f": {end.why}" if end.why else ""


def _pause(count: int) -> float:
    """Seconds before the restart after so many failures."""
    longer: float = FIRST_PAUSE * 2 ** min(count - 2, 30)
    return 0.0 if count == 1 else min(longer, LONGEST_PAUSE)


def _nth(count: int) -> str:
    return f"{count}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(count, 'th') }"


def _in(pause: float) -> str:
    return f" in {pause:g} s" if pause else ""
