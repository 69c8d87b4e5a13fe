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
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zstrat.config import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Write = Callable[[str], None]
    """Takes one line of output, without its end."""

_LEASH: Final = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
os.execvp(sys.argv[1], sys.argv[1:])
"""
_LEASHED: Final = (sys.executable, "-I", "-S", "-c", _LEASH)
"""Asks the kernel to end this process when we are gone, then becomes the command: a
program that has threads must run nothing between fork and exec."""

_LONGEST_LINE: Final = 2**20
"""Bytes of output without a line end that are kept back for it."""


@dataclass(frozen=True, slots=True)
class Copies:
    """What to run, and how often.

    ``command`` is run ``count`` times. ``sockets`` is "ipc" (in a folder that only this
    user can enter) or "tcp" (loopback ports). A copy that fails is started again up to
    ``restarts`` times, all copies taken together, while the others go on. Whoever does
    not end within ``drain`` seconds of SIGTERM is killed.
    """

    command: tuple[str, ...]
    count: int
    sockets: str = "ipc"
    restarts: int = 0
    drain: float = 10.0

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

    Cancellation: ends all copies, then is raised.

    Raises:
        OSError: The command cannot be started.
    """
    with _addresses(copies) as addresses:
        return await _Run(copies, addresses, write).whole()


class _Run:
    def __init__(self, copies: Copies, addresses: Sequence[str], write: Write) -> None:
        self._copies, self._write = copies, write
        self._cluster = {"worker": list(addresses)}
        self._left = copies.restarts
        self._is_ending = False
        self._groups: set[int] = set()

    async def whole(self) -> int:
        """See `run_copies`."""
        tasks = [
            asyncio.create_task(self._copy(index), name=f"worker:{index}")
            for index in range(self._copies.count)
        ]
        try:
            for done in asyncio.as_completed(tasks):
                code = await done
                if code:
                    return code
            return 0
        finally:
            await self._end(tasks)

    async def _copy(self, index: int) -> int:
        """One copy and its successors; the exit code of the last of them."""
        while True:
            code = await self._process(index)
            if not code or self._is_ending:
                return code
            ended = f"worker:{index} ended with exit code {code}"
            if not self._left:
                self._write(f"{ended}: ending the others")
                return code
            self._left -= 1
            self._write(f"{ended}: starting it anew")

    async def _process(self, index: int) -> int:
        process = await asyncio.create_subprocess_exec(
            *_LEASHED,
            *self._copies.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(index),
            limit=_LONGEST_LINE,
            start_new_session=True,
        )
        self._groups.add(process.pid)
        try:
            assert process.stdout is not None
            async with asyncio.TaskGroup() as group:
                relay = self._relay(index, process.stdout)
                group.create_task(relay, name=f"output of worker:{index}")
                code = await process.wait()
                # What it started ends with it, and lets go of its output.
                _signal(process.pid, signal.SIGKILL)
        finally:
            if process.returncode is not None:
                self._groups.discard(process.pid)
        return code if code >= 0 else 128 - code

    async def _relay(self, index: int, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                line = end.partial
                if not line:
                    return
            except asyncio.LimitOverrunError:
                line = await output.read(_LONGEST_LINE)
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
        inherited = dict(environment())
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC"):
            inherited.pop(name, None)  # they speak of this process
        # Whoever watches wants lines when they are printed.
        return {"PYTHONUNBUFFERED": "1", **inherited, "TF_CONFIG": config}


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@contextlib.contextmanager
def _addresses(copies: Copies) -> Iterator[list[str]]:
    """One address for each copy, free for as long as the context lasts."""
    if copies.sockets == "tcp":
        yield _free_ports(copies.count)
        return
    with tempfile.TemporaryDirectory(prefix="zstrat-") as folder:  # of mode 0700
        yield [f"ipc://{Path(folder) / f'worker-{n}'}" for n in range(copies.count)]


def _free_ports(count: int) -> list[str]:
    """Ports that nobody has now. Another process may take one before its copy binds
    it, and that copy then says so."""
    with contextlib.ExitStack() as held:
        bound = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in bound]
