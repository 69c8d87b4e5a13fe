"""Engines whose processes are commands with standard streams: this machine, ssh, srun.

The command runs `zstrat.daemons.launched` somewhere, and ends when that does. Its
standard input and output are the conversation with the daemon (see there), its standard
error is the log of the task, into which the kernel writes it: what the command itself
has to say, that it cannot reach a host, say, is there, too. The conversation is the
heartbeat of the launcher: the daemon drains when its standard input ends, however we
end, and when it has heard nothing for long, as on a host that is cut off. So it is sent
an empty line now and then, by a thread of its own: we may be busy, or stopped for a
while.

Engines that have actors (Ray, Dask) make a `TaskHost` in the actor, which is on the
machine where the task is to be: it starts the daemon there as a process of its own,
with its own jax, and talks to it in the same way. So the daemon is a daemon as
anywhere, whatever the process of the engine has loaded, and ends with that process,
however it ends.
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
from zstrat.launch._child import end_words, inherited
from zstrat.launch._copies import WATCHING_PARENT
from zstrat.transport import hello

from ._engine import End

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import IO

    from zstrat.errors import ZstratError

    from ._engine import FleetTask, RunningTask, TaskEvents, TaskLaunch


T = TypeVar("T")

LONGEST_LINE: Final = 2**16
"""Bytes of one line of the conversation; what a shell prints before it is cut there."""

BEATS: Final = 10
"""So often a daemon hears of us in the time after which it takes us for gone."""


class Piped(ABC):
    """An engine of commands; a subclass says which command, and where others reach what
    it starts."""

    name: str

    @abstractmethod
    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        """The words that run ``daemon`` where the task is to be."""

    @abstractmethod
    def host(self, task: FleetTask) -> str:
        """The host of the address at which others reach the task."""

    @abstractmethod
    def python(self, task: FleetTask) -> str:
        """The interpreter there."""

    def env(self, task: FleetTask) -> Mapping[str, str]:
        """Variables that tasks find there, where the fleet has no others for them."""
        return {}

    def why(self, launch: TaskLaunch, code: int, *, has_served: bool) -> str:
        """What the exit code of the command says beyond its number, and what to do."""
        return ""

    def turn(self, task: FleetTask) -> AbstractContextManager[object]:
        """Held from the start of a command until it answers, for hosts that take few
        newcomers at a time."""
        return contextlib.nullcontext()

    @final
    def start(self, launch: TaskLaunch, hear: TaskEvents) -> RunningTask:
        before = launch.bind or f":{launch.task.port}"
        bind = _bind(self.host(launch.task), before)
        # -P: the folder in which it happens to run must not shadow modules.
        daemon = [self.python(launch.task), "-P", "-m", "zstrat.daemons.launched"]
        daemon += [launch.task.job, "--index", str(launch.task.index), "--bind", bind]
        daemon += ["--launcher-timeout", str(launch.launcher_timeout)]
        return _Conversation(self, launch, hear, self.command(launch, daemon))

    @final
    def close(self) -> None:
        """Nothing is left: every process was waited for."""
        return


@final
class _Beside(Piped):
    """Runs the command as it is, here."""

    name = "a process beside this one"

    def __init__(self, host: str) -> None:
        self._host = host

    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        return list(daemon)

    def host(self, task: FleetTask) -> str:
        return self._host

    def python(self, task: FleetTask) -> str:
        return sys.executable


class TaskHost:
    """Made in the process of the engine; its coroutines are called from the program.

    What the daemon logs goes where the errors of this process go: the engine has a
    place for these.

    Args:
        host: The address of this machine, as the other tasks reach it.
    """

    def __init__(self, launch: TaskLaunch, host: str) -> None:
        self._bound: Future[str] = Future()
        self._over: Future[End] = Future()
        port = launch.bind.rpartition(":")[2]
        if launch.bind != host_and_port(host, port):
            port = "0"  # of another machine, on which that one may be taken
        bind = launch.bind and host_and_port(host, port)
        here = dataclasses.replace(launch, log=None, bind=bind)
        self._running = _Beside(host).start(here, self)

    def bound(self, address: str) -> None:
        self._bound.set_result(address)

    def ended(self, end: End) -> None:
        if not self._bound.done():
            self._bound.set_result("")
        self._over.set_result(end)

    async def address(self) -> str:
        """Where the task serves, once it does; "" if it has ended before."""
        return await asyncio.wrap_future(self._bound)

    async def over(self) -> End:
        """How it ended, once it has."""
        return await asyncio.wrap_future(self._over)

    async def drain(self) -> None:
        """Has it end in an orderly way."""
        self._running.drain()

    async def kill(self) -> None:
        """Ends it now."""
        self._running.kill()


class _Conversation:
    """One process and the thread that starts it and listens to it, until it has ended:
    the kernel takes the end of that thread for the death of the parent."""

    def __init__(
        self, engine: Piped, launch: TaskLaunch, hear: TaskEvents, words: list[str]
    ) -> None:
        self._engine, self._launch, self._hear = engine, launch, hear
        self._words = words
        self._lock = threading.Lock()
        """Guards the next two, which other threads end it by."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = self._has_served = False
        self._over = threading.Event()
        self._mistake: ZstratError | None = None
        name = f"zstrat hears {launch.task.name}"
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def drain(self) -> None:
        """Tells the daemon to drain: its standard input ends."""
        with self._lock:
            self._is_ending = True
            if self._process is not None:
                _hang_up(self._process)

    def kill(self) -> None:
        with self._lock:
            self._is_ending = True
            if self._process is not None:
                self._process.kill()

    def _live(self) -> None:
        try:
            end = self._lived()
        except Exception as error:
            # To the fleet, which is told of an end in any case.
            mistake = self._misspoke(error)
            end = End(f"could not be started: {error}", mistake=mistake)
            self.kill()
        self._over.set()
        self._hear.ended(end)

    def _lived(self) -> End:
        with self._engine.turn(self._launch.task):
            process = self._started()
            if process is None:
                return End("was not started: it was told to end before")
            greeting = self._heard(lambda: _answer(process))
        if greeting is not None:
            self._heard(lambda: self._talk(process, greeting))
        while _stream(process.stdout).read(LONGEST_LINE):
            pass  # it has nothing more to say, but its end is heard so
        return self._ended(process)

    def _heard(self, hear: Callable[[], T]) -> T | None:
        """What was heard; None, and the end of the process, if it makes no sense."""
        try:
            return hear()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._mistake = self._misspoke(error)
            self.kill()
            return None

    def _started(self) -> subprocess.Popen[bytes] | None:
        with contextlib.ExitStack() as stack:
            log = None
            if self._launch.log is not None:
                log = stack.enter_context(self._launch.log.open("ab"))
            stack.enter_context(self._lock)
            if not self._is_ending:
                self._process = subprocess.Popen(
                    [*WATCHING_PARENT, *self._words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=inherited(),
                    # Ctrl-C at the terminal is for the program, which ends its tasks.
                    start_new_session=True,
                )
            return self._process

    def _talk(
        self, process: subprocess.Popen[bytes], greeting: Mapping[str, object]
    ) -> None:
        self._mistake = _mismatch(self._where(), greeting)
        if self._mistake is not None:
            with self._lock:
                _hang_up(process)
            return
        launch = self._launch
        env = {**self._engine.env(launch.task), **launch.env}
        told = {"env": env, "keys": dict(launch.keys)}
        told["beside"] = {"count": str(launch.beside), "place": str(launch.place)}
        with contextlib.suppress(BrokenPipeError):  # it ended, and its log says why
            _stream(process.stdin).write(json.dumps(told).encode() + b"\n")
            _stream(process.stdin).flush()
            os.set_blocking(_stream(process.stdin).fileno(), False)
        name = f"zstrat holds {launch.task.name}"
        threading.Thread(target=self._hold, name=name, daemon=True).start()
        report = _answer(process)
        if report is not None:
            self._has_served = True
            port = str(report["address"]).rpartition(":")[2]
            self._hear.bound(host_and_port(self._engine.host(launch.task), port))

    def _hold(self) -> None:
        """Lets the daemon hear of us, until it has ended or is to end."""
        assert self._process is not None
        stdin = _stream(self._process.stdin)
        while not self._over.wait(self._launch.launcher_timeout / BEATS):
            with self._lock:
                if stdin.closed:
                    return
                # A full pipe: nobody reads, and it has a thousand beats to read.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(stdin.fileno(), b"\n")

    def _ended(self, process: subprocess.Popen[bytes]) -> End:
        code = process.wait()
        with self._lock:
            _hang_up(process)
        _stream(process.stdout).close()
        words = f"on {self._where()} {end_words(code)}"
        why = "" if self._is_ending else self._why(code)
        # A daemon that says 2 would end so again; not one that served already: what it
        # was told was right, but its port, say, may be somebody else's just now.
        mistake = self._mistake
        if mistake is None and code == MISTAKEN and not self._launch.bind:
            mistake = UnavailableError(f"{self._launch.task.name} {words}")
        return End(words, code, why, mistake)

    def _why(self, code: int) -> str:
        return self._engine.why(self._launch, code, has_served=self._has_served)

    def _misspoke(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._launch.task.name} on {self._where()} does not talk as a daemon of "
            f"zstrat does: {error!r}"
        )

    def _where(self) -> str:
        return self._launch.task.where


def _stream(found: IO[bytes] | None) -> IO[bytes]:
    assert found is not None
    return found


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        _stream(process.stdin).close()


def _answer(process: subprocess.Popen[bytes]) -> dict[str, object] | None:
    """The next line that it says; None at the end. What else a shell prints before is
    passed over."""
    while line := _stream(process.stdout).readline(LONGEST_LINE):
        if line.startswith(b"{"):
            found: dict[str, object] = json.loads(line)
            return found
    return None


def _bind(host: str, before: str) -> str:
    """What the daemon binds: all of its host, whose own network may know it by another
    address, or by a name that means loopback there. Loopback stays loopback."""
    port = before.rpartition(":")[2]
    with contextlib.suppress(ValueError):  # of a name
        if ipaddress.ip_address(host).is_loopback:
            return host_and_port(host, port)
    return f"*:{port}"


def _mismatch(
    where: str, greeting: Mapping[str, object]
) -> VersionMismatchError | None:
    """Why the daemon there cannot work with this program, or None."""
    mine = hello("chief", 0, 1)
    theirs = greeting["versions"]
    if not isinstance(theirs, dict):
        raise TypeError(f"versions: {theirs!r:.80}")
    pairs = [("protocol", str(greeting["protocol"]), str(mine.protocol))]
    pairs.append(("zstrat", theirs.get("zstrat", "none"), mine.versions["zstrat"]))
    pythons = theirs.get("python", "none"), mine.versions["python"]
    minors = [".".join(each.split(".")[:2]) for each in pythons]
    pairs.append(("Python", minors[0], minors[1]))
    wrong = [f"{what} {a} (here {b})" for what, a, b in pairs if a != b]
    if not wrong:
        return None
    return VersionMismatchError(
        f"{where} has {', '.join(wrong)}: install the same there, or name the "
        "interpreter that has it"
    )
