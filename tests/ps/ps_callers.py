"""A parameter server in this process, and who talks to it."""

import asyncio
import threading

import numpy as np
import optax

from zstrat.config import Settings
from zstrat.ps import PsService
from zstrat.testing import FakeRemote
from zstrat.wire import (
    CreateVariables,
    Done,
    Job,
    OpenSession,
    VariableEntry,
)

SESSION = 7


def caller(role=Job.CHIEF, incarnation=SESSION):
    """What the service knows of a connection."""
    return FakeRemote(role, incarnation)


class Gated:
    """A parameter server, taken by ``chief``, that loads code while ``gate`` is open:
    what was shipped under that name, or plain descent."""

    def __init__(self, shipped=None):
        self.shipped = shipped
        self.gate = threading.Event()
        self.gate.set()
        self.service = PsService(
            load_code=self.load, settings=Settings(), task="/job:ps/task:0"
        )
        self.chief = caller()
        self.ask(OpenSession(SESSION, 0, 1, []))

    def load(self, code):
        assert self.gate.wait(100), "the test never opened the gate"
        return optax.sgd(0.5) if self.shipped is None else self.shipped[code]

    def ask(self, message, peer=None):
        return self.service.handle(peer or self.chief, message)

    async def answer(self, message, peer=None):
        async with asyncio.timeout(60):
            answer = self.ask(message, peer)
            return await answer if asyncio.isfuture(answer) else answer

    def create(self, values: dict[int, np.ndarray]):
        entries = [VariableEntry(key, f"t{key}", True, True) for key in values]
        message = CreateVariables(SESSION, entries, tuple(values.values()))
        assert self.ask(message) == Done()
