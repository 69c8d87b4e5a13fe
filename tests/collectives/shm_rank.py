"""One rank in a process of its own, told by the test what to do; see `shm_ranks`.

Calls run on a thread, one after the other, so that the rank still listens while it
waits for others. Every command is answered by its number and what came of it.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from zstrat.collectives import CallKind, CollectiveCall, ReduceOp, SharedMemory
from zstrat.errors import PeerLostError
from zstrat.wire import DTYPES, MemberEntry


def drawn(rank, count):
    """What a rank draws by its number; what is drawn once comes again and again, never
    at the same place of a part."""
    some = np.random.default_rng(rank).standard_normal(100_003, np.float32)
    return np.resize(some, count)


class Between:
    """Stands in for messages between hosts, by shared memory of the first ranks: parts
    are carried out one by one on a thread, some time after they were started."""

    def __init__(self, engine, leaders):
        self.engine, self.leaders, self.parts = engine, leaders, []
        self.algorithms = []
        self.thread = ThreadPoolExecutor(1)

    def start(self, call, ranks, part):
        assert list(ranks) == self.leaders
        self.parts.append(part)
        self.algorithms.append(call.algorithm)
        return Part(self.thread.submit(self.engine.run, call))

    def since(self, name):
        found = getattr(self, name)
        setattr(self, name, [])
        return found


class Part:
    def __init__(self, future):
        self.wait = future.result


class Rank:
    def __init__(self) -> None:
        self.memory = self.engine = self.outer = self.between = None

    def entry(self, rank, host):
        """What others learn of it as a rank, and as a first rank of its host."""
        self.memory, self.outer = SharedMemory(), SharedMemory()
        return tuple(
            tuple(
                MemberEntry(
                    *(f"/job:worker/task:{rank}", "", name, os.getpid(), 1),
                    *(shared.descriptor, shared.capacity, shared.word),
                )
            )
            for name, shared in ((host, self.memory), ("all", self.outer))
        )

    def attach(self, rank, entries):
        members, outer = (
            [MemberEntry(*e) for e in row] for row in zip(*entries, strict=True)
        )
        hosts = [member.host for member in members]
        leaders = sorted(hosts.index(host) for host in set(hosts))
        if len(leaders) > 1 and rank in leaders:
            firsts = [outer[leader] for leader in leaders]
            place = leaders.index(rank)
            self.outer.reach(place, firsts)
            engine = self.outer.attach(place, [0] * len(firsts), None)
            self.between = Between(engine, leaders)
        self.memory.reach(rank, members)
        firsts = [hosts.index(host) for host in hosts]
        self.engine = self.memory.attach(rank, firsts, self.between)

    def reach(self, rank, entries):
        return self.memory.reach(rank, [MemberEntry(*row[0]) for row in entries])

    def close(self):
        self.engine.close()
        if self.between is not None:
            self.between.thread.shutdown()
            self.between.engine.close()
        self.memory.close()
        self.outer.close()
        self.memory = self.engine = self.outer = self.between = None

    def parts(self):
        """The numbers of the parts that went to other hosts since this was asked."""
        return self.between.since("parts") if self.between else []

    def algorithms(self):
        """What was asked for of each call that went to other hosts since."""
        return self.between.since("algorithms") if self.between else []

    def takes(self, kind, options):
        nothing = np.zeros(0, np.float32)
        call = CollectiveCall(
            1, CallKind(kind), nothing, nothing, 7, kind, math.inf, 60.0
        )
        return self.engine.takes(replace(call, **options))

    def run(self, kind, dtype, source, count, options, times=1):
        """``source``: bytes; ``count``: elements of the target, None: in place. What
        is frozen is read-only, as the memory of jax is."""
        source = np.frombuffer(source, DTYPES[dtype])
        if not options.get("is_frozen"):
            source = source.copy()
        target = source if count is None else np.empty(count, source.dtype)
        call = CollectiveCall(
            1, CallKind(kind), source, target, 7, kind, math.inf, 60.0
        )
        call = replace(call, **options)
        assert self.engine.takes(call)
        for _ in range(times):
            self.engine.run(call)
        return target.tobytes()

    def run_random(self, rank, count):
        """A sum of what each rank draws by its number: its digest, and its end."""
        source = drawn(rank, count)
        call = CollectiveCall(
            1, CallKind.ALL_REDUCE, source, source, 7, "", math.inf, 60.0
        )
        self.engine.run(call)
        return zlib.crc32(source), source[-1000:].copy()

    def run_for_ever(self, kind, count):
        """Until it fails."""
        source = np.zeros(count, np.float32)
        call = CollectiveCall(
            1, CallKind(kind), source, source, 7, kind, math.inf, 60.0, ReduceOp.SUM
        )
        while True:
            self.engine.run(call)

    def waits(self):
        return self.engine.waits()

    def lose(self, rank):
        """What the node does when the link to a rank breaks."""
        self.engine.abort(PeerLostError(f"rank {rank}", "the link is gone"))

    def used(self):
        """Descriptors, threads, mapped regions of ours, and resident bytes."""
        gc.collect()  # an error that was raised keeps what its frames had
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
    # Where a first rank was killed, what plays the network waits for it for ever.
    os._exit(0)
