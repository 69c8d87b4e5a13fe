"""The life of a daemon: start, say so, serve, drain, exit code.

Law: only this package knows signals, logging set-up, the service manager and exit
codes; what a worker prints is heard by its session, too (`ProcessOutput`). The first
SIGTERM, SIGINT or SIGHUP drains what was accepted, within ``timeouts.drain``; a second
one ends the process at once, as the kernel does it, but for SIGHUP, which a shell and
its terminal may both send. Where SIGHUP is ignored from the start (``nohup``), it is;
SIGUSR1 always is.

Exit codes: 0 drained; 1 crashed; 2 told something that cannot be (arguments, keys,
address), trying again will not help; 75 trying again may help: ended before all that
was accepted was done, or this machine does not have the address (yet), or nobody knows
its name (yet).
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
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

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
    JoinPlace,
    ProcessOutput,
    Task,
    TaskPlace,
    WorkerJoin,
    kept_for_good,
)
from zstrat.signals import handle, handle_on
from zstrat.transport import new_incarnation
from zstrat.transport import run as run_loop
from zstrat.transport.health import register, serve_from_settings
from zstrat.wire import Job

from ._log import start_logging
from ._notify import Notifier
from ._parent_watch import ParentWatch, die_with, is_there, watch_process
from ._process_name import name_children

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zstrat.config import Settings
    from zstrat.wire import PlainTree

DRAINED: Final = 0
CRASHED: Final = 1

DESCRIPTORS: Final = 65536
"""As `LimitNOFILE` of the systemd units."""

log = logging.getLogger("zstrat.daemon")


@dataclass(frozen=True, slots=True)
class Order:
    """All that the arguments of a daemon say.

    ``parent`` is the process that it must not outlive, 0 for none; ``report`` is the
    descriptor that the bound address is written to, -1 for none. With a report the
    parent is the program that started it, and the daemon is killed with it; else any
    process, and the daemon drains. ``passing``: a folder with the keys, which is
    removed when they are read; None: they are where they stay. ``leash``: seconds for
    which the program that started it may say nothing, 0 if it never says anything.
    ``join``: where a worker reports itself that is in no program's cluster.
    """

    place: TaskPlace
    settings: Settings
    join: JoinPlace | None = None
    parent: int = 0
    report: int = -1
    leash: float = 0.0
    passing: Path | None = None


def run(order: Order) -> int:
    """Serves the task of the order until it is told to end; returns the exit code."""
    incarnation = new_incarnation()
    start_logging(order.place.task, incarnation, as_json=order.settings.log_json)
    name_children(order.place.job)
    tie = die_with if order.report >= 0 else is_there
    if order.parent and not tie(order.parent):
        log.error("the process %d, which started me, is gone already", order.parent)
        return CRASHED
    _take_descriptors()
    notifier = Notifier(environment())
    try:
        return run_loop(_live(order, incarnation, notifier))
    except Exception:
        # Goes to the log and, as the exit code, to whoever restarts us.
        log.exception("crashed")
        return CRASHED
    finally:
        notifier.close()
        _forget(order.passing)


class Program(Protocol):
    """What a daemon without an address does, on a thread of its own."""

    def start(self) -> None:
        """Works until it is done, or until `stop`."""
        ...

    def stop(self) -> None:
        """Has `start` end soon; from any thread."""
        ...

    def summary(self) -> str:
        """How far it is, in a few words."""
        ...


@dataclass(frozen=True)
class Accompanied:
    """A program as others see it who ask over HTTP: it works, and counts nothing."""

    program: Program

    def readiness(self) -> str:
        return ""

    def statistics(self) -> dict[str, PlainTree]:
        return {}


def run_program(task: str, make: Callable[[], Program], settings: Settings) -> int:
    """Runs a program until it is done or told to end; returns the exit code.

    ``make`` is called when the log is there. What it raises as ValueError is a mistake
    of whoever started the daemon.
    """
    start_logging(task, new_incarnation(), as_json=settings.log_json)
    name_children(task)
    notifier = Notifier(environment())
    try:
        serve_from_settings(settings)
    except (ValueError, OSError) as error:
        log.error("cannot start: %s", error)
        return TRY_AGAIN if _may_pass(error) else MISTAKEN
    try:
        with kept_for_good():
            program = make()
        return run_loop(_accompany(task, program, notifier))
    except ValueError as error:
        log.error("cannot start: %s", error)
        return MISTAKEN
    except Exception:
        # Goes to the log and, as the exit code, to whoever restarts us.
        log.exception("crashed")
        return CRASHED
    finally:
        notifier.close()


def leave(code: int) -> NoReturn:
    """Ends the process, even if user code still holds a thread."""
    # A daemon thread that is inside XLA when the interpreter ends may abort the
    # process, and the exit code would be another one.
    logging.shutdown()
    sys.stdout.flush()
    others = set(threading.enumerate()) - {threading.current_thread()}
    if code == TRY_AGAIN or any(not thread.daemon for thread in others):
        os._exit(code)
    sys.exit(code)


async def _accompany(task: str, program: Program, notifier: Notifier) -> int:
    loop = asyncio.get_running_loop()
    watched = Accompanied(program)
    register(watched, task, loop)

    def end(reason: str) -> None:
        log.info("ending: %s", reason)
        notifier.send("STOPPING=1", f"STATUS=ending: {reason}")
        program.stop()

    with ThreadPoolExecutor(1, "program") as thread:
        working = loop.run_in_executor(thread, program.start)
        _listen_to_signals(loop, end)
        log.info("ready, pid %d", os.getpid())
        notifier.send("READY=1", "STATUS=working")
        pulse = Pulse(loop, program, notifier)
        try:
            await working
        except Exception:
            # Goes to the log and the exit code. Not to `run_program`, for which a
            # ValueError is something else.
            log.exception("crashed")
            return CRASHED
        finally:
            pulse.stop()
            _ignore_signals(loop)
    log.info("ended: %s", program.summary())
    return DRAINED


async def _live(order: Order, incarnation: int, notifier: Notifier) -> int:
    loop, is_told = asyncio.get_running_loop(), order.place.index != UNNUMBERED
    try:
        order, join = await _numbered(order, incarnation)
        with kept_for_good():
            task = _task(order, incarnation)
        _forget(order.passing)
        await task.start()
    except (ZstratError, OSError, ValueError) as error:
        log.error("cannot start: %s", error)
        return TRY_AGAIN if _may_pass(error) else MISTAKEN
    watch: ParentWatch | None = None
    _listen_to_signals(loop, task.end)
    if order.parent and order.report >= 0:
        watch = ParentWatch(loop, task.end, order.leash)
    elif order.parent:
        watch_process(loop, order.parent, task.end)
    _report(order.report, task)
    log.info("ready at %s, pid %d", task.address, os.getpid())
    notifier.send("READY=1", f"STATUS=serving at {task.address}")
    pulse = Pulse(loop, task, notifier)
    joining = None if join is None else JoiningTask(join, task)
    reason = await task.wait_end()
    log.info("ending: %s", reason)
    notifier.send("STOPPING=1", f"STATUS=ending: {reason}")
    if joining is not None:
        await joining.stop()
    drained = await task.stop()
    pulse.stop()
    _ignore_signals(loop)
    log.info("ended" if drained else "ended before everything was done")
    if joining is not None and (refusal := joining.error) is not None:
        # A number of another program may be somebody else's by now: there are more.
        gets_another = isinstance(refusal, AlreadyExistsError) and not is_told
        return TRY_AGAIN if gets_another or _may_pass(refusal) else MISTAKEN
    if watch is not None and watch.is_late:
        return TRY_AGAIN  # it may be there again, and wants us then
    return DRAINED if drained else TRY_AGAIN


async def _numbered(order: Order, incarnation: int) -> tuple[Order, WorkerJoin | None]:
    """A worker that no cluster names is told its number."""
    if order.join is None:
        return order, None
    join = WorkerJoin(order.join, order.settings, incarnation)
    if order.place.index != UNNUMBERED:
        return order, join
    place = replace(order.place, index=await join.number())
    start_logging(place.task, incarnation, as_json=order.settings.log_json)
    return replace(order, place=place), join


class JoiningTask:
    """Reports a worker for as long as it serves. ``error``: why it ended for that."""

    def __init__(self, join: WorkerJoin, task: Task) -> None:
        assert task.worker is not None, "a ps has no --join"
        self.error: Exception | None = None
        self._task = task
        self._staying = asyncio.get_running_loop().create_task(
            join.stay(task.place.index, task.worker), name="reporting the worker"
        )
        self._staying.add_done_callback(self._ended)

    async def stop(self) -> None:
        """It is reported no more."""
        self._staying.cancel()
        await asyncio.wait([self._staying])

    def _ended(self, staying: asyncio.Task[None]) -> None:
        if not staying.cancelled() and (error := staying.exception()) is not None:
            assert isinstance(error, Exception), error
            self.error = error
            self._task.end(f"no program takes it: {error}")


def _task(order: Order, incarnation: int) -> Task:
    """A worker imports jax here."""
    output = _output(order)
    listen = None if output is None else output.listen
    return Task(order.place, order.settings, incarnation, is_alone=True, listen=listen)


def _output(order: Order) -> ProcessOutput | None:
    """Of a worker, unless it is told to keep to its log."""
    if order.place.job != Job.WORKER or order.settings.output != "program":
        return None
    output = ProcessOutput()
    output.install()
    return output


class Pulse:
    """Tells the manager from the event loop itself that the loop turns, and how it is.

    A loop that hangs sends no WATCHDOG=1, and the manager restarts the daemon.
    """

    interval: Final = 5.0
    """Seconds between two STATUS lines when the manager keeps no watchdog."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        task: Task | Program,
        notifier: Notifier,
    ) -> None:
        self._loop, self._task, self._notifier = loop, task, notifier
        self._timer: asyncio.TimerHandle | None = None
        if notifier.is_heard:
            self._beat()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._notifier.send("WATCHDOG=1", f"STATUS={self._task.summary()}")
        self._timer = self._loop.call_later(
            self._notifier.watchdog or self.interval, self._beat
        )


def _forget(keys: Path | None) -> None:
    if keys is not None:
        shutil.rmtree(keys, ignore_errors=True)


def _may_pass(error: Exception) -> bool:
    """Whether it is an address that this machine may get yet: its network comes up; or
    a program may come that takes a worker."""
    if isinstance(error, DeadlineExceededError | UnavailableError | BusyError):
        return True
    return isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL


def _take_descriptors() -> None:
    """As many as the system gives: shells leave 1024, and every peer takes one."""
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
        for each in signals:
            loop.remove_signal_handler(each)
            again = each != signal.SIGHUP
            handle(each, signal.SIG_DFL if again else signal.SIG_IGN)
        end(f"{number.name} (once more ends at once)")

    for each in signals:
        handle_on(loop, each, first, each)
    # Engines send it to all tasks before they end a job; it is meant for the program,
    # which saves what is here. Processes that a step forks ignore it, too.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """All is done: a signal now must not turn the exit code into a failure."""
    for each in _SIGNALS:
        loop.remove_signal_handler(each)
        handle(each, signal.SIG_IGN)


def _report(descriptor: int, task: Task) -> None:
    if descriptor < 0:
        return
    line = {"address": task.address, "incarnation": task.hello.incarnation}
    with os.fdopen(descriptor, "w") as out:
        out.write(json.dumps(line) + "\n")
