"""Engines whose processes are commands with standard streams: this machine, ssh, srun.

The command runs `zstrat.daemons.launched` somewhere, and ends when that does. Its
standard input and output are the conversation with the daemon (see there), its standard
error is the log of the task, into which the kernel writes it: what the command itself
has to say, that it cannot reach a host, say, is there, too. The end of the conversation
is the leash: the daemon drains when its standard input ends, however we end.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import UnavailableError, VersionMismatchError
from zstrat.launch._child import signal_name
from zstrat.launch._copies import WATCHING_PARENT
from zstrat.transport import hello

from ._engine import End

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

    from ._engine import FleetTask, RunningTask, TaskEvents, TaskLaunch

LONGEST_LINE: Final = 2**16
"""Bytes of one line of the conversation; what a shell prints before it is cut there."""


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

    def why(self, task: FleetTask, code: int) -> str:
        """What the exit code of the command says, beyond its number, and what to do."""
        return ""

    def variables(self) -> Mapping[str, str] | None:
        """The environment of the command; None: ours."""
        return None

    @final
    def start(self, launch: TaskLaunch, hear: TaskEvents) -> RunningTask:
        bind = _bind(self.host(launch.task), launch.bind)
        # -P: the folder in which it happens to run must not shadow modules.
        daemon = [self.python(launch.task), "-P", "-m", "zstrat.daemons.launched"]
        daemon += [launch.task.job, "--index", str(launch.task.index), "--bind", bind]
        words = self.command(launch, [*daemon, *launch.arguments])
        with contextlib.ExitStack() as stack:
            log = None
            if launch.log is not None:
                log = stack.enter_context(launch.log.open("ab"))
            process = subprocess.Popen(
                [*WATCHING_PARENT, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.variables(),
                # Ctrl-C at the terminal is for the program; it then ends its tasks.
                start_new_session=True,
            )
        return _Conversation(self, launch, hear, process)

    @final
    def close(self) -> None:
        """Nothing is left: every process was waited for."""
        return


class _Conversation:
    """One process and the thread that listens to it, until it has ended."""

    def __init__(
        self,
        engine: Piped,
        launch: TaskLaunch,
        hear: TaskEvents,
        process: subprocess.Popen[bytes],
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._engine, self._launch, self._hear = engine, launch, hear
        self._process = process
        self._said: IO[bytes] = process.stdin
        self._answers: IO[bytes] = process.stdout
        self._mistake: VersionMismatchError | UnavailableError | None = None
        self._is_ready = self._is_killed = False
        name = f"zstrat hears {launch.task.name}"
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    def drain(self) -> None:
        """By the end of its standard input."""
        self._close()

    def kill(self) -> None:
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def _listen(self) -> None:
        try:
            greeting = self._answer()
            if greeting is not None:
                self._mistake = _mismatch(self._where(), greeting)
                self._hand_over()
                report = self._answer()
                if report is not None:
                    self._is_ready = True
                    port = str(report["address"]).rpartition(":")[2]
                    host = self._engine.host(self._launch.task)
                    self._hear.bound(f"{host}:{port}")
            while self._answers.read(LONGEST_LINE):
                pass  # it has nothing more to say, but its end is heard so
        except (OSError, ValueError, KeyError) as error:
            self._mistake = UnavailableError(
                f"{self._where()} does not talk as a daemon of zstrat does: {error!r}"
            )
            self.kill()
        self._hear.ended(self._end())

    def _hand_over(self) -> None:
        """Keys and variables, or, where nothing fits, the end of the conversation."""
        if self._mistake is not None:
            self._close()
            return
        told = {"env": dict(self._launch.env), "keys": dict(self._launch.keys)}
        with contextlib.suppress(BrokenPipeError):  # it ended, and its log says why
            self._said.write(json.dumps(told).encode() + b"\n")
            self._said.flush()

    def _answer(self) -> dict[str, object] | None:
        """The next line that it says; None at the end. What else a shell prints before
        is passed over."""
        while line := self._answers.readline(LONGEST_LINE):
            if line.startswith(b"{"):
                found: dict[str, object] = json.loads(line)
                return found
        return None

    def _end(self) -> End:
        code = self._process.wait()
        self._close()
        self._answers.close()
        words = f"ended with exit code {code}"
        if code < 0:
            words = f"was ended by {signal_name(-code)}"
        why = "" if self._is_killed else self._engine.why(self._launch.task, code)
        if why:
            words = f"{words} ({why})"
        # A daemon that says 2 would end so again; not one that served already: what it
        # was told was right, but its port, say, may be somebody else's just now.
        mistake = self._mistake
        if mistake is None and code == 2 and not self._launch.bind:
            name = self._launch.task.name
            mistake = UnavailableError(f"{name} on {self._where()} {words}")
        return End(words, code, mistake)

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._said.close()

    def _where(self) -> str:
        return f"{self._engine.name} host {self._launch.task.where}"


def _bind(host: str, before: str) -> str:
    """What the daemon binds. A name may mean loopback on the host itself, so only a
    number is bound as it is."""
    port = before.rpartition(":")[2] or "0"
    is_number = host.replace(".", "").isdecimal()
    return f"{host if is_number else '0.0.0.0'}:{port}"


def _mismatch(
    where: str, greeting: Mapping[str, object]
) -> VersionMismatchError | None:
    """Why the daemon there cannot work with this program, or None."""
    mine = hello("chief", 0, 1)
    theirs = greeting["versions"]
    assert isinstance(theirs, dict)
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
