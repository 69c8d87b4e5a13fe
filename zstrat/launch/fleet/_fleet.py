"""Carries out the decisions of `FleetState` on one thread.

The thread lives as long as the tasks: for the kernel, the end of the thread that
started a child is the death of its parent, for which the kernel kills the child.
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
from zstrat.launch._run_folder import RunFolder, RunKeys
from zstrat.launch._started_tasks import StartedTasks
from zstrat.streams import occupy_descriptors
from zstrat.threads import Promise, SteadyThread

from .state import (
    BeginFailed,
    DrainTask,
    FleetReady,
    FleetStage,
    FleetState,
    FleetTask,
    FleetTimeouts,
    KillTask,
    LogTask,
    StartTask,
    TaskEnd,
    TaskEvents,
    TaskLaunch,
    TaskPhase,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from zstrat.config import Settings

    from .state import Engine, FleetOrder, RunningTask

log = logging.getLogger("zstrat.launch")

Event = Callable[[float], "Iterable[FleetOrder]"]
"""An event: reports itself to the `FleetState` at a time, and returns the orders that
follow."""


@dataclasses.dataclass(frozen=True, slots=True)
class FleetPlan:
    """The tasks of a fleet, with their keys, variables and logs."""

    tasks: Mapping[str, FleetTask]
    keys: RunKeys
    env: Mapping[str, str]
    logs: Path | None
    launcher_timeout: float

    def launch(self, name: str, bind: str) -> TaskLaunch:
        task, log = self.tasks[name], self.log(name)
        on_host = [
            other
            for other in self.tasks.values()
            if (other.job, other.where) == (task.job, task.where)
        ]
        return TaskLaunch(
            task,
            bind,
            self.keys.of(task.job),
            self.env,
            len(on_host),
            on_host.index(task),
            log,
            # All attempts append to one file, so what was logged before is skipped.
            log.stat().st_size if log is not None and log.exists() else 0,
            self.launcher_timeout,
        )

    def log(self, name: str) -> Path | None:
        task = self.tasks[name]
        file = f"{task.job}-{task.index}.log"
        return None if self.logs is None else self.logs / file


class FleetThread:
    """The thread of a fleet, the only one that uses the state, the engine and its
    processes.

    ``ready`` is settled when all tasks serve, or fails if they cannot; ``over`` is
    settled when no task runs.
    """

    def __init__(
        self, engine: Engine, plan: FleetPlan, state: FleetState, kept: KeptLogs
    ) -> None:
        self.state, self.plan, self.kept = state, plan, kept
        self.ready: Promise[None] = Promise()
        self.over: Promise[None] = Promise()
        self.failed: set[str] = set()
        """Tasks that ended with an error that the fleet did not cause."""
        self._engine = engine
        self._running: dict[str, RunningTask] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        name = f"zstrat fleet by {engine.name}"
        self._thread = SteadyThread(self._work, name=name)

    def begin(self) -> None:
        self.put(self.state.begin)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queues an event for the thread. Never blocks; callable from any thread. The
        queue is bounded: each attempt has two events, and calls of the program wait for
        their effect."""
        self._events.put(event)

    def end(self) -> None:
        """Ends all tasks, then the thread, and waits for the end of the thread."""
        self.put(self.state.stop)
        self._thread.join()
        if self.over.is_there:  # otherwise Ctrl-C prevented the start of the thread
            self.over.get()

    def kill(self, task: str) -> None:
        # Past the state, for which the end of the task is then a failure like others.
        self.put(lambda now: [KillTask(task)])

    def _work(self) -> None:
        try:
            while self.state.stage is not FleetStage.OVER:
                now = time.monotonic()
                look = self.state.next_look()
                wait = None if look is None else max(0.0, look - now)
                # One event at a time, and its orders before the next one: the state may
                # rely on its orders being carried out.
                try:
                    event: Event = self._events.get(timeout=wait)
                except queue.Empty:
                    event = self.state.tick
                for order in event(time.monotonic()):
                    self._carry_out(order)
            self._engine.close()
        except BaseException as error:
            # Raised to the waiting threads: a defect of zstrat or of the engine.
            log.exception("internal error: killing all tasks of the fleet")
            for running in self._running.values():
                running.kill()
            # No waiter may hang because this thread is gone.
            for promise in (self.ready, self.over):
                if not promise.is_there:
                    promise.fail(error)
        else:
            self.over.settle(None)

    def _carry_out(self, order: FleetOrder) -> None:
        match order:
            case StartTask(task, attempt, bind):
                self._start(task, attempt, bind)
            case DrainTask(task):
                if task in self._running:
                    self._running[task].drain()
            case KillTask(task):
                if task in self._running:
                    self._running[task].kill()
            case LogTask(message, task, is_failure):
                # At the end their logs are kept, and others are not.
                if is_failure:
                    self.failed.add(task)
                log.warning("%s", message)
            case FleetReady():
                self.ready.settle(None)
            case BeginFailed(error, task):
                self.failed.add(task)
                self.ready.fail(error)
            case _:
                assert_never(order)

    def _start(self, task: str, attempt: int, bind: str) -> None:
        put, state = self.put, self.state
        # Callbacks run on threads of the engine. They only queue an event, so the state
        # needs no lock.
        events = TaskEvents(
            lambda address: put(lambda now: state.bound(task, attempt, address)),
            lambda end: put(lambda now: state.ended(task, attempt, end, now)),
        )
        try:
            launch = self.plan.launch(task, bind)
            self._running[task] = self._engine.start(launch, events)
        except (ZstratError, OSError, ValueError) as error:
            words = f"{task} cannot be started by {self._engine.name}: {error}"
            mistake = (
                error if isinstance(error, ZstratError) else UnavailableError(words)
            )
            # The process of the attempt before must not get the orders of this one.
            self._running.pop(task, None)
            events.ended(TaskEnd(f"could not be started: {error}", mistake=mistake))


class Fleet(StartedTasks[FleetTask]):
    """Parameter servers and workers on the machines of an engine.

    A context manager; without ``with`` the tasks end when the object is garbage
    collected, or when the program ends or is killed. A task that fails is restarted at
    its address, at most ``restarts`` times within ``window`` seconds.

    Args:
        engine: Starts the processes. The fleet closes it.
        tasks: The tasks and the host of each.
        env: Variables for the tasks.
        logs: "files" in the folder of the fleet, or "terminal".
        directory: Folder for keys and logs; afterwards it is kept without the keys.
            Default: a temporary folder of mode 0700. If a task fails, its log is moved
            out of the temporary folder, and a warning at the end names the path.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        UnavailableError: A task could not be started, or ended before it was ready;
            quotes its log and names the path of the log. All other tasks have ended.
        VersionMismatchError: A host has another version of zstrat, its protocol or
            Python.
        DeadlineExceededError: A task was not ready within ``timeouts.connect``.
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
        variables = {
            **daemon_variables(settings),
            # Several tasks may share a GPU, as on one machine.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **(env or {}),
        }
        # As of a `LocalCluster`: the task's own grace, and one for the process to exit.
        drain = times.drain + 2 * GRACE
        if variables.get("ZSTRAT_STATE"):  # a ps then saves its state
            drain += float(variables["ZSTRAT_HANDOVER"])
        timeouts = FleetTimeouts(times.connect, drain, restarts, window)
        state = FleetState([task.name for task in tasks], timeouts)
        folder = RunFolder(directory)
        self.directory = folder.path
        # New keys for each run: a daemon of an earlier run, cut off somewhere, cannot
        # connect to this one.
        keys = RunKeys(self.directory / "keys")
        self.settings = dataclasses.replace(settings, keys=keys.folder, insecure=False)
        """The settings with which a strategy connects to this fleet. A strategy that is
        made of this object uses them automatically."""
        self.engine = engine.name
        by_name = {task.name: task for task in tasks}
        plan = FleetPlan(
            by_name,
            keys,
            variables,
            self.directory if logs == "files" else None,
            times.launcher,
        )
        kept = KeptLogs(directory is None)
        self._thread = FleetThread(engine, plan, state, kept)
        # Logs in a folder of the user stay; keys go in any case.
        remove = self.directory if directory is None else keys.folder
        super().__init__(by_name, f"by {engine.name}", _end, self._thread, remove)
        self._begin(folder, keys)

    @property
    def resolver(self) -> FunctionClusterResolver:
        """A resolver for strategies, which also accept this object itself. After the
        fleet is closed it still returns the last addresses.

        Raises:
            ClosedError: The fleet is closed.
        """
        self._check_open()
        return FunctionClusterResolver(lambda: self.spec)

    @property
    def keys(self) -> Path:
        """The folder of the keys of this run, for ``ZSTRAT_KEYS`` of other programs."""
        return self.directory / "keys"

    @property
    def failures(self) -> tuple[str, ...]:
        """Tasks that failed at least once, also if they were restarted."""
        return tuple(sorted(self._thread.failed))

    def where(self, task: str) -> str:
        """Returns the host of ``task``, as the engine names it."""
        return self._task(task).where

    def is_running(self, task: str) -> bool:
        """Returns whether ``task`` serves, by the last report of the engine."""
        return self._thread.state.phase(self._task(task).name) is TaskPhase.SERVING

    def attempt(self, task: str) -> int:
        """Returns how often ``task`` was started."""
        return self._thread.state.attempt(self._task(task).name)

    def kill(self, task: str) -> None:
        """Kills ``task``; it is restarted as after a crash."""
        self._thread.kill(self._task(task).name)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all tasks have ended for good; returns False after ``timeout``
        seconds."""
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
            # Only after all have ended are the logs complete.
            self._thread.over.get()
            quotes = [self._quote(task) for task in sorted(self._thread.failed)]
            self.stop()
            words = "; ".join([str(error), *filter(None, quotes)])
            # A new error, as the words now include the logs. These two types ask for
            # something else than a look at the task: other versions, more time.
            kept = VersionMismatchError, DeadlineExceededError
            kind = type(error) if isinstance(error, kept) else UnavailableError
            raise kind(words) from None
        except BaseException:  # to the caller, who has no object to stop
            self.stop()
            raise

    def _quote(self, task: str) -> str:
        """Quotes the end of the log of a task, and keeps the log."""
        path = self._log_file(task)
        if path is None or not path.exists():
            return ""
        return quoted_end(self._thread.kept.keep(path))

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
                log.warning("%s: its log is kept: %s", task, thread.kept.keep(file))
        shutil.rmtree(remove, ignore_errors=True)
