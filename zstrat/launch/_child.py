"""A daemon that runs as a child process of this one.

Law: a child never outlives this process. Two mechanisms ensure that: the kernel closes
the pipe at the child's standard input when this process ends, and sends the child the
parent-death signal that it asked for (`zstrat.daemons`). The child reports the address
that it bound through a second pipe, so that no port has to be guessed.

The output of a child goes to its log, a file in the cluster's folder. If the task
fails, errors quote the end of the log, and the file is moved out of the folder
(`KeptLogs`), which is removed with the cluster.
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

from ._fork_server import DaemonProcess, fork_server, start_process

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TAIL: Final = 20
"""Lines of a log that an error quotes: the end of a traceback and some context."""

_OF_THIS_PROCESS: Final = (
    "TF_CONFIG",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "ZSTRAT_HTTP",
    "ZSTRAT_HTTP_TOKEN",
)
"""Names of variables that describe this process and would be wrong for a child."""


def inherited_environment() -> dict[str, str]:
    """Returns the environment of this process without `_OF_THIS_PROCESS`."""
    variables = environment().items()
    return {name: value for name, value in variables if name not in _OF_THIS_PROCESS}


class KeptLogs:
    """Keeps the logs of failed tasks when the folder of the cluster is removed.

    The first log that is kept creates a temporary folder of mode 0700, which only the
    user removes.

    Args:
        is_removed: Whether the folder of the logs will be removed; otherwise the logs
            stay there.
    """

    def __init__(self, is_removed: bool) -> None:
        self._is_removed = is_removed
        self._folder: Path | None = None

    def keep(self, log: Path) -> Path:
        """Moves the log of an ended task if necessary; returns its new path."""
        if not self._is_removed or log.parent == self._folder:
            return log
        # Only now: most clusters end without a failure, and leave no folder behind.
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="zstrat-logs-"))
        return Path(shutil.move(log, self._folder))


class Child:
    """A daemon process with its log and its pipes.

    ``address`` is "" until the child reports its address. A restarted child binds the
    same address, so that its peers find the task again.
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
        """A description of each end with an error that this object did not cause."""
        self._kept = kept
        self._sent: set[int] = set()
        """Signals sent to the current process."""
        self.address, self.log = "", log
        self._bind, self._env = bind, dict(env)
        self._process: DaemonProcess | None = None
        self._report: IO[bytes] | None = None
        self._received = b""

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
        """Starts the process; call `wait_ready` to wait until it serves.

        Raises:
            OSError: The process cannot be started.
        """
        if self.is_running:
            raise RuntimeError(f"{self.task} is already running, pid {self.pid}")
        self.close()
        # After `close`, which judges by them whether the last end was our doing.
        self._sent.clear()
        server = fork_server(self._env)
        start = start_process if server is None else server.start
        # From the second start on the known address, so that peers find it again.
        arguments = ["--index", str(self.index), "--bind", self.address or self._bind]
        arguments += extra
        # Unbuffered, as `read_report` reads the descriptor itself. Our copy of the
        # child's end is closed at once: else its death would not end the stream.
        report, child_end = os.pipe()
        self._report, self._received = os.fdopen(report, "rb", 0), b""
        with os.fdopen(child_end, "wb", 0), self._open_log() as output:
            self._process = start(
                self.job,
                arguments,
                self._env,
                output=output.fileno(),
                report=child_end,
            )

    def read_report(self) -> bool:
        """Reads from the report pipe; returns True once the child is ready.

        Raises:
            UnavailableError: The child ended before it was ready; quotes its log.
        """
        data = os.read(self.fileno(), 4096)
        self._received += data
        if not data:
            # The end of the pipe comes with the end of the process, so this wait is
            # short.
            code = self._running().wait()
            self.keep_log()
            raise UnavailableError(
                f"{self.task} {end_words(code)} before it was ready; {self.tail()}"
            )
        if self._received.endswith(b"\n"):
            self.address = json.loads(self._received)["address"]
            self._close_report()
            return True
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to the process if it still runs."""
        process = self._process
        if process is not None and process.poll() is None:
            # Noted first: Ctrl-C between the two lines must not make our signal look
            # like a failure of the task.
            self._sent.add(number)
            process.send_signal(number)

    def kill(self) -> None:
        """Kills the process (SIGKILL) and waits until it has ended."""
        self.signal(signal.SIGKILL)
        self._running().wait()

    def wait(self, deadline: float) -> int | None:
        """Waits for the end of the process; returns its exit code, or None if it still
        runs at ``deadline`` (time.monotonic())."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kills the process and closes the pipes. Idempotent, also after an interrupted
        call, and when a signal handler calls it during another call."""
        process = self._process
        if process is not None:
            self.signal(signal.SIGKILL)
            self._note_failure(process.wait())
            if process.stdin is not None:
                process.stdin.close()
            # Last: a call after Ctrl-C begins again with the process.
            self._process = None
        self._close_report()

    def keep_log(self) -> None:
        """Moves the log file, if any, to where it stays when the folder is removed
        (`KeptLogs`). Call this when the process has ended."""
        if self.log is not None:
            self.log = self._kept.keep(self.log)

    def tail(self) -> str:
        """Quotes the last `TAIL` lines of the log file for an error."""
        if self.log is None:
            return "its log went to the terminal"
        return quoted_end(self.log)

    def fileno(self) -> int:
        """Returns the file descriptor of the report pipe, so that a selector can wait
        for the pipe."""
        assert self._report is not None
        return self._report.fileno()

    def _running(self) -> DaemonProcess:
        if self._process is None:
            raise RuntimeError(f"{self.task} was never started")
        return self._process

    def _note_failure(self, code: int) -> None:
        # TRY_AGAIN only says that a restart may help, as after a drain that was too
        # short. That is not worth keeping the log.
        is_ours = -code in self._sent
        if code not in (0, TRY_AGAIN) and not is_ours:
            self.failures.append(end_words(code))

    def _open_log(self) -> IO[bytes]:
        return (
            os.fdopen(os.dup(1), "wb", 0) if self.log is None else open(self.log, "ab")
        )

    def _close_report(self) -> None:
        # Taken out first, for calls from a signal handler during this one.
        report, self._report = self._report, None
        if report is not None:
            report.close()


def quoted_end(log: Path) -> str:
    """Quotes the last `TAIL` lines of a log, with its path, for an error."""
    lines = log.read_text("utf-8", "replace").splitlines()[-TAIL:]
    return "\n  ".join([f"last lines of {log}:", *(lines or ["(empty)"])])


def end_words(code: int) -> str:
    """Describes the end of a process by its exit code; -N means signal N."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


def shell_code(code: int) -> int:
    """Converts an exit code to that of a shell: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


def wait_ready(children: Iterable[Child], deadline: float) -> None:
    """Waits until every child serves; ``deadline`` is in time.monotonic().

    Raises:
        UnavailableError: A child ended before it was ready; quotes its log.
        DeadlineExceededError: Some children were not ready in time; names them.
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
                # Before the read, which closes the descriptor once the child is ready;
                # a selector cannot unregister a closed one.
                selector.unregister(child)
                if child.read_report():
                    waiting.remove(child)
                else:
                    selector.register(child, selectors.EVENT_READ, child)


def _late(waiting: Iterable[Child]) -> DeadlineExceededError:
    late = sorted(waiting, key=lambda child: (child.job, child.index))
    names = ", ".join(child.task for child in late)
    return DeadlineExceededError(f"not ready in time: {names}; {late[0].tail()}")
