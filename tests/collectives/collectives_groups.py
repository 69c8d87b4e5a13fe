"""Groups whose ranks are threads of the test: real sockets, one process."""

from __future__ import annotations

import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from zstrat.cluster import ClusterSpec, SimpleClusterResolver, free_ports
from zstrat.collectives import Group
from zstrat.config import Settings, Timeouts

QUICK = Settings(
    timeouts=Timeouts(beat=0.2, liveness=2.0, reconnect=0.3), transport="tcp"
)


class Ranks:
    """``size`` places for ranks, and what is done on all of them at the same time.

    ``over``: "ipc", where all goes by the messages of links, or "tcp", where ranks that
    share no memory have data connections.
    """

    def __init__(self, size, folder, jobs="worker", over="ipc"):
        self.size, self.folder = size, Path(folder)
        addresses = [f"ipc://{self.folder}/{rank}" for rank in range(size)]
        if over == "tcp":
            addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
        self.spec = ClusterSpec({jobs: addresses})
        self._job = jobs
        self._threads = ThreadPoolExecutor(size + 2, "rank")
        # All of them now: one that a pool adds later would belong to some test.
        all_there = threading.Barrier(size + 2)
        for _ in range(size + 2):
            self._threads.submit(all_there.wait, 30)
        self._groups = []

    def resolver(self, rank):
        return SimpleClusterResolver(self.spec, task_type=self._job, task_id=rank)

    def group(self, rank, **options):
        """The group of one rank; blocks until all are there."""
        options = {"settings": QUICK, "rendezvous_timeout": 20, "timeout": 20} | options
        group = Group(self.resolver(rank), **options)
        self._groups.append(group)
        return group

    def start(self, function, *args):
        """Runs it on a thread; a future."""
        return self._threads.submit(function, *args)

    def groups(self, **options):
        """One group per rank, in order."""
        return self.each(partial(self.group, **options), range(self.size))

    def each(self, function, items):
        """What the function gives for every item, all at the same time; the first
        error is raised when all are through."""
        futures = [self.start(function, item) for item in items]
        for future in futures:
            future.exception(60)
        return [future.result() for future in futures]

    def outcomes(self, function, items):
        """As `each`, but errors are results."""
        futures = [self.start(function, item) for item in items]
        return [future.exception(60) or future.result() for future in futures]

    def close(self):
        for group in self._groups:
            group.close()
        self._threads.shutdown()


@contextmanager
def ranks_of(size, **options):
    folder = tempfile.mkdtemp(prefix="zs-")
    ranks = Ranks(size, folder, **options)
    try:
        yield ranks
    finally:
        ranks.close()
        shutil.rmtree(folder)


def patient(seconds):
    """Settings that take a rank for lost only after so long."""
    return replace(QUICK, timeouts=replace(QUICK.timeouts, liveness=seconds))
