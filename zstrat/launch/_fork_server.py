"""Daemons of this machine that are forked, not started: of one process that has
imported all that they need.

To start Python, and to import jax and zstrat, takes a daemon a second of processor
time. A *fork server* (`zstrat.daemons.fork_server`) does that once for all daemons of
this program, which begin as copies of it within milliseconds and share its memory. One
is kept for the next cluster; it ends with this program, and its daemons with it.

Law: a daemon finds the environment that it would find if it were started. What Python,
jax or another library has read of it by then is the same: else there is another fork
server (`_READ_LATER` says what may differ).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import IO, TYPE_CHECKING, Final, final

from zstrat.cluster import GPUS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_READ_LATER: Final = (
    "JAX_PLATFORMS",
    "NPROC",
    "TF_CONFIG",
    # Where there is no TPU jax sets it when it is imported; who looks for one reads it.
    "TPU_SKIP_MDS_QUERY",
    GPUS_VARIABLE,
    # No library reads it, and pytest sets it for each test: they would share no server.
    "PYTEST_CURRENT_TEST",
)
"""With those of zstrat: what a daemon reads when it begins, or tells jax then."""

_SET_BY_JAX: Final = {"TF_CPP_MIN_LOG_LEVEL": "1"}
"""What jax sets when it is imported, where nobody has: a program that has imported it
since its last cluster finds the same as the fork server, which imports it, too."""

REQUEST: Final = b"\0"
"""What an order is on the socket; its text is in the last of the descriptors that come
with it. So Ctrl-C finds all of it sent, or nothing: half of one would be taken for the
beginning of the next."""
WORD: Final = struct.Struct("!i")
"""What a fork server tells of a daemon: its process id, then `STOPPED` and `CONTINUED`
as often as that happens, and in the end its exit code, or -N for signal N."""
STOPPED: Final = 1 << 16
CONTINUED: Final = 1 << 17


@final
class ForkServer:
    """The process that daemons are forked from. ``environment`` is what it finds, and
    ``program`` what Python runs.

    Raises:
        OSError: Python cannot be started.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        program: Sequence[str] = ("-P", "-m", "zstrat.daemons.fork_server"),
    ) -> None:
        ours, theirs = socket.socketpair()
        self._what = _identity(environment)
        self._socket = ours
        command = [sys.executable, *program]
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=dict(environment),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._end = weakref.finalize(self, _end, process, ours, os.getpid())
        except BaseException:  # to who wants it: of Ctrl-C, too
            ours.close()
            if process is not None:
                process.kill()
                process.wait()
            raise
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether it lives, is ours, and has read what a daemon with this environment
        would read."""
        is_ours = self._what == _identity(environment)
        return is_ours and self._process.poll() is None

    def start(
        self,
        job: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: int,
        report: int,
        folder: str = ".",
    ) -> ForkedProcess:
        """Forks a daemon, as soon as all is imported.

        Args:
            arguments: Of its command line.
            output: The descriptor of its standard output and standard error; it stays
                open here.
            report: The descriptor that it reports its address to, in the same way.
            folder: Where it runs.

        Raises:
            OSError: The fork server has ended.
        """
        order = {"job": job, "arguments": [*arguments], "environment": {**environment}}
        body = json.dumps(order).encode()
        with contextlib.ExitStack() as closing:
            heard, told = os.pipe()
            closing.callback(os.close, told)
            stdin, ours = os.pipe()
            closing.callback(os.close, stdin)
            process = ForkedProcess(self, heard, os.fdopen(ours, "wb", 0))
            here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            closing.callback(os.close, here)
            text = closing.enter_context(_file_of(body))
            descriptors = [stdin, output, report, told, here, text.fileno()]
            socket.send_fds(self._socket, [REQUEST], descriptors)
        return process

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        return self._process.wait()


@final
class ForkedProcess:
    """A daemon that a fork server has forked, or will. Its methods may be called from
    any thread."""

    def __init__(self, server: ForkServer, heard: int, stdin: IO[bytes]) -> None:
        self.stdin: IO[bytes] | None = stdin
        self.returncode: int | None = None
        self._server, self._heard = server, heard
        self._pid: int | None = None
        self._is_stopped = False
        self._words: list[bytes] = []
        """All that has come,"""
        self._looks = 0
        """and how much of it was looked at."""
        self._reading = threading.Lock()
        # At the end of the program a cluster that was made before still ends it.
        weakref.finalize(self, os.close, heard).atexit = False

    @property
    def pid(self) -> int:
        """Waits until it is forked.

        Raises:
            ProcessLookupError: It never was, as the fork server had ended.
        """
        while self._pid is None and self.returncode is None:
            self._hear(None)
        if self._pid is None:
            raise ProcessLookupError(
                f"the fork server has ended with exit code {self.returncode}"
            )
        return self._pid

    def poll(self) -> int | None:
        """Its exit code, or -N for signal N; None while it runs."""
        while self.returncode is None and self._hear(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, when it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._hear(left) and self.poll() is None:
                raise subprocess.TimeoutExpired("a daemon", timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Sends it, if it still runs; waits until it is forked, and behind SIGSTOP and
        SIGCONT until it has stopped or goes on."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, sig)
        if sig in (signal.SIGSTOP, signal.SIGCONT):
            while self.poll() is None and self._is_stopped != (sig == signal.SIGSTOP):
                self._hear(None)

    def _hear(self, timeout: float | None) -> bool:
        """Reads what has come within so many seconds; false if nothing has."""
        if self._looks < len(self._words):  # Ctrl-C came in between
            with self._reading:
                self._look()
            return True
        waiting = select.poll()
        waiting.register(self._heard, select.POLLIN)
        if not waiting.poll(None if timeout is None else timeout * 1000):
            return False
        with self._reading:
            if self.returncode is not None or not waiting.poll(0):
                return True  # another thread was first
            # From C, so that Ctrl-C finds it in the pipe or here: an exit code would be
            # taken for a process id if that were lost.
            self._words.extend(map(os.read, (self._heard,), (4096,)))
            self._look()
        return True

    def _look(self) -> None:
        """Finds out from all that has come how the daemon is."""
        looks, told = len(self._words), b"".join(self._words)
        whole = len(told) // WORD.size * WORD.size
        pid, *words = [word for (word,) in WORD.iter_unpack(told[:whole])] or [None]
        self._pid = pid
        if words and words[-1] in (STOPPED, CONTINUED):
            self._is_stopped = words[-1] == STOPPED
        elif words:
            self.returncode = words[-1]
        if not self._words[-1] and self.returncode is None:
            # The kernel kills a daemon whose fork server has ended.
            self.returncode = self._server.wait() if pid is None else -signal.SIGKILL
        self._looks = looks


_keeping: Final = threading.Lock()
_kept: ForkServer | None = None


def fork_server(environment: Mapping[str, str]) -> ForkServer | None:
    """The fork server for daemons with this environment: that of this program, which is
    kept, or a new one in its place; None where daemons are started one by one, as a
    process that has loaded system libraries may not be forked.

    Raises:
        OSError: Python cannot be started.
    """
    global _kept
    if sys.platform != "linux":
        return None
    with _keeping:
        if _kept is None or not _kept.suits(environment):
            _kept = ForkServer(environment)
        return _kept


def kept_fork_server() -> ForkServer | None:
    """That of this program, if a cluster had one; it stays for the next."""
    return _kept


def started(
    job: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int,
    report: int,
) -> subprocess.Popen[bytes]:
    """As `ForkServer.start`, of a process that is started for it."""
    # -P: the folder we happen to run in must not shadow modules of the daemon.
    command = [sys.executable, "-P", "-m", f"zstrat.daemons.{job}", *arguments]
    return subprocess.Popen(
        [*command, "--parent", str(os.getpid()), "--report", str(report)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=dict(environment),
        pass_fds=[report],
        # Ctrl-C at the terminal is for the program; it then ends its daemons.
        start_new_session=True,
    )


def _identity(environment: Mapping[str, str]) -> tuple[object, ...]:
    """What is the same for all daemons of one fork server."""
    early = {
        name: value
        for name, value in environment.items()
        if name not in _READ_LATER
        and not name.startswith("ZSTRAT_")
        and _SET_BY_JAX.get(name) != value
    }
    return os.getpid(), sys.executable, early


def _file_of(body: bytes) -> IO[bytes]:
    """A file that has no name, with its position at the beginning."""
    file = os.fdopen(os.memfd_create("zstrat order"), "w+b", 0)
    file.write(body)
    file.seek(0)
    return file


def _end(process: subprocess.Popen[bytes], ours: socket.socket, program: int) -> None:
    """Ends it, unless this is a process that the program has forked."""
    ours.close()
    if os.getpid() == program:
        process.kill()
        process.wait()


DaemonProcess = subprocess.Popen[bytes] | ForkedProcess
