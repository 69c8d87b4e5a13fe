"""Runs programs of the user: several copies of one program as a cluster, like
``mpirun`` and ``torchrun``, or one program that uses a fleet.

Each copy finds its task and the addresses of the others in TF_CONFIG. Law: the copies
live and die together. The first copy that fails ends the others, the end of this
process ends all of them, and its exit code is that of the copy that failed.

Each copy leads its own process group, so that the processes that it starts end with it,
and Ctrl-C in the terminal reaches it only once, through this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from zstrat.cluster import free_ports
from zstrat.signals import handle
from zstrat.transport import on_own_thread

from ._child import end_words, inherited_environment, shell_code
from ._run_folder import addresses_in
from ._started_tasks import environments_with_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zstrat.cluster import ClusterSpec

    Write = Callable[[str], None]
    """A function that takes one line of output, without its line end."""

_WATCH_PARENT: Final = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
os.execvp(sys.argv[1], sys.argv[1:])
"""
WATCHING_PARENT: Final = (sys.executable, "-I", "-S", "-c", _WATCH_PARENT)
"""A prefix for commands: asks the kernel to kill the process when its parent ends, then
execs the command. (A program with threads must run no code between fork and exec.) For
the kernel the parent is the *thread* that started the process, so that the thread of
the loop has to live as long as the copies do."""

FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on to the program; SIGINT is not, as the terminal sends it to
both processes."""

_LONGEST_LINE: Final = 2**20
"""Bytes of the longest line of output; a longer line is split."""


@dataclass(frozen=True, slots=True)
class Copies:
    """A command, and how to run copies of it.

    Args:
        command: The command line of each copy.
        count: Number of copies.
        sockets: "ipc" (in a folder that only this user can enter) or "tcp" (loopback).
        restarts: Number of restarts of failed copies, of all copies together.
        drain: Seconds from SIGTERM to SIGKILL.
        notice: Seconds that the other copies have, once one has failed for good, to end
            by themselves and report which peer they lost.
    """

    command: tuple[str, ...]
    count: int
    sockets: str = "ipc"
    restarts: int = 0
    drain: float = 10.0
    notice: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count}: expected 1 or more")
        if self.restarts < 0:
            raise ValueError(f"restarts={self.restarts}: expected 0 or more")
        if self.sockets not in ("ipc", "tcp"):
            raise ValueError(f"sockets={self.sockets!r}: expected 'ipc' or 'tcp'")


async def run_copies(copies: Copies, write: Write) -> int:
    """Runs all copies to their end; returns 0, or the exit code of the first copy that
    failed.

    The code of a copy that a signal ended is 128 + its number, as in a shell. A missing
    command is a failure of its copy. ``write`` receives every line of output, prefixed
    with the name of the task.

    Raises:
        Any error of ``write``, after all copies have ended.
        OSError: A process cannot be started.
        ValueError: The temporary folder has too long a path for sockets.

    Cancellation: ends all copies, then raises.
    """
    with _addresses(copies) as addresses:
        return await _CopiesRun(copies, addresses, write).run()


def run_with_cluster(spec: ClusterSpec, keys: Path, command: Sequence[str]) -> int:
    """Runs a program of the user with a cluster in its environment, and forwards
    signals to the program; returns its exit code, or 128 + the number of the signal
    that ended it.

    Call this on the main thread. The program inherits the standard streams.

    Args:
        spec: The cluster, for TF_CONFIG.
        keys: The folder of the cluster's keys, for ZSTRAT_KEYS.

    Raises:
        OSError: The program cannot be started.
    """
    # Without a task: the program is not one.
    config = {"cluster": spec.as_dict()}
    env = {
        **inherited_environment(),
        "TF_CONFIG": json.dumps(config),
        "ZSTRAT_KEYS": str(keys),
    }
    # It may share a GPU with a worker, and must not allocate all memory of it.
    env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    received: list[int] = []
    before = {
        number: signal.getsignal(number) for number in (*FORWARDED, signal.SIGINT)
    }
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    try:
        # Handlers come before the process, so that no signal ends us and leaves it.
        for number in FORWARDED:
            if before[number] is not signal.SIG_IGN:
                handle(number, forward)
        # Not SIG_IGN, which the program would inherit: then Ctrl-C would not end it.
        handle(signal.SIGINT, lambda number, frame: None)
        process = subprocess.Popen([*WATCHING_PARENT, *command], env=env)
        # Signals that came while it was started, when `forward` had no process yet. One
        # that comes in this loop may be sent twice, which programs have to bear.
        for early in tuple(received):
            process.send_signal(early)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return shell_code(code)


class _CopiesRun:
    def __init__(self, copies: Copies, addresses: Sequence[str], write: Write) -> None:
        self._copies, self._write = copies, write
        self._cluster = {"worker": list(addresses)}
        self._variables = environments_with_gpus(inherited_environment(), copies.count)
        self._restarts_left = copies.restarts
        self._is_ending = False
        self._groups: set[int] = set()

    async def run(self) -> int:
        """Runs all copies to their end; see `run_copies`."""
        tasks = [
            asyncio.create_task(self._copy(index), name=f"worker:{index}")
            for index in range(self._copies.count)
        ]
        try:
            for done in asyncio.as_completed(tasks):
                code = await done
                if code:
                    # The others may say by themselves which peer they lost, which
                    # helps more than that they were ended.
                    await asyncio.wait(tasks, timeout=self._copies.notice)
                    return code
            return 0
        finally:
            await self._end(tasks)

    async def _copy(self, index: int) -> int:
        """Runs one copy, with its restarts; returns its last exit code, converted as in
        a shell (128 + N for signal N)."""
        while True:
            code = await self._process(index)
            if not code or self._is_ending:
                return shell_code(code)
            ended = f"worker:{index} {end_words(code)}"
            if not self._restarts_left:
                # Later failures are consequences of this one: they are not restarted,
                # nor printed.
                self._is_ending = True
                self._write(f"{ended}: ending the others")
                return shell_code(code)
            self._restarts_left -= 1
            self._write(f"{ended}: restarting it")

    async def _process(self, index: int) -> int:
        process = _start_copy(self._copies.command, self._environment(index))
        # `start_new_session` made the process the leader of its group.
        self._groups.add(process.pid)
        try:
            async with asyncio.TaskGroup() as group:
                relay = self._relay(index, process.stdout)
                group.create_task(relay, name=f"output of worker:{index}")
                code = await on_own_thread(process.wait)
                # Also the processes that it started, which may hold its output open:
                # the relay would wait for them. Then its number is not ours any longer,
                # and the system may give it to another process.
                _signal(process.pid, signal.SIGKILL)
                self._groups.discard(process.pid)
        except ExceptionGroup as failed:  # only the relay fails: an error of `write`
            raise failed.exceptions[0] from None
        return code

    async def _relay(self, index: int, output: IO[bytes] | None) -> None:
        reader = asyncio.StreamReader(_LONGEST_LINE)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        with contextlib.closing(transport):
            while line := await _line_of(reader):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                self._write(f"worker:{index} | {text}")

    async def _end(self, tasks: Sequence[asyncio.Task[int]]) -> None:
        """Ends the copies that still run: sends SIGTERM, and later SIGKILL."""
        self._is_ending = True
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a frozen process would not see SIGTERM
        try:
            # The tasks are not cancelled: they end with their processes, and relay the
            # output until then.
            await asyncio.wait(tasks, timeout=self._copies.drain)
        finally:
            self._signal(signal.SIGKILL)
            await asyncio.wait(tasks)

    def _signal(self, number: int) -> None:
        for group in self._groups:
            _signal(group, number)

    def _environment(self, index: int) -> Mapping[str, str]:
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": self._cluster, "task": task})
        # Unbuffered: lines appear when they are printed.
        variables = self._variables[index]
        return {"PYTHONUNBUFFERED": "1", **variables, "TF_CONFIG": config}


def _start_copy(
    command: tuple[str, ...], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a copy. Not through the event loop: uvloop forks, which runs the fork
    hooks of all loaded libraries."""
    return subprocess.Popen(
        [*WATCHING_PARENT, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


async def _line_of(reader: asyncio.StreamReader) -> bytes:
    """Reads the next line, or a part of a line that is too long; b"" at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError:
        # Without a line end in the buffer: its content becomes a line.
        return await reader.read(_LONGEST_LINE)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@contextlib.contextmanager
def _addresses(copies: Copies) -> Iterator[list[str]]:
    """Yields one free address for each copy."""
    if copies.sockets == "tcp":
        # Another process may bind a port before its copy, which then fails.
        yield [f"127.0.0.1:{port}" for port in free_ports(copies.count)]
        return
    with tempfile.TemporaryDirectory(prefix="zstrat-") as folder:  # of mode 0700
        address = addresses_in(Path(folder), "ipc")
        yield [address(f"worker-{n}") for n in range(copies.count)]
