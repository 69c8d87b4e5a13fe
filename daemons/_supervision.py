"""Shows a daemon to operators and service managers, and ends it with its launcher.

A log line has the time, the task and the incarnation of the task. A state is a datagram
of ``KEY=value`` lines to the socket that ``NOTIFY_SOCKET`` names (systemd's notify
protocol); without that variable `Notifier` does nothing. The name of a process is what
`ps`, `top` and `pgrep` show.

A daemon ends together with the program that started it, or with another process, such
as the shell of an ssh client. The end of the launching program is noticed in two ways,
because each alone can fail: the kernel kills the daemon when the parent's thread ends
(even while the daemon is stopped), and the pipe at standard input closes. The pipe
covers a parent that ended before the kernel was asked, and systems other than Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping


class LineFormatter(logging.Formatter):
    """Formats a log record as ``2026-01-31T12:00:00.123Z I worker:0 1f00c0de
    message``."""

    def __init__(self, task: str, incarnation: int) -> None:
        super().__init__()
        self._task, self._incarnation = task, short(incarnation)

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname[0]} {self._task} {self._incarnation}"
        return f"{head} {_escaped(record.getMessage() + _traceback(self, record))}"


class JsonFormatter(LineFormatter):
    """Formats a log record as one JSON object on one line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "task": self._task,
            "incarnation": self._incarnation,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if traceback := _traceback(self, record):
            entry["traceback"] = traceback.strip()
        return json.dumps(entry)


def short(incarnation: int) -> str:
    """Returns the first eight hex digits of an incarnation, enough for people to
    compare."""
    return f"{incarnation:016x}"[:8]


def start_logging(task: str, incarnation: int, *, as_json: bool) -> None:
    """Logs to standard error: zstrat from level INFO, other libraries from WARNING."""
    formatter = JsonFormatter if as_json else LineFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(task, incarnation))
    # Replaces the handlers, as this is called again when a worker gets its index.
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("zstrat").setLevel(logging.INFO)
    logging.captureWarnings(True)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


def _escaped(text: str) -> str:
    """Escapes control characters and indents all lines but the first, so that text from
    a peer cannot forge a log entry or control the terminal."""
    # Nearly all lines are: `isprintable` is false for line breaks, too.
    if text.isprintable():
        return text
    lines = text.split("\n")
    return "\n    ".join(
        "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)
        for line in lines
    )


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info is None or record.exc_info[0] is None:
        return ""
    return "\n" + formatter.formatException(record.exc_info)


class Notifier:
    """Sends states to the service manager; never blocks and never raises."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL byte of a name in the abstract namespace.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket: socket.socket | None = None
        # A manager that does not read must not stop the loop.
        if self._address:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_UNIX, kind)
        limit = env.get("WATCHDOG_USEC", "")
        self.watchdog = int(limit) / 2e6 if limit.isdecimal() else 0.0
        """Seconds between two pings, half of the manager's limit; 0: no watchdog."""

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def send(self, *states: str) -> None:
        """Sends lines such as ``READY=1`` to the service manager in one datagram."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(states).encode(), self._address)
        except OSError:
            # The manager has ended or its queue is full. A lost STATUS is harmless; a
            # lost READY or WATCHDOG makes the manager restart us, which is right.
            return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def show_as(name: str, *arguments: str) -> None:
    """Makes `ps` and `top` show this command line in place of the real one, cut to the
    bytes that the real one has (proc(5): ``arg_start`` and ``arg_end``)."""
    # A forked daemon has the command line of its fork server. Python offers no way to
    # change it, so the memory of the arguments is overwritten, which has a fixed size.
    command_line = "\0".join((name, *arguments)).encode()
    with contextlib.suppress(OSError):  # no /proc, or it is read-only
        Path("/proc/self/comm").write_text(name)
        # After the last ")", as the name of the program may contain one.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, fields[45:47])
        with open("/proc/self/mem", "r+b", 0) as memory:
            memory.seek(start)
            memory.write(command_line[: end - start - 1].ljust(end - start, b"\0"))


def name_children(daemon: str) -> None:
    """Renames the processes that user code forks in this daemon, so that somebody who
    looks for the daemon, to kill it for instance, does not find them."""
    os.register_at_fork(after_in_child=partial(show_as, "zstrat-forked", "by", daemon))


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> bool:
    """Asks the kernel to kill this process when ``parent`` dies; returns False if
    ``parent`` is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # After the request: the kernel sends no signal for a parent that died before it.
    return os.getppid() == parent


def is_running(pid: int) -> bool:
    """Returns whether a process with this id exists, of any user."""
    # Signal 0 is not sent, only checked: without permission there is such a process.
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def watch_process(
    loop: asyncio.AbstractEventLoop, pid: int, end: Callable[[str], None]
) -> None:
    """Calls ``end`` with the reason once the process ``pid`` has ended.

    That process need not be the parent of this daemon: a shell may be in between.
    """
    # A descriptor stands for this process, whereas its number may be another's later.
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError) as error:
        # Also on kernels before 5.3 and other systems: better to end than to leak.
        why = getattr(error, "strerror", None) or "this system has no pidfd_open"
        end(f"cannot watch the process {pid} of --parent: {why}")
        return

    def gone() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        end(f"the process {pid} of --parent has ended")

    loop.add_reader(descriptor, gone)


class ParentWatch:
    """Calls ``end`` once, with the reason, when standard input closes, or when standard
    input brought nothing for ``timeout`` seconds (0: no limit).

    ``is_late``: the timeout was the reason.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[str], None],
        timeout: float,
    ) -> None:
        self._loop, self._end, self._timeout = loop, end, timeout
        self._stdin = sys.stdin.fileno()
        self._timer: asyncio.TimerHandle | None = None
        self.is_late = False
        # The reader may be called without data, and `_late` looks for some by itself.
        os.set_blocking(self._stdin, False)
        loop.add_reader(self._stdin, self._read)
        self._restart_timer()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._timeout:
            self._timer = self._loop.call_later(self._timeout, self._late)

    def _read(self) -> bool:
        """Reads the pending bytes of standard input; False if there were none, and no
        end of file."""
        try:
            data = os.read(self._stdin, 4096)
        except BlockingIOError:
            return False
        # What is sent has no meaning: every byte is a heartbeat.
        if data:
            self._restart_timer()
        else:
            self._finish("the launching program has ended")
        return True

    def _late(self) -> None:
        # If this process itself was stopped, the heartbeats of that time are unread.
        if not self._read():
            self.is_late = True
            self._finish(
                f"no heartbeat from the launching program for {self._timeout:g} s"
            )

    def _finish(self, reason: str) -> None:
        # A pipe at its end stays readable, and the loop would spin.
        self._loop.remove_reader(self._stdin)
        if self._timer is not None:
            self._timer.cancel()
        self._end(reason)
