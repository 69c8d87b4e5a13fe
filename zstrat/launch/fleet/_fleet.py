"""Carries out what a fleet decides: one thread that hears engines and obeys orders.

The thread lives as long as the tasks: the kernel takes the end of the thread that
started a child for the death of its parent, and ends the child.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, assert_never

from zstrat.cluster import FunctionClusterResolver
from zstrat.config import GRACE, daemon_variables, environment, settings_from
from zstrat.errors import (
    DeadlineExceededError,
    UnavailableError,
    VersionMismatchError,
    ZstratError,
)
from zstrat.launch._child import KeptLogs, quoted_end
from zstrat.launch._runtime_dir import RunFolder
from zstrat.launch._started_tasks import StartedTasks
from zstrat.streams import occupy_descriptors
from zstrat.threads import Promise, SteadyThread

from ._engine import End, FleetTask, TaskLaunch
from ._keys import RunKeys
from .state import (
    BeginFailed,
    DrainTask,
    FleetNote,
    FleetOver,
    FleetReady,
    FleetStage,
    FleetState,
    FleetTimeouts,
    KillTask,
    StartTask,
    TaskPhase,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from zstrat.config import Settings

    from ._engine import Engine, RunningTask
    from .state import FleetOrder

log = logging.getLogger("zstrat.launch")

Say = Callable[[float], "Iterable[FleetOrder]"]
"""What happened, told to the state with the time; returns its orders."""


class _Heard:
    """Tells the fleet of one attempt of one task."""

    def __init__(self, thread: FleetThread, task: str, attempt: int) -> None:
        self._thread, self._task, self._attempt = thread, task, attempt

    def bound(self, address: str) -> None:
        state = self._thread.state
        self._thread.say(lambda now: state.bound(self._task, self._attempt, address))

    def ended(self, end: End) -> None:
        state = self._thread.state
        self._thread.say(lambda now: state.ended(self._task, self._attempt, end, now))


@dataclasses.dataclass(frozen=True, slots=True)
class FleetPlan:
    """All that the tasks of a fleet are started with."""

    tasks: Mapping[str, FleetTask]
    keys: RunKeys
    env: Mapping[str, str]
    logs: Path | None
    launcher_timeout: float

    def launch(self, name: str, bind: str) -> TaskLaunch:
        task, log = self.tasks[name], self.log(name)
        beside = [
            each
            for each in self.tasks.values()
            if (each.job, each.where) == (task.job, task.where)
        ]
        return TaskLaunch(
            task,
            bind,
            self.keys.of(task.job),
            self.env,
            len(beside),
            beside.index(task),
            log,
            log.stat().st_size if log is not None and log.exists() else 0,
            self.launcher_timeout,
        )

    def log(self, name: str) -> Path | None:
        task = self.tasks[name]
        file = f"{task.job}-{task.index}.log"
        return None if self.logs is None else self.logs / file


class FleetThread:
    """The thread of a fleet: it alone touches the state, the engine and its processes.

    ``ready`` is done when all tasks serve, or fails with why they do not; ``over`` when
    nothing runs any more.
    """

    def __init__(
        self, engine: Engine, plan: FleetPlan, state: FleetState, kept: KeptLogs
    ) -> None:
        self.state, self.plan, self.kept = state, plan, kept
        self.ready: Promise[None] = Promise()
        self.over: Promise[None] = Promise()
        self.failed: set[str] = set()
        """Tasks that ended with an error of their own."""
        self._engine = engine
        self._running: dict[str, RunningTask] = {}
        self._said: queue.SimpleQueue[Say] = queue.SimpleQueue()
        # A daemon thread: the interpreter must not wait for it before it runs the
        # exit handlers, which end the tasks in an orderly way.
        name = f"zstrat fleet by {engine.name}"
        self._thread = SteadyThread(self._work, name=name)

    def begin(self) -> None:
        self.say(self.state.begin)
        self._thread.start()

    def say(self, say: Say) -> None:
        """From any thread; never blocks. Bounded: a task says two things, and what the
        program asks for waits to be done."""
        self._said.put(say)

    def end(self) -> None:
        """Ends all tasks and then the thread; returns when that is done."""
        self.say(self.state.stop)
        self._thread.join()
        if self.over.is_there:  # else Ctrl-C kept it from beginning
            self.over.get()

    def kill(self, task: str) -> None:
        def now_kill(now: float) -> Iterable[FleetOrder]:
            return [KillTask(task)]

        self.say(now_kill)

    def _work(self) -> None:
        try:
            while self.state.stage is not FleetStage.OVER:
                now = time.monotonic()
                look = self.state.next_look()
                wait = None if look is None else max(0.0, look - now)
                try:
                    say: Say = self._said.get(timeout=wait)
                except queue.Empty:
                    say = self.state.tick
                for order in say(time.monotonic()):
                    self._obey(order)
            self._engine.close()
        except BaseException as error:
            # To whoever waits: a defect of zstrat, or of the engine.
            log.exception("the fleet ends: a defect")
            for running in self._running.values():
                running.kill()
            for waited in (self.ready, self.over):
                if not waited.is_there:
                    waited.fail(error)
        else:
            self.over.settle(None)

    def _obey(self, order: FleetOrder) -> None:
        match order:
            case StartTask(task, attempt, bind):
                self._start(task, attempt, bind)
            case DrainTask(task):
                if task in self._running:
                    self._running[task].drain()
            case KillTask(task):
                if task in self._running:
                    self._running[task].kill()
            case FleetNote(words, task, is_failure):
                if is_failure:
                    self.failed.add(task)
                log.warning("%s", words)
            case FleetReady():
                self.ready.settle(None)
            case BeginFailed(error, task):
                self.failed.add(task)
                self.ready.fail(error)
            case FleetOver():
                pass  # the loop sees it
            case _:
                assert_never(order)

    def _start(self, task: str, attempt: int, bind: str) -> None:
        hear = _Heard(self, task, attempt)
        try:
            launch = self.plan.launch(task, bind)
            self._running[task] = self._engine.start(launch, hear)
        except (ZstratError, OSError, ValueError) as error:
            words = f"{task} cannot be started by {self._engine.name}: {error}"
            mistake = (
                error if isinstance(error, ZstratError) else UnavailableError(words)
            )
            self._running.pop(task, None)
            hear.ended(End(f"could not be started: {error}", mistake=mistake))


class Fleet(StartedTasks[FleetTask]):
    """Parameter servers and workers on the machines of an engine.

    A context manager; without ``with`` the tasks end when the object is collected or
    the program ends, however it ends. A task that ends by itself is started again at
    its address, ``restarts`` times at most within ``window`` seconds.

    Args:
        engine: What starts processes. The fleet closes it.
        tasks: Which tasks there are, and where each is to run.
        env: Variables for the tasks.
        logs: "files" in the folder of the fleet, or "terminal".
        directory: Folder for keys and logs, kept afterwards without the keys; default:
            a new one of mode 0700 that is removed at the end. The log of a task that
            ended with an error is kept elsewhere, and a warning at the end says where.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        UnavailableError: A task could not be started, or ended before it was ready;
            quotes the end of its log, and says where it is kept. All others have ended.
        VersionMismatchError: There is another zstrat, protocol or Python.
        DeadlineExceededError: A task was not ready in ``timeouts.connect``.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Sequence[FleetTask],
        *,
        restarts: int = 5,
        window: float = 600.0,
        env: Mapping[str, str] | None = None,
        logs: Literal["files", "terminal"] = "files",
        directory: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        if logs not in ("files", "terminal"):
            raise ValueError(f"logs={logs!r}: expected 'files' or 'terminal'")
        occupy_descriptors()
        settings = settings or settings_from(environment())
        times = settings.timeouts
        told = {
            **daemon_variables(settings),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **(env or {}),
        }
        drain = times.drain + 2 * GRACE
        if told.get("ZSTRAT_STATE"):  # and then it writes what it holds
            drain += float(told["ZSTRAT_HANDOVER"])
        timeouts = FleetTimeouts(times.connect, drain, restarts, window)
        state = FleetState([task.name for task in tasks], timeouts)
        folder = RunFolder(directory)
        self.directory = folder.path
        keys = RunKeys(self.directory / "keys")
        self.settings = dataclasses.replace(settings, keys=keys.folder, insecure=False)
        """What a strategy is given to be let in; it takes them by itself if it is given
        this object."""
        self.engine = engine.name
        by_name = {task.name: task for task in tasks}
        plan = FleetPlan(
            by_name,
            keys,
            told,
            self.directory if logs == "files" else None,
            times.launcher,
        )
        kept = KeptLogs(directory is None)
        self._thread = FleetThread(engine, plan, state, kept)
        remove = self.directory if directory is None else keys.folder
        super().__init__(by_name, f"by {engine.name}", _end, self._thread, remove)
        self._begin(folder, keys)

    @property
    def resolver(self) -> FunctionClusterResolver:
        """What a strategy is given to reach this fleet, if not the object itself.

        Of a fleet that is closed later it goes on to tell where the tasks were.

        Raises:
            ClosedError: The fleet was closed.
        """
        self._check_open()
        return FunctionClusterResolver(lambda: self.spec)

    @property
    def keys(self) -> Path:
        """The folder of the keys of this run, for ``ZSTRAT_KEYS`` of other programs."""
        return self.directory / "keys"

    @property
    def failures(self) -> tuple[str, ...]:
        """Tasks that ended by themselves with an error, whatever became of them."""
        return tuple(sorted(self._thread.failed))

    def where(self, task: str) -> str:
        """The host of ``task``, as the engine calls it."""
        return self._task(task).where

    def is_running(self, task: str) -> bool:
        """Whether it serves, as far as is known here."""
        return self._thread.state.phase(self._task(task).name) is TaskPhase.SERVING

    def attempt(self, task: str) -> int:
        """How often ``task`` was started."""
        return self._thread.state.attempt(self._task(task).name)

    def kill(self, task: str) -> None:
        """Ends ``task`` as a power cut does; it is started again as after one."""
        self._thread.kill(self._task(task).name)

    def wait(self, timeout: float | None = None) -> bool:
        """Until all tasks have ended for good; false if that takes longer."""
        if not self._thread.over.wait(timeout):
            return False
        self._thread.over.get()
        return True

    def _begin(self, folder: RunFolder, keys: RunKeys) -> None:
        try:
            folder.make()
            keys.make()
            self._thread.begin()
            self._thread.ready.get()
        except ZstratError as error:
            self._thread.over.get()
            quotes = [self._quote(task) for task in sorted(self._thread.failed)]
            self.stop()
            words = "; ".join([str(error), *filter(None, quotes)])
            plain = VersionMismatchError, DeadlineExceededError
            kind = type(error) if isinstance(error, plain) else UnavailableError
            raise kind(words) from None
        except BaseException:  # to the caller, who has no fleet that he could stop
            self.stop()
            raise

    def _quote(self, task: str) -> str:
        """The end of its log, which is kept."""
        path = self._log_file(task)
        if path is None or not path.exists():
            return ""
        return quoted_end(self._thread.kept.take(path))

    def _address(self, task: str) -> str:
        return self._thread.state.address(task)

    def _log_file(self, task: str) -> Path | None:
        return self._thread.plan.log(self._task(task).name)


def _end(thread: FleetThread, remove: Path) -> None:
    try:
        thread.end()
    finally:
        for task in sorted(thread.failed):
            file = thread.plan.log(task)
            if file is not None and file.exists():
                log.warning("%s: its log is kept: %s", task, thread.kept.take(file))
        shutil.rmtree(remove, ignore_errors=True)
