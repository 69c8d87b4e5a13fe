"""The life of a daemon: start, report the address, serve, drain, exit.

Law: only this package handles signals, sets up logging, talks to the service manager
and chooses exit codes. The first SIGTERM, SIGINT or SIGHUP drains the accepted requests
within ``timeouts.drain``. A second SIGTERM or SIGINT kills the process; a second SIGHUP
is ignored, because a shell and its terminal may both send one. A daemon that was
started with SIGHUP ignored (``nohup``) keeps ignoring it; SIGUSR1 is always ignored.

Exit codes: 0 drained; 1 crashed; 2 invalid arguments, keys or address, so that a
restart does not help; 75 a restart may help: the daemon ended before all accepted
requests were done, or this machine does not have the address yet, or its name does not
resolve yet.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NoReturn

from zstrat.config import MISTAKEN, TRY_AGAIN, environment
from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    DeadlineExceededError,
    UnavailableError,
    ZstratError,
)
from zstrat.launch import (
    UNNUMBERED,
    JoinAddresses,
    ProcessOutput,
    Task,
    TaskAddress,
    WorkerJoin,
    kept_for_good,
)
from zstrat.memory import keep_freed_memory
from zstrat.signals import handle, handle_on
from zstrat.transport import new_incarnation
from zstrat.transport import run as run_loop
from zstrat.transport.health import register, serve_from_settings
from zstrat.wire import Job

from ._supervision import (
    Notifier,
    ParentWatch,
    die_with,
    is_running,
    name_children,
    start_logging,
    watch_process,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zstrat.config import Settings
    from zstrat.saving import SidecarEvaluator
    from zstrat.wire import PlainTree

DRAINED: Final = 0
CRASHED: Final = 1

DESCRIPTORS: Final = 65536
"""File descriptors that a daemon may open, as `LimitNOFILE` in the systemd units."""

log = logging.getLogger("zstrat.daemon")


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """The parsed arguments of a daemon.

    Args:
        join: The parameter servers to which a worker that no cluster spec lists reports
            itself; None: a cluster spec lists the task.
        parent: Process id; the daemon ends with that process. 0: none. With ``report``
            that process is the launcher, and the kernel kills the daemon; without
            ``report`` the daemon drains.
        report: File descriptor to which the daemon writes its address; -1: none.
        launcher_timeout: Seconds without a heartbeat of the launcher after which the
            daemon drains; 0: the launcher sends no heartbeats.
        keys_to_remove: Folder with the keys, removed once they are read; None: the keys
            stay where they are.
    """

    task: TaskAddress
    settings: Settings
    join: JoinAddresses | None = None
    parent: int = 0
    report: int = -1
    launcher_timeout: float = 0.0
    keys_to_remove: Path | None = None


def run(options: DaemonOptions) -> int:
    """Serves the task until a signal or its coordinator ends it; returns the exit
    code."""
    incarnation = new_incarnation()
    task = options.task
    start_logging(task.task, incarnation, as_json=options.settings.log_json)
    name_children(task.job)
    _raise_descriptor_limit()
    keep_freed_memory()
    ends_with_parent = die_with if options.report >= 0 else is_running

    def serve(notifier: Notifier) -> int:
        if options.parent and not ends_with_parent(options.parent):
            log.error("the parent process %d has already ended", options.parent)
            return CRASHED
        return run_loop(_serve(options, incarnation, notifier))

    # Everything that may end the daemon is in there: its keys are removed in any case.
    try:
        return _exit_code(serve, "served")
    finally:
        _remove(options.keys_to_remove)


def _exit_code(work: Callable[[Notifier], int], began: str) -> int:
    """Calls ``work`` with a notifier; returns its exit code, or that of its error.
    ``began``: what the daemon does, in the past tense."""
    notifier = Notifier(environment())
    try:
        return work(notifier)
    except KeyboardInterrupt:
        # Until the daemon serves, Python's own handler is in place.
        log.info("ended by SIGINT before it %s", began)
        return DRAINED
    except Exception:
        # Goes to the log and, as the exit code, to the service manager.
        log.exception("crashed")
        return CRASHED
    finally:
        notifier.close()


class EvaluatorHealth:
    """The answers of an evaluator over HTTP: always ready, without statistics."""

    def readiness(self) -> str:
        return ""

    def statistics(self) -> dict[str, PlainTree]:
        return {}


def run_evaluator(
    task: str, make: Callable[[], SidecarEvaluator], settings: Settings
) -> int:
    """Runs an evaluator until it is done or a signal ends it; returns the exit code.

    Calls ``make`` once logging is set up. A ValueError from it means that the arguments
    of the daemon are wrong: exit code 2.
    """
    start_logging(task, new_incarnation(), as_json=settings.log_json)
    name_children(task)
    # Separate from the errors of the user's code: an OSError there is a crash, one
    # about the HTTP port a wrong setting.
    try:
        serve_from_settings(settings)
    except (ValueError, OSError) as error:
        log.error("cannot start: %s", error)
        return TRY_AGAIN if _may_pass(error) else MISTAKEN

    def evaluate(notifier: Notifier) -> int:
        try:
            with kept_for_good():
                evaluator = make()
            return run_loop(_accompany(task, evaluator, notifier))
        except ValueError as error:
            log.error("cannot start: %s", error)
            return MISTAKEN

    return _exit_code(evaluate, "began")


def leave(code: int) -> NoReturn:
    """Exits the process, even while user code still runs on another thread."""
    # A daemon thread that is inside XLA when the interpreter shuts down may abort the
    # process, which changes the exit code.
    # `os._exit` flushes nothing.
    logging.shutdown()
    sys.stdout.flush()
    others = set(threading.enumerate()) - {threading.current_thread()}
    # With TRY_AGAIN a request did not end in time, and its thread may still run; a
    # thread that is not a daemon would be waited for.
    if code == TRY_AGAIN or any(not thread.daemon for thread in others):
        os._exit(code)
    sys.exit(code)


async def _accompany(task: str, evaluator: SidecarEvaluator, notifier: Notifier) -> int:
    loop = asyncio.get_running_loop()
    health = EvaluatorHealth()
    register(health, task, loop)

    def end(reason: str) -> None:
        log.info("ending: %s", reason)
        notifier.send("STOPPING=1", f"STATUS=ending: {reason}")
        evaluator.stop()

    # Not the main thread, which runs the loop: signals and the watchdog are answered
    # while the evaluator computes.
    with ThreadPoolExecutor(1, "evaluator") as thread:
        working = loop.run_in_executor(thread, evaluator.start)
        _listen_to_signals(loop, end)
        log.info("ready, pid %d", os.getpid())
        notifier.send("READY=1", "STATUS=working")
        heartbeat = ManagerHeartbeat(loop, evaluator, notifier)
        try:
            await working
        except Exception:
            # Goes to the log and the exit code; `run_evaluator` must not see it,
            # because it takes a ValueError for wrong arguments.
            log.exception("crashed")
            return CRASHED
        finally:
            heartbeat.stop()
            _ignore_signals(loop)
    log.info("ended: %s", evaluator.summary())
    return DRAINED


async def _serve(options: DaemonOptions, incarnation: int, notifier: Notifier) -> int:
    loop = asyncio.get_running_loop()
    has_given_index = options.task.index != UNNUMBERED
    try:
        options, join = await _with_index(options, incarnation)
        # A worker imports jax here.
        with kept_for_good():
            task = _make_task(options, incarnation)
        # Read by now, and the sooner they are gone the better.
        _remove(options.keys_to_remove)
        await task.start()
    except (ZstratError, OSError, ValueError) as error:
        log.error("cannot start: %s", error)
        return TRY_AGAIN if _may_pass(error) else MISTAKEN
    watch: ParentWatch | None = None
    # Before the address is reported: the launcher may send a signal from then on.
    _listen_to_signals(loop, task.end)
    if options.parent and options.report >= 0:
        watch = ParentWatch(loop, task.end, options.launcher_timeout)
    elif options.parent:
        watch_process(loop, options.parent, task.end)
    _report_address(options.report, task)
    log.info("ready at %s, pid %d", task.address, os.getpid())
    notifier.send("READY=1", f"STATUS=serving at {task.address}")
    heartbeat = ManagerHeartbeat(loop, task, notifier)
    # After the daemon serves, as the program connects to it at once.
    reporter = None if join is None else JoinReporter(join, task)
    reason = await task.wait_end()
    log.info("ending: %s", reason)
    notifier.send("STOPPING=1", f"STATUS=ending: {reason}")
    # Before the drain, so that no further program gets this worker.
    if reporter is not None:
        await reporter.stop()
    drained = await task.stop()
    # The manager's watchdog covers the drain as well.
    heartbeat.stop()
    _ignore_signals(loop)
    log.info("ended" if drained else "ended before all accepted requests were done")
    if reporter is not None and (refusal := reporter.error) is not None:
        # The index that an earlier program assigned may be taken in this one; after a
        # restart the worker asks for a free index.
        gets_another = isinstance(refusal, AlreadyExistsError) and not has_given_index
        return TRY_AGAIN if gets_another or _may_pass(refusal) else MISTAKEN
    # The launcher may only be cut off: it may come back and need this task.
    if watch is not None and watch.is_late:
        return TRY_AGAIN
    return DRAINED if drained else TRY_AGAIN


async def _with_index(
    options: DaemonOptions, incarnation: int
) -> tuple[DaemonOptions, WorkerJoin | None]:
    """Gets a task index for a worker that joins a session (``options.join``) without
    one. Returns the options with that index, and the `WorkerJoin`, None for a task
    that joins no session."""
    if options.join is None:
        return options, None
    join = WorkerJoin(options.join, options.settings, incarnation)
    if options.task.index != UNNUMBERED:
        return options, join
    task = replace(options.task, index=await join.number())
    # Again: its lines begin with the name of the task.
    start_logging(task.task, incarnation, as_json=options.settings.log_json)
    return replace(options, task=task), join


class JoinReporter:
    """Reports a worker to the program that it joins, while the worker serves. ``error``
    is why that program refused the worker, None otherwise."""

    def __init__(self, join: WorkerJoin, task: Task) -> None:
        assert task.worker is not None, "a ps has no --join"
        self.error: Exception | None = None
        self._task = task
        self._reports = asyncio.get_running_loop().create_task(
            join.stay(task.place.index, task.worker), name="reporting the worker"
        )
        self._reports.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Stops reporting the worker to the program that it wants to join; returns when
        no report is under way."""
        self._reports.cancel()
        await asyncio.wait([self._reports])

    def _ended(self, reports: asyncio.Task[None]) -> None:
        if not reports.cancelled() and (error := reports.exception()) is not None:
            assert isinstance(error, Exception), error
            self.error = error
            self._task.end(f"no program accepts this worker: {error}")


def _make_task(options: DaemonOptions, incarnation: int) -> Task:
    task, listen = options.task, None
    if task.job == Job.WORKER and options.settings.output == "program":
        output = ProcessOutput()
        output.install()
        listen = output.listen
    return Task(task, options.settings, incarnation, is_alone=True, listen=listen)


class ManagerHeartbeat:
    """Sends WATCHDOG=1 and a STATUS line to the service manager from the event loop.

    A loop that hangs sends nothing, and the manager restarts the daemon.
    """

    interval: Final = 5.0
    """Seconds between two STATUS lines if the manager sets no watchdog interval."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        task: Task | SidecarEvaluator,
        notifier: Notifier,
    ) -> None:
        self._loop, self._task, self._notifier = loop, task, notifier
        self._timer: asyncio.TimerHandle | None = None
        if notifier.is_connected:
            self._beat()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        # From the loop, not from a thread: a thread would also report a loop that
        # hangs.
        self._notifier.send("WATCHDOG=1", f"STATUS={self._task.summary()}")
        self._timer = self._loop.call_later(
            self._notifier.watchdog or self.interval, self._beat
        )


def _remove(keys: Path | None) -> None:
    if keys is not None:
        shutil.rmtree(keys, ignore_errors=True)


def _may_pass(error: Exception) -> bool:
    """Returns whether a restart of the daemon may help: this machine may still get the
    address when its network comes up, or a program that accepts the worker may start.
    """
    if isinstance(error, DeadlineExceededError | UnavailableError | BusyError):
        return True
    return isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL


def _raise_descriptor_limit() -> None:
    """Raises the soft limit of open file descriptors to `DESCRIPTORS`: every peer takes
    one, and shells set the limit to 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, DESCRIPTORS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS), hard))


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _listen_to_signals(
    loop: asyncio.AbstractEventLoop, end: Callable[[str], None]
) -> None:
    signals: tuple[signal.Signals, ...] = _SIGNALS
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started with nohup
        signals = tuple(each for each in signals if each != signal.SIGHUP)

    def first(number: signal.Signals) -> None:
        # The next signal has its effect at once, even if the loop hangs in the drain.
        for each in signals:
            loop.remove_signal_handler(each)
            again = each != signal.SIGHUP
            handle(each, signal.SIG_DFL if again else signal.SIG_IGN)
        end(f"{number.name} (once more ends at once)")

    for each in signals:
        handle_on(loop, each, first, each)
    # Slurm and Kubernetes send it to all tasks before they end a job, as a request to
    # the program to save a checkpoint. Processes that a step forks ignore it, too.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Ignores further signals while the daemon exits, so that a late one does not
    change the exit code."""
    for each in _SIGNALS:
        loop.remove_signal_handler(each)
        handle(each, signal.SIG_IGN)


def _report_address(descriptor: int, task: Task) -> None:
    if descriptor < 0:
        return
    line = {"address": task.address, "incarnation": task.hello.incarnation}
    # Closed as well: the launcher reads to a line end, and the pipe has no other use.
    with os.fdopen(descriptor, "w") as out:
        out.write(json.dumps(line) + "\n")
