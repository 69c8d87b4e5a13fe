"""What memory reaches between ranks of one host: the floor of an all-reduce, and the
engine of `zstrat.collectives` alone, without a group around it.

The floor is numpy only: chunks of 1 MiB through reused shared memory, and a barrier
that spins on counters (and yields the core where ranks outnumber cores). It has no
deadlines, finds no mistakes, and hangs when a rank dies.

    python -m benchmarks.raw_shared [--busy]     # beside a process that computes

Cross-core speed has modes that last a whole run: start it several times.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing import shared_memory
from typing import TYPE_CHECKING

import numpy as np

from zstrat.collectives import CallKind, CollectiveCall, SharedMemory
from zstrat.wire import MemberEntry

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.shared_memory import SharedMemory as Named

CHUNK = 2**20
PAGE = 4096


class Floor:
    """One rank of the floor. ``names``: the memory of each rank."""

    def __init__(self, rank: int, names: list[str]) -> None:
        self.rank, self.size, self.step = rank, len(names), 0
        self.named = [shared_memory.SharedMemory(name) for name in names]
        self.slots = [self._floats(each, PAGE) for each in self.named]
        self.result = self._floats(self.named[0], PAGE + CHUNK)
        self.counters = [each.buf[:8].cast("Q") for each in self.named]
        self.yields = self.size > len(os.sched_getaffinity(0))

    @staticmethod
    def _floats(named: Named, offset: int) -> np.ndarray:
        return np.frombuffer(named.buf, np.float32, CHUNK // 4, offset)

    def barrier(self) -> None:
        self.step += 1
        self.counters[self.rank][0] = self.step
        for counter in self.counters:
            while counter[0] < self.step:
                if self.yields:
                    os.sched_yield()

    def all_reduce(self, source: np.ndarray, target: np.ndarray) -> None:
        for start in range(0, source.size, CHUNK // 4):
            end = min(start + CHUNK // 4, source.size)
            count = end - start
            self.slots[self.rank][:count] = source[start:end]
            self.barrier()
            low = self.rank * count // self.size
            high = (self.rank + 1) * count // self.size
            total = self.result[low:high]
            np.add(self.slots[0][low:high], self.slots[1][low:high], out=total)
            for slot in self.slots[2:]:
                np.add(total, slot[low:high], out=total)
            self.barrier()
            target[start:end] = self.result[:count]


def _floor_rank(wire: Connection, rank: int, size: int) -> None:
    names, nbytes, repeats = wire.recv()
    floor = Floor(rank, names)
    wire.send(_time(floor.all_reduce, nbytes, repeats))
    os._exit(0)  # views of the memory are alive: nothing else to tear down


def _engine_rank(wire: Connection, rank: int, size: int) -> None:
    memory = SharedMemory()
    shared = (memory.descriptor, memory.capacity, memory.word)
    wire.send(tuple(MemberEntry(f"rank {rank}", "", "here", os.getpid(), 1, *shared)))
    entries, nbytes, repeats = wire.recv()
    engine = memory.attach(rank, [MemberEntry(*each) for each in entries], None)

    def all_reduce(source: np.ndarray, target: np.ndarray) -> None:
        engine.run(
            CollectiveCall(
                1, CallKind.ALL_REDUCE, source, target, 1, "", math.inf, 60.0
            )
        )

    wire.send(_time(all_reduce, nbytes, repeats))


def _time(
    all_reduce: Callable[[np.ndarray, np.ndarray], None], nbytes: int, repeats: int
) -> float:
    """Median of back-to-back calls; the first quarter warms up."""
    source = np.ones(nbytes // 4, np.float32)
    target = np.zeros_like(source)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        all_reduce(source, target)
        times.append(time.perf_counter() - started)
    return statistics.median(times[repeats // 4 :])


def _ranks(run: Callable[..., None], size: int):
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    started = [
        context.Process(target=run, args=(theirs, rank, size))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in started:
        process.start()
    return started, [ours for ours, _ in pipes]


def floor(size: int, nbytes: int, repeats: int) -> float:
    """Seconds of one all-reduce (float32, sum) of ``nbytes`` by ``size`` ranks."""
    named = [
        shared_memory.SharedMemory(create=True, size=PAGE + 2 * CHUNK)
        for _ in range(size)
    ]
    try:
        processes, wires = _ranks(_floor_rank, size)
        for wire in wires:
            wire.send(([each.name for each in named], nbytes, repeats))
        return _finish(processes, wires)
    finally:
        for each in named:
            each.close()
            each.unlink()


def engine(size: int, nbytes: int, repeats: int) -> float:
    """The same by the engine of a group on one host."""
    processes, wires = _ranks(_engine_rank, size)
    entries = [wire.recv() for wire in wires]
    for wire in wires:
        wire.send((entries, nbytes, repeats))
    return _finish(processes, wires)


def _finish(processes, wires) -> float:
    times = [wire.recv() for wire in wires]
    for process in processes:
        process.join()
    return statistics.median(times)


def _compute() -> None:
    numbers = np.ones(2**14)
    while True:
        np.sqrt(numbers, out=numbers)


def main() -> None:
    beside = multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
    if "--busy" in sys.argv:
        beside.start()
    for size in (2, 4):
        for nbytes, repeats in ((2**26, 12), (2**20, 300), (2**12, 1000)):
            ours = engine(size, nbytes, repeats) * 1e3
            # Spinning without end beside others would measure the scheduler alone.
            least = math.nan if beside.pid else floor(size, nbytes, repeats) * 1e3
            print(
                f"{size} ranks, {nbytes >> 10} KiB: {ours:.4f} ms, floor {least:.4f} ms"
            )


if __name__ == "__main__":
    main()
