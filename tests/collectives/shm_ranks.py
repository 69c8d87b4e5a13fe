"""Ranks that are real processes, and what a test tells them."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zstrat.wire import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = 250.0

UFUNCS = {"SUM": np.add, "MEAN": np.add, "MIN": np.minimum, "MAX": np.maximum}


@dataclass(frozen=True)
class Refused:
    """The error that a rank raised."""

    kind: str
    args: tuple


class RankProcess:
    """`shm_rank.py`, and the wire to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        script = str(Path(__file__).with_name("shm_rank.py"))
        fd = theirs.fileno()
        command = [sys.executable, script, str(fd)]
        self.process = subprocess.Popen(command, pass_fds=[fd])
        theirs.close()
        self._wire = Connection(ours.detach())
        self._numbers, self._answers = count(), {}

    def ask(self, name: str, *arguments: Any) -> int:
        number = next(self._numbers)
        self._wire.send((number, name, arguments))
        return number

    def answer(self, number: int) -> Any:
        while number not in self._answers:
            assert self._wire.poll(TIMEOUT), "the rank does not answer"
            got, kind, outcome = self._wire.recv()
            self._answers[got] = outcome if kind == "done" else Refused(kind, outcome)
        return self._answers.pop(number)

    def is_answered(self, number: int, timeout: float = 0.0) -> bool:
        """False as well if nothing came within ``timeout``."""
        if number not in self._answers and self._wire.poll(timeout):
            got, kind, outcome = self._wire.recv()
            self._answers[got] = outcome if kind == "done" else Refused(kind, outcome)
        return number in self._answers

    def tell(self, name: str, *arguments: Any) -> Any:
        return self.answer(self.ask(name, *arguments))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT)

    def close(self) -> None:
        if self.process.poll() is None:
            self._wire.send(None)
            try:
                self.process.wait(TIMEOUT)
            finally:
                self.kill()
        self._wire.close()


@contextmanager
def rank_processes(size: int) -> Iterator[list[RankProcess]]:
    processes = [RankProcess() for _ in range(size)]
    yield processes
    for process in processes:
        process.close()


class Ranks:
    """A group of them; ``hosts`` names the host that each pretends to run on."""

    def __init__(self, processes: list[RankProcess], hosts: str = "") -> None:
        self.processes = processes
        hosts = hosts or "h" * len(processes)
        entries = [
            process.tell("entry", i, hosts[i]) for i, process in enumerate(processes)
        ]
        for answer in self.all("attach", [(i, entries) for i in range(len(entries))]):
            assert answer is None, answer

    def all(self, name: str, arguments: list[tuple]) -> list[Any]:
        """Every rank does it at the same time."""
        numbers = [
            process.ask(name, *each)
            for process, each in zip(self.processes, arguments, strict=True)
        ]
        return [
            process.answer(number)
            for process, number in zip(self.processes, numbers, strict=True)
        ]

    def close(self) -> None:
        self.all("close", [()] * len(self.processes))


def given(dtype, sizes, seed=0):
    """An array a rank; whole numbers that every dtype holds, so are their sums."""
    draw = np.random.default_rng(seed)
    most = 2 if dtype.startswith("float8") else 9
    least = 0 if dtype.startswith(("u", "bool")) else -most
    return [draw.integers(least, most, n).astype(DTYPES[dtype]) for n in sizes]


def reduced(op, arrays):
    """By numpy, in the order of ranks, in f32 where the dtype has fewer bits."""
    dtype = arrays[0].dtype
    is_small = dtype.itemsize < 4 and dtype.name.startswith(("f", "b"))
    if op in ("SUM", "MEAN") and is_small:
        arrays = [array.astype(np.float32) for array in arrays]
    total = arrays[0]
    for array in arrays[1:]:
        total = UFUNCS[op](total, array)
    return (total / len(arrays) if op == "MEAN" else total).astype(dtype)


def run(ranks, kind, sources, counts, times=1, **options):
    """The targets of all ranks, as arrays."""
    dtype = sources[0].dtype
    commands = [
        (kind, dtype.name, source.tobytes(), count, options, times)
        for source, count in zip(sources, counts, strict=True)
    ]
    answers = ranks.all("run", commands)
    return [np.frombuffer(answer, dtype) for answer in answers]


def same(got, want):
    for rank, array in enumerate(got):
        assert array.tobytes() == want.tobytes(), f"rank {rank}"
