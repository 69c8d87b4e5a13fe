"""Several copies of one program on this machine, each a worker of one cluster.

What ``mpirun`` and ``torchrun`` are elsewhere: every copy finds in TF_CONFIG who it is
and where the others are. The law of this file: the copies live and die together. The
first that fails ends the others, whoever ends this process ends them all, and its exit
code is that of the one that failed.

A copy leads a process group of its own, so that what it started ends with it, and
Ctrl-C at the terminal reaches it once, through us.
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
from zstrat.transport import on_own_thread

from ._child import end_words, inherited, shell_code
from ._runtime_dir import divided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Write = Callable[[str], None]
    """Takes one line of output, without its end."""

_WATCH_PARENT: Final = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
os.execvp(sys.argv[1], sys.argv[1:])
"""
WATCHING_PARENT: Final = (sys.executable, "-I", "-S", "-c", _WATCH_PARENT)
"""Asks the kernel to end the process when we are gone, then becomes the command: a
program that has threads must run nothing between fork and exec. The kernel means our
*thread*, so the loop's has to live as long as the copies do."""

_LONGEST_LINE: Final = 2**20
"""Bytes of output without a line end that are kept back for it."""


@dataclass(frozen=True, slots=True)
class Copies:
    """What to run, and how often.

    ``command`` is run ``count`` times. ``sockets`` is "ipc" (in a folder that only this
    user can enter) or "tcp" (loopback ports). A copy that fails is started again up to
    ``restarts`` times, all copies taken together, while the others go on. Once one has
    failed for good, the others have ``notice`` seconds to end by themselves, and to say
    whom they lost. Whoever does not end within ``drain`` seconds of SIGTERM is killed.
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
    """Runs all copies to their end; returns 0, or the code of the first that failed.

    A copy that a signal ended has 128 + its number, as in a shell. ``write`` gets every
    line of their output, behind the name of the task.

    A command that is not there is a failure of its copy, whose output says so.

    Raises:
        What ``write`` raised; all copies have ended then.
        OSError: A process cannot be started.

    Cancellation: ends all copies, then is raised.
    """
    with _addresses(copies) as addresses:
        return await _CopiesRun(copies, addresses, write).whole()


class _CopiesRun:
    def __init__(self, copies: Copies, addresses: Sequence[str], write: Write) -> None:
        self._copies, self._write = copies, write
        self._cluster = {"worker": list(addresses)}
        self._found = divided(inherited(), copies.count)
        self._left = copies.restarts
        self._is_ending = False
        self._groups: set[int] = set()

    async def whole(self) -> int:
        """Runs all copies to their end; see `run_copies`."""
        tasks = [
            asyncio.create_task(self._copy(index), name=f"worker:{index}")
            for index in range(self._copies.count)
        ]
        try:
            for done in asyncio.as_completed(tasks):
                code = await done
                if code:
                    await asyncio.wait(tasks, timeout=self._copies.notice)
                    return code
            return 0
        finally:
            await self._end(tasks)

    async def _copy(self, index: int) -> int:
        """One copy and its successors; the exit code of the last of them, as shells
        give it: above 128 it was a signal."""
        while True:
            code = await self._process(index)
            if not code or self._is_ending:
                return shell_code(code)
            ended = f"worker:{index} {end_words(code)}"
            if not self._left:
                self._is_ending = True  # others that fail now were brought down by it
                self._write(f"{ended}: ending the others")
                return shell_code(code)
            self._left -= 1
            self._write(f"{ended}: starting it anew")

    async def _process(self, index: int) -> int:
        process = _started(self._copies.command, self._environment(index))
        self._groups.add(process.pid)
        try:
            async with asyncio.TaskGroup() as group:
                relay = self._relay(index, process.stdout)
                group.create_task(relay, name=f"output of worker:{index}")
                code = await on_own_thread(process.wait)
                # What it started ends with it, and lets go of its output.
                _signal(process.pid, signal.SIGKILL)
                self._groups.discard(process.pid)
        except ExceptionGroup as failed:  # of the relay alone: nobody takes its lines
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
        """Ends what still runs: asked first, then killed."""
        self._is_ending = True
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a frozen one would sleep through it
        try:
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
        # Whoever watches wants lines when they are printed.
        found = self._found[index]
        return {"PYTHONUNBUFFERED": "1", **found, "TF_CONFIG": config}


def _started(
    command: tuple[str, ...], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a copy. Not by the loop: uvloop forks, with the hooks of all that is
    loaded here."""
    return subprocess.Popen(
        [*WATCHING_PARENT, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


async def _line_of(reader: asyncio.StreamReader) -> bytes:
    """The next line, or a piece of one that is too long; empty at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError:
        return await reader.read(_LONGEST_LINE)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@contextlib.contextmanager
def _addresses(copies: Copies) -> Iterator[list[str]]:
    """One address for each copy, free for as long as the context lasts."""
    if copies.sockets == "tcp":
        # Another process may take one before its copy binds it, which then says so.
        yield [f"127.0.0.1:{port}" for port in free_ports(copies.count)]
        return
    with tempfile.TemporaryDirectory(prefix="zstrat-") as folder:  # of mode 0700
        yield [f"ipc://{Path(folder) / f'worker-{n}'}" for n in range(copies.count)]
