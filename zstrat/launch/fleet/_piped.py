"""Engines whose processes are commands with standard streams: this machine, ssh, srun.

The command runs `zstrat.daemons.launched` and ends with it. The launcher talks to the
daemon over its standard input and output. Standard error is the log of the task, which
therefore also has the errors of the command itself, such as an unreachable host. A
thread writes an empty line to standard input now and then, as a heartbeat: the daemon
drains when standard input closes, or when no heartbeat arrives for long, as on a host
that is cut off from the network.

Engines with actors (Ray, Dask) make a `TaskHost` in an actor on the machine of the
task. The `TaskHost` starts the daemon as a separate process, independent of the
libraries that the process of the actor has loaded, and talks to it in the same way. The
daemon ends with the process of the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat.cluster import host_and_port
from zstrat.config import MISTAKEN
from zstrat.errors import UnavailableError, VersionMismatchError
from zstrat.launch._child import end_words, inherited_environment
from zstrat.launch._copies import WATCHING_PARENT
from zstrat.transport import hello

from .state import TaskEnd, TaskEvents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import IO

    from zstrat.errors import ZstratError

    from .state import FleetTask, RunningTask, TaskLaunch


T = TypeVar("T")

LONGEST_LINE: Final = 2**16
"""The most bytes of one line from the daemon, or of output of a shell before that
line."""

BEATS: Final = 10
"""Number of heartbeats to a daemon within the launcher's timeout."""


class Piped(ABC):
    """An engine of commands; a subclass builds the command line and knows the addresses
    of the hosts."""

    name: str

    @abstractmethod
    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        """Builds the command line that runs ``daemon`` on the host of the task."""

    @abstractmethod
    def host(self, task: FleetTask) -> str:
        """Returns the host in the address at which others reach the task."""

    @abstractmethod
    def python(self, task: FleetTask) -> str:
        """Returns the Python interpreter on the host of the task."""

    def env(self, task: FleetTask) -> Mapping[str, str]:
        """Returns variables for the task, with lower priority than those of the
        fleet."""
        return {}

    def why(self, launch: TaskLaunch, code: int, *, has_served: bool) -> str:
        """Returns what an exit code of the command means, with a remedy; "" if
        unknown."""
        return ""

    def turn(self, task: FleetTask) -> AbstractContextManager[object]:
        """Returns a lock to hold from the start of a command until it answers, for
        hosts that accept few new connections at a time."""
        return contextlib.nullcontext()

    @final
    def start(self, launch: TaskLaunch, events: TaskEvents) -> RunningTask:
        # The port of before, or the configured one; 0 lets the daemon's kernel choose.
        before = launch.bind or f":{launch.task.port}"
        bind = _bind(self.host(launch.task), before)
        # -P: modules in the working folder must not shadow those of the daemon.
        daemon = [self.python(launch.task), "-P", "-m", "zstrat.daemons.launched"]
        daemon += [launch.task.job, "--index", str(launch.task.index), "--bind", bind]
        daemon += ["--launcher-timeout", str(launch.launcher_timeout)]
        return _Conversation(self, launch, events, self.command(launch, daemon))

    @final
    def close(self) -> None:
        """Does nothing: the fleet has waited for every process."""
        return


@final
class _ThisHost(Piped):
    """Runs the daemon as a child process on this host."""

    name = "a child process"

    def __init__(self, host: str) -> None:
        self._host = host

    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        return list(daemon)

    def host(self, task: FleetTask) -> str:
        return self._host

    def python(self, task: FleetTask) -> str:
        return sys.executable


class TaskHost:
    """An actor that runs one daemon; the program calls its coroutines remotely.

    The daemon logs to standard error of the actor's process, which the engine collects.

    Args:
        host: The address at which other tasks reach this machine.
    """

    def __init__(self, launch: TaskLaunch, host: str) -> None:
        self._bound: Future[str] = Future()
        self._over: Future[TaskEnd] = Future()
        port = launch.bind.rpartition(":")[2]
        if launch.bind != host_and_port(host, port):
            port = "0"  # on another machine than before that port may be taken
        bind = launch.bind and host_and_port(host, port)
        here = dataclasses.replace(launch, log=None, bind=bind)
        # Last: its thread may call back at once.
        self._running = _ThisHost(host).start(here, TaskEvents(self.bound, self.ended))

    def bound(self, address: str) -> None:
        self._bound.set_result(address)

    def ended(self, end: TaskEnd) -> None:
        # Who waits for the address would wait without end.
        if not self._bound.done():
            self._bound.set_result("")
        self._over.set_result(end)

    async def address(self) -> str:
        """Waits for the address of the task; "" if the task ended before it served."""
        return await asyncio.wrap_future(self._bound)

    async def over(self) -> TaskEnd:
        """Waits for the end of the task, and describes that."""
        return await asyncio.wrap_future(self._over)

    async def drain(self) -> None:
        """Makes the task finish its accepted requests and end."""
        self._running.drain()

    async def kill(self) -> None:
        """Kills the task."""
        self._running.kill()


class _Conversation:
    """The process of one task, and the thread that starts the process and reads its
    answers. The thread lives until the process ends: for the kernel it is the
    parent."""

    def __init__(
        self, engine: Piped, launch: TaskLaunch, events: TaskEvents, command: list[str]
    ) -> None:
        self._engine, self._launch, self._events = engine, launch, events
        self._command = command
        self._lock = threading.Lock()
        """Guards ``_process`` and ``_is_ending``, which `drain` and `kill` use from
        other threads."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = self._has_served = False
        self._over = threading.Event()
        self._mistake: ZstratError | None = None
        # A daemon thread: at exit the interpreter must not wait for it, as only the
        # exit handlers end the process that it waits for.
        name = f"zstrat reads {launch.task.name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def drain(self) -> None:
        """Makes the daemon drain, by closing its standard input."""
        # Without a process yet, the flag keeps it from being started.
        with self._lock:
            self._is_ending = True
            if self._process is not None:
                _close_stdin(self._process)

    def kill(self) -> None:
        with self._lock:
            self._is_ending = True
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        try:
            end = self._run_process()
        except Exception as error:
            # Reported to the fleet, which needs an end in any case.
            mistake = self._unexpected_answer(error)
            end = TaskEnd(f"could not be started: {error}", mistake=mistake)
            self.kill()
        self._over.set()
        self._events.ended(end)

    def _run_process(self) -> TaskEnd:
        # The turn ends with the first answer, when the connection is authenticated.
        with self._engine.turn(self._launch.task):
            process = self._start_process()
            if process is None:
                return TaskEnd("was stopped before it was started")
            greeting = self._read_or_kill(lambda: _read_answer(process))
        if greeting is not None:
            self._read_or_kill(lambda: self._set_up(process, greeting))
        # To the end of the stream, which is the end of the process. What still comes is
        # thrown away: a full pipe would stop it.
        while _stream(process.stdout).read(LONGEST_LINE):
            pass
        return self._ended(process)

    def _read_or_kill(self, read: Callable[[], T]) -> T | None:
        """Calls ``read``, which reads an answer of the daemon; kills the process and
        returns None if the answer is invalid."""
        try:
            return read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._mistake = self._unexpected_answer(error)
            self.kill()
            return None

    def _start_process(self) -> subprocess.Popen[bytes] | None:
        with contextlib.ExitStack() as stack:
            log = None
            if self._launch.log is not None:
                log = stack.enter_context(self._launch.log.open("ab"))
            # So that `kill` either prevents the start or finds the process.
            stack.enter_context(self._lock)
            if not self._is_ending:
                self._process = subprocess.Popen(
                    [*WATCHING_PARENT, *self._command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=inherited_environment(),
                    # Ctrl-C in the terminal is for the program, which ends its tasks.
                    start_new_session=True,
                )
            return self._process

    def _set_up(
        self, process: subprocess.Popen[bytes], greeting: Mapping[str, object]
    ) -> None:
        """Checks the versions of the daemon, sends keys and variables to it, and waits
        for its address."""
        # Before the keys are sent: a daemon that is not used does not get them.
        self._mistake = _mismatch(self._where(), greeting)
        if self._mistake is not None:
            with self._lock:
                _close_stdin(process)
            return
        launch = self._launch
        env = {**self._engine.env(launch.task), **launch.env}
        setup = {"env": env, "keys": dict(launch.keys)}
        setup["host"] = {"tasks": str(launch.on_host), "rank": str(launch.rank)}
        with contextlib.suppress(BrokenPipeError):  # it ended, and its log says why
            _stream(process.stdin).write(json.dumps(setup).encode() + b"\n")
            _stream(process.stdin).flush()
            # From here on there are only heartbeats, for which nobody may wait, and
            # which hold the lock that `kill` needs.
            os.set_blocking(_stream(process.stdin).fileno(), False)
        name = f"zstrat heartbeat to {launch.task.name}"
        threading.Thread(target=self._send_heartbeats, name=name, daemon=True).start()
        # Meanwhile the daemon imports jax and binds; heartbeats collect in the pipe.
        report = _read_answer(process)
        if report is not None:
            self._has_served = True
            # It binds all interfaces, so only the port of its address is of use.
            port = str(report["address"]).rpartition(":")[2]
            self._events.bound(host_and_port(self._engine.host(launch.task), port))

    def _send_heartbeats(self) -> None:
        """Sends heartbeats until the process has ended or is ending. Runs on a separate
        thread, as the program may be busy."""
        assert self._process is not None
        stdin = _stream(self._process.stdin)
        while not self._over.wait(self._launch.launcher_timeout / BEATS):
            with self._lock:
                if stdin.closed:
                    return
                # A full pipe has thousands of unread heartbeats: no more are needed.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(stdin.fileno(), b"\n")

    def _ended(self, process: subprocess.Popen[bytes]) -> TaskEnd:
        code = process.wait()
        with self._lock:
            _close_stdin(process)
        _stream(process.stdout).close()
        words = f"on {self._where()} {end_words(code)}"
        why = ""
        if not self._is_ending:
            why = self._engine.why(self._launch, code, has_served=self._has_served)
        # With exit code 2 a restart would fail again. Not if the task has served
        # before: then its arguments are right, and its port, say, is taken just now.
        mistake = self._mistake
        if mistake is None and code == MISTAKEN and not self._launch.bind:
            mistake = UnavailableError(f"{self._launch.task.name} {words}")
        return TaskEnd(words, code, why, mistake)

    def _unexpected_answer(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._launch.task.name} on {self._where()}: expected the answer of a "
            f"zstrat daemon, got {error!r}"
        )

    def _where(self) -> str:
        return self._launch.task.where


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        _stream(process.stdin).close()


def _read_answer(process: subprocess.Popen[bytes]) -> dict[str, object] | None:
    """Reads the next line of JSON, past other output of a shell; None at the end."""
    # A login shell may print a greeting before.
    while line := _stream(process.stdout).readline(LONGEST_LINE):
        if line.startswith(b"{"):
            answer: dict[str, object] = json.loads(line)
            return answer
    return None


def _bind(host: str, before: str) -> str:
    """Returns the address that the daemon binds: all interfaces of the host, on which
    ``host`` may not be a local address or may mean loopback. Loopback stays loopback.
    ``before`` has the port."""
    port = before.rpartition(":")[2]
    with contextlib.suppress(ValueError):  # a name, not an IP address
        if ipaddress.ip_address(host).is_loopback:
            return host_and_port(host, port)
    return f"*:{port}"


def _mismatch(
    where: str, greeting: Mapping[str, object]
) -> VersionMismatchError | None:
    """Returns an error if the versions of the daemon do not fit this program."""
    here = hello("chief", 0, 1)
    there = greeting["versions"]
    if not isinstance(there, dict):
        raise TypeError(f"versions: {there!r:.80}")
    pairs = [("protocol", str(greeting["protocol"]), str(here.protocol))]
    pairs.append(("zstrat", there.get("zstrat", "none"), here.versions["zstrat"]))
    # Code of functions is sent as bytecode, which changes with minor versions.
    pythons = there.get("python", "none"), here.versions["python"]
    minors = [".".join(version.split(".")[:2]) for version in pythons]
    pairs.append(("Python", minors[0], minors[1]))
    wrong = [f"{what} {a} (here {b})" for what, a, b in pairs if a != b]
    if not wrong:
        return None
    return VersionMismatchError(
        f"{where} has {', '.join(wrong)}: install the same versions there, or set "
        "`python` to an interpreter that has them"
    )
