"""Starts daemons of this machine by forking a process that has imported their modules.

A new Python process that imports jax and zstrat takes a second of processor time. A
*fork server* (`zstrat.daemons.fork_server`) imports both once for all daemons of this
program, which then start within milliseconds and share its memory. The fork server is
kept for the next cluster, and ends with this program, together with its daemons.

Law: a forked daemon behaves as if it were started with its environment. If a variable
differs that Python, jax or another library reads when it is imported, there is a new
fork server (`_READ_LATER` lists the variables that may differ).
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
    # Keras reads it at import; daemons import Keras after the fork, if at all.
    "KERAS_BACKEND",
    # jax sets it at import on machines without a TPU, and reads it to look for one.
    "TPU_SKIP_MDS_QUERY",
    GPUS_VARIABLE,
    # No library reads it. pytest sets it for each test, which would need a new server.
    "PYTEST_CURRENT_TEST",
)
"""Variables that a daemon reads, or passes to jax, only after the fork. Those of zstrat
belong to them, too."""

_SET_BY_JAX: Final = {"TF_CPP_MIN_LOG_LEVEL": "1"}
"""Variables that jax sets at import if they are unset. A program that imported jax
after it started the fork server has them, and still suits that server."""

REQUEST: Final = b"\0"
"""The bytes of a request on the socket; the text of the request is in the last file
descriptor that is sent with them. So a request interrupted by Ctrl-C is sent as a whole
or not at all; half a request would be taken for the beginning of the next one."""
WORD: Final = struct.Struct("!i")
"""A report about a daemon: first its process id, then `STOPPED` and `CONTINUED` as
often as that happens, and at the end its exit code, or -N for signal N."""
STOPPED: Final = 1 << 16
CONTINUED: Final = 1 << 17


@final
class ForkServer:
    """The process from which daemons are forked.

    Args:
        environment: Environment of the process.
        program: Arguments of Python that make it run the fork server.

    Raises:
        OSError: Python cannot be started.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        program: Sequence[str] = ("-P", "-m", "zstrat.daemons.fork_server"),
    ) -> None:
        ours, theirs = socket.socketpair()
        # Taken now: the caller may change its mapping later.
        self._identity = _identity(environment)
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
                    # Ctrl-C in the terminal is for the program, which then ends this.
                    start_new_session=True,
                )
            # At exit as well; clusters are finalized before it, as they are younger.
            self._end = weakref.finalize(self, _end, process, ours, os.getpid())
        except BaseException:  # to the caller; also for Ctrl-C
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
        """Returns whether the fork server can fork daemons with this environment: it
        runs, belongs to this process, and imported its modules with the same
        variables."""
        is_ours = self._identity == _identity(environment)
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
        """Requests a daemon, which is forked as soon as the imports are done.

        Args:
            arguments: The arguments of the daemon's command line.
            output: The descriptor of its standard output and standard error, which
                stays open in this process.
            report: The descriptor to which the daemon reports its address, which stays
                open as well.
            folder: Its working folder.

        Raises:
            OSError: The fork server has ended.
        """
        text = {"job": job, "arguments": [*arguments], "environment": {**environment}}
        with contextlib.ExitStack() as stack:
            status_reader, status_writer = os.pipe()
            stack.callback(os.close, status_writer)
            stdin_reader, stdin_writer = os.pipe()
            stack.callback(os.close, stdin_reader)
            # Nothing is written to it: its end is how the daemon notices our end.
            stdin = os.fdopen(stdin_writer, "wb", 0)
            process = ForkedProcess(self, status_reader, stdin)
            # A descriptor, as the fork server may have another working folder, and the
            # path may be renamed.
            cwd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            stack.callback(os.close, cwd)
            # In memory, not on the socket: an environment may be larger than its
            # buffer, and the send would block until the imports are done.
            file = stack.enter_context(
                os.fdopen(os.memfd_create("zstrat request"), "w+b", 0)
            )
            file.write(json.dumps(text).encode())
            file.seek(0)
            # In the order of the fields of the fork server's `ForkRequest`.
            pipes = [stdin_reader, output, report, status_writer]
            descriptors = [*pipes, cwd, file.fileno()]
            socket.send_fds(self._socket, [REQUEST], descriptors)
        return process

    def wait(self) -> int:
        """Waits for the end of the fork server; returns its exit code."""
        return self._process.wait()


@final
class ForkedProcess:
    """A daemon that a fork server forks, with the interface of `subprocess.Popen`.
    Thread-safe."""

    def __init__(self, server: ForkServer, status: int, stdin: IO[bytes]) -> None:
        self.stdin: IO[bytes] | None = stdin
        self.returncode: int | None = None
        self._server, self._status = server, status
        self._pid: int | None = None
        self._is_stopped = False
        self._received: list[bytes] = []
        """All parts that were read from the status pipe."""
        self._parsed = 0
        """Number of parts in ``_received`` that are parsed."""
        self._reading = threading.Lock()
        # Not at exit: there, a cluster that was made earlier still waits for this.
        weakref.finalize(self, os.close, status).atexit = False

    @property
    def pid(self) -> int:
        """The process id of the daemon; waits until the daemon is forked.

        Raises:
            ProcessLookupError: The fork server ended before it forked the daemon.
        """
        while self._pid is None and self.returncode is None:
            self._read_status(None)
        if self._pid is None:
            raise ProcessLookupError(
                f"the fork server has ended with exit code {self.returncode}"
            )
        return self._pid

    def poll(self) -> int | None:
        """Returns the exit code of the daemon, or -N for signal N; None while the
        daemon runs."""
        while self.returncode is None and self._read_status(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the daemon; returns the same as `poll`.

        Raises:
            subprocess.TimeoutExpired: The daemon did not end within ``timeout``
                seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._read_status(left) and self.poll() is None:
                raise subprocess.TimeoutExpired("a daemon", timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Sends a signal to the daemon if it runs, after it is forked. After SIGSTOP
        and SIGCONT waits until the daemon has stopped or continued."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, sig)
        if sig in (signal.SIGSTOP, signal.SIGCONT):
            # The kernel stops a process a moment after the signal; a test that froze a
            # task must not get an answer from it.
            while self.poll() is None and self._is_stopped != (sig == signal.SIGSTOP):
                self._read_status(None)

    def _read_status(self, timeout: float | None) -> bool:
        """Waits for bytes from the status pipe and parses them; returns False if none
        came within ``timeout`` seconds."""
        if self._parsed < len(self._received):  # Ctrl-C interrupted the last call
            with self._reading:
                self._parse()
            return True
        # Not `select.select`, which fails for descriptors above 1023. The wait is
        # outside of the lock, so that `poll` of another thread does not wait for it.
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            return False
        with self._reading:
            # Another thread was first: the caller looks at the state again.
            if self.returncode is not None or not poll.poll(0):
                return True
            # Read and appended in C, so that Ctrl-C loses no bytes: if the process id
            # were lost, the exit code would be taken for it.
            self._received.extend(map(os.read, (self._status,), (4096,)))
            self._parse()
        return True

    def _parse(self) -> None:
        """Derives the state of the daemon from all received bytes."""
        # From all of them each time, so that it may be repeated after Ctrl-C; there are
        # a few words in the life of a daemon.
        parsed, data = len(self._received), b"".join(self._received)
        whole = len(data) // WORD.size * WORD.size
        pid, *words = [word for (word,) in WORD.iter_unpack(data[:whole])] or [None]
        self._pid = pid
        if words and words[-1] in (STOPPED, CONTINUED):
            self._is_stopped = words[-1] == STOPPED
        elif words:
            self.returncode = words[-1]
        # The stream ended without an exit code.
        if not self._received[-1] and self.returncode is None:
            # The fork server has ended: the kernel kills its daemons.
            self.returncode = self._server.wait() if pid is None else -signal.SIGKILL
        # Last: until here the bytes count as not parsed.
        self._parsed = parsed


_keeping: Final = threading.Lock()
_kept: ForkServer | None = None


def fork_server(environment: Mapping[str, str]) -> ForkServer | None:
    """Returns the fork server for daemons with this environment: the kept one, or a new
    one in its place. None on other systems than Linux, where a process that has loaded
    system libraries must not be forked.

    Raises:
        OSError: Python cannot be started.
    """
    global _kept
    if sys.platform != "linux":
        return None
    with _keeping:
        # A server that no longer suits ends with its last daemon: each refers to it.
        if _kept is None or not _kept.suits(environment):
            _kept = ForkServer(environment)
        return _kept


def kept_fork_server() -> ForkServer | None:
    """Returns the fork server that is kept for the next cluster, if any."""
    return _kept


def start_process(
    job: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int,
    report: int,
) -> subprocess.Popen[bytes]:
    """Starts a daemon as a new process instead of forking it; otherwise like
    `ForkServer.start`."""
    # -P: modules in the working folder must not shadow those of the daemon.
    command = [sys.executable, "-P", "-m", f"zstrat.daemons.{job}", *arguments]
    return subprocess.Popen(
        [*command, "--parent", str(os.getpid()), "--report", str(report)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=dict(environment),
        pass_fds=[report],
        # Ctrl-C in the terminal is for the program, which then ends its daemons.
        start_new_session=True,
    )


def _identity(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Returns what all daemons of one fork server share: the program, Python, and the
    variables that are read before the fork."""
    early = {
        name: value
        for name, value in environment.items()
        if name not in _READ_LATER
        and not name.startswith("ZSTRAT_")
        and _SET_BY_JAX.get(name) != value
    }
    return os.getpid(), sys.executable, early


def _end(process: subprocess.Popen[bytes], ours: socket.socket, program: int) -> None:
    """Ends the fork server, unless this is a forked process of the program."""
    ours.close()
    if os.getpid() == program:
        # Killed, as it may be amid an import, where it does not see that we are gone.
        process.kill()
        process.wait()


DaemonProcess = subprocess.Popen[bytes] | ForkedProcess
