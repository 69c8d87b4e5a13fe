"""Ranks that are real processes, and what a test tells them."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 60.0


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
            assert self._wire.poll(PATIENCE), "the rank does not answer"
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
        self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self._wire.send(None)
            try:
                self.process.wait(PATIENCE)
            finally:
                self.kill()
        self._wire.close()


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
