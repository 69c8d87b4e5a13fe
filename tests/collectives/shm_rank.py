"""One rank in a process of its own, told by the test what to do; see `shm_ranks`.

Calls run on a thread, one after the other, so that the rank still listens while it
waits for others. Every command is answered by its number and what came of it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from zstrat.collectives import Call, Kind, ReduceOp, SharedMemory
from zstrat.errors import PeerLostError
from zstrat.wire import DTYPES, MemberEntry


class Rank:
    def __init__(self) -> None:
        self.memory, self.engine = None, None

    def entry(self, rank, host):
        self.memory = SharedMemory()
        shared = (self.memory.descriptor, self.memory.capacity, self.memory.word)
        task = f"/job:worker/task:{rank}"
        return tuple(MemberEntry(task, "", host, os.getpid(), 1, *shared))

    def attach(self, rank, members):
        members = [MemberEntry(*member) for member in members]
        self.engine = self.memory.attach(rank, members, None)

    def close(self):
        self.engine.close()
        self.memory.close()
        self.engine = self.memory = None

    def run(self, kind, dtype, source, count, options, times=1):
        """``source``: bytes; ``count``: elements of the target, None: in place."""
        source = np.frombuffer(source, DTYPES[dtype]).copy()
        target = source if count is None else np.empty(count, source.dtype)
        call = Call(1, Kind(kind), source, target, 7, kind, math.inf)
        call = replace(call, **options)
        assert self.engine.takes(call)
        for _ in range(times):
            self.engine.run(call)
        return target.tobytes()

    def size_of(self, kind, megabytes):
        """A reduction that is not meant to end, of zeros."""
        source = np.zeros(megabytes * 2**18, np.float32)
        call = Call(1, Kind(kind), source, source, 7, kind, math.inf, ReduceOp.SUM)
        while True:
            self.engine.run(call)

    def waits(self):
        return self.engine.waits()

    def lose(self, rank):
        """What the node does when the link to a rank breaks."""
        self.engine.abort(PeerLostError(f"rank {rank}", "the link is gone"))

    def used(self):
        """Descriptors, threads, mapped regions of ours, and resident bytes."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        maps = Path("/proc/self/maps").read_text().count("memfd:zstrat")
        files = len(os.listdir("/proc/self/fd"))
        return files, threading.active_count(), maps, resident


AT_ONCE = ("waits", "lose")


def main(connection: Connection) -> None:
    rank, commands = Rank(), SimpleQueue()

    def answer(number, name, arguments):
        try:
            outcome = (number, "done", getattr(rank, name)(*arguments))
        except Exception as error:  # goes to the test
            outcome = (number, type(error).__name__, error.args)
        connection.send(outcome)

    def work():
        while (command := commands.get()) is not None:
            answer(*command)

    thread = threading.Thread(target=work)
    thread.start()
    while (command := connection.recv()) is not None:
        if command[1] in AT_ONCE:
            answer(*command)
        else:
            commands.put(command)
    commands.put(None)
    thread.join()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
