"""What is attacked: a daemon of its own process, and what can be seen of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import attack_turns
import pytest
from attack_turns import Turns, opened

from zstrat.config import Settings
from zstrat.transport import Link, Security, hello, new_incarnation, run
from zstrat.wire import Inspect, Job, Statistics

MiB = 2**20

IS_HARD = os.environ.get("ZSTRAT_ATTACK") == "hard"
HARD = pytest.mark.skipif(not IS_HARD, reason="`make attack` does it")


@dataclass
class Target:
    """A ps or worker that runs, and its log."""

    job: Job
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    keys: Path | None = None
    book: Path | None = None
    """Where its loop notes its turns, if it does."""

    @property
    def is_alive(self):
        return self.process.poll() is None

    @property
    def rss(self):
        """Bytes that are resident now."""
        return self._status("VmRSS") * 1024

    @property
    def threads(self):
        return self._status("Threads")

    @property
    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def log_bytes(self):
        return self.log.stat().st_size

    @property
    def words(self):
        return self.log.read_text()

    def _status(self, name):
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(each for each in lines if each.startswith(name)).split()[1])

    def turns(self, since=None):
        """Those of its loop; of one that notes them."""
        assert self.book is not None
        return Turns(tuple(opened(self.book, new=False)), since)

    def inspect(self):
        """What it says of itself to an honest observer that comes now."""
        return run(self._inspected())

    async def _inspected(self):
        async with self.honest() as link:
            answer = await link.request(Inspect())
            assert isinstance(answer, Statistics)
            return dict(answer.values)

    @contextlib.asynccontextmanager
    async def honest(self, job=Job.OBSERVER, index=0):
        """An honest link; it is up within half a minute, whatever goes on."""
        keys = self.keys
        link = Link(
            self.address,
            hello(job, index, new_incarnation()),
            name=f"{self.job}:0",
            settings=Settings(),
            security=None if keys is None else Security.load(keys, job),
            expect=(self.job, 0),
        )
        link.start()
        try:
            await link.wait_open(asyncio.get_running_loop().time() + 30)
            yield link
        finally:
            await link.close()

    async def settles(self, under, patience=10):
        """Its memory, once it is below so many bytes; what it is in the end if not."""
        deadline = time.monotonic() + patience
        async with self.honest() as link:
            while self.rss > under and time.monotonic() < deadline:
                await link.request(Inspect())
        return self.rss


@contextlib.contextmanager
def target(
    job,
    folder,
    keys=None,
    *,
    noting=False,
    **env,
):
    """A daemon of ``job``, killed afterwards; its log is in the folder.

    Args:
        noting: It runs on a loop that notes its turns.
    """
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = folder / f"notify-{new_incarnation():x}"
    manager.bind(str(name))
    manager.settimeout(60)
    log = name.with_suffix(".log")
    argv = ["--index", "0", "--bind", "127.0.0.1:0"]
    argv += [] if keys is None else ["--keys", str(keys)]
    book = name.with_suffix(".turns") if noting else None
    daemon = ["-m", f"zstrat.daemons.{job}"]
    if book is not None:
        daemon = [attack_turns.__file__, str(book), str(job)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *daemon, *argv],
            env={**os.environ, "NOTIFY_SOCKET": str(name), "TF_CONFIG": "{}", **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        while "READY=1" not in (said := manager.recv(4096).decode()):
            pass
        address = said.split("serving at ")[1].split("\n")[0]
        manager.close()
        yield Target(job, address, process, log, keys, book)
    finally:
        manager.close()
        process.kill()
        process.wait()
