"""One daemon that runs as a child process of this one.

Law: a child never outlives us. It is tied twice: by the pipe at its standard input,
which the kernel closes however we end, and by the parent-death signal that it asks for
(`zstrat.daemons`). It reports the address that it bound through a second pipe, so
that no port has to be guessed.

What a child prints goes to its log, a file of the cluster's folder. If the task fails,
errors quote the end of it, and the file is moved out of the folder (`KeptLogs`), which
is removed with the cluster.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from zstrat.config import TRY_AGAIN, environment
from zstrat.errors import DeadlineExceededError, UnavailableError

from ._fork_server import DaemonProcess, fork_server, started

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TAIL: Final = 20
"""Lines of a log that an error quotes: a traceback's end and what came before it."""

_OF_THIS_PROCESS: Final = (
    "TF_CONFIG",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "ZSTRAT_HTTP",
    "ZSTRAT_HTTP_TOKEN",
)
"""Variables that speak of one process: what they say of us is not so of a child."""


def inherited() -> dict[str, str]:
    """The environment that a child gets from ours."""
    found = environment().items()
    return {name: value for name, value in found if name not in _OF_THIS_PROCESS}


class KeptLogs:
    """Logs of tasks that failed, out of a folder that is removed.

    They are moved to a new folder of mode 0700 for temporary files, which is made for
    the first of them, and which nobody but the user removes.

    Args:
        is_removed: Whether the folder of the logs will be; else they stay there.
    """

    def __init__(self, is_removed: bool) -> None:
        self._is_removed = is_removed
        self._folder: Path | None = None

    def take(self, log: Path) -> Path:
        """Keeps a log that nobody writes to any more; returns where it is."""
        if not self._is_removed or log.parent == self._folder:
            return log
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="zstrat-logs-"))
        return Path(shutil.move(log, self._folder))


class Child:
    """A daemon, its log and its pipes.

    ``address`` is "" until the child reported it; it is bound again by `start` after
    the process ended, so that others find the task where it was.
    """

    def __init__(
        self,
        job: str,
        index: int,
        bind: str,
        log: Path | None,
        env: Mapping[str, str],
        kept: KeptLogs,
    ) -> None:
        self.job, self.index = job, index
        self.failures: list[str] = []
        """How it ended by itself with an error, once for each time, in words."""
        self._kept = kept
        self._told: set[int] = set()
        """Signals that were sent to the present process."""
        self.address, self.log = "", log
        self._bind, self._env = bind, dict(env)
        self._process: DaemonProcess | None = None
        self._report: IO[bytes] | None = None
        self._heard = b""

    @property
    def task(self) -> str:
        return f"{self.job}:{self.index}"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, extra: Sequence[str] = ()) -> None:
        """Starts the process; `wait_ready` says when it serves.

        Raises:
            OSError: It cannot be.
        """
        if self.is_running:
            raise RuntimeError(f"{self.task} is running already, pid {self.pid}")
        self.close()
        self._told.clear()
        server = fork_server(self._env)
        start = started if server is None else server.start
        arguments = ["--index", str(self.index), "--bind", self.address or self._bind]
        arguments += extra
        report, child_end = os.pipe()
        self._report, self._heard = os.fdopen(report, "rb", 0), b""
        with os.fdopen(child_end, "wb", 0), self._opened_log() as output:
            self._process = start(
                self.job,
                arguments,
                self._env,
                output=output.fileno(),
                report=child_end,
            )

    def hear(self) -> bool:
        """Reads what the child reported; true when it is ready.

        Raises:
            UnavailableError: It ended before it was ready; quotes the end of its log.
        """
        data = os.read(self.fileno(), 4096)
        self._heard += data
        if not data:
            code = self._running().wait()
            self.keep_log()
            raise UnavailableError(
                f"{self.task} {end_words(code)} before it was ready; {self.tail()}"
            )
        if self._heard.endswith(b"\n"):
            self.address = json.loads(self._heard)["address"]
            self._close_report()
            return True
        return False

    def signal(self, number: int) -> None:
        """Sends a signal if the process still runs."""
        process = self._process
        if process is not None and process.poll() is None:
            self._told.add(number)
            process.send_signal(number)

    def kill(self) -> None:
        """Ends the process at once and waits until the kernel has taken it away."""
        self.signal(signal.SIGKILL)
        self._running().wait()

    def wait(self, deadline: float) -> int | None:
        """Exit code, None if the process still runs at ``deadline`` (monotonic)."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kills what is left of the process and closes the pipes; may be repeated, also
        where that was interrupted, or by a handler of signals meanwhile."""
        process = self._process
        if process is not None:
            self.signal(signal.SIGKILL)
            self._judge(process.wait())
            if process.stdin is not None:
                process.stdin.close()
            self._process = None
        self._close_report()

    def keep_log(self) -> None:
        """Moves the log, if there is a file, to where it survives the folder of the
        cluster (`KeptLogs`). To be called when the process has ended."""
        if self.log is not None:
            self.log = self._kept.take(self.log)

    def tail(self) -> str:
        """The last `TAIL` lines of the log for an error; or, without a file, that it
        went to the terminal."""
        if self.log is None:
            return "its log went to the terminal"
        return quoted_end(self.log)

    def fileno(self) -> int:
        """The pipe that the report comes through, for a selector."""
        assert self._report is not None
        return self._report.fileno()

    def _running(self) -> DaemonProcess:
        if self._process is None:
            raise RuntimeError(f"{self.task} was never started")
        return self._process

    def _judge(self, code: int) -> None:
        """Notes an end that is an error of its own, or that somebody else brought."""
        by_us = -code in self._told
        if code not in (0, TRY_AGAIN) and not by_us:
            self.failures.append(end_words(code))

    def _opened_log(self) -> IO[bytes]:
        """The file that the child prints to."""
        return (
            os.fdopen(os.dup(1), "wb", 0) if self.log is None else open(self.log, "ab")
        )

    def _close_report(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            report.close()


def quoted_end(log: Path) -> str:
    """The last `TAIL` lines of a log with its path, for an error."""
    lines = log.read_text("utf-8", "replace").splitlines()[-TAIL:]
    return "\n  ".join([f"the end of {log}:", *(lines or ["(nothing)"])])


def end_words(code: int) -> str:
    """How a process ended, by its exit code; -N is that of signal N."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-code}"


def shell_code(code: int) -> int:
    """An exit code as shells have it: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


def wait_ready(children: Iterable[Child], deadline: float) -> None:
    """Waits until every child serves; ``deadline`` is in time.monotonic().

    Raises:
        UnavailableError: One ended before it was ready; quotes the end of its log.
        DeadlineExceededError: Some were not ready in time; names them.
    """
    waiting = set(children)
    with selectors.DefaultSelector() as selector:
        for child in waiting:
            selector.register(child, selectors.EVENT_READ, child)
        while waiting:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise _late(waiting)
            for child in [key.data for key, _ in ready]:
                selector.unregister(child)
                if child.hear():
                    waiting.remove(child)
                else:
                    selector.register(child, selectors.EVENT_READ, child)


def _late(waiting: Iterable[Child]) -> DeadlineExceededError:
    late = sorted(waiting, key=lambda child: (child.job, child.index))
    names = ", ".join(child.task for child in late)
    return DeadlineExceededError(f"not ready in time: {names}; {late[0].tail()}")
