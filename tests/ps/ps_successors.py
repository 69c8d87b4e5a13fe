"""A parameter server that ends in this process, and the one that goes on for it."""

import asyncio
from contextlib import asynccontextmanager

import optax
from ps_callers import SESSION, caller

from zstrat.config import Settings
from zstrat.ps import Handover, Inherited, PsService
from zstrat.wire import Job, OpenSession

TASK = "/job:ps/task:0"
CODES = {
    b"adam": optax.adam(0.1),
    b"adagrad": optax.adagrad(0.1),
    b"sgd": optax.sgd(0.5),
}


class Successors:
    """``service`` is the process of the moment; `hand_over` begins the next one.

    Args:
        folder: Where states go.
    """

    def __init__(self, folder):
        self.folder, self.chief = folder, caller()
        self.worker = caller(Job.WORKER, 8)
        self.service = self._started()
        self.is_over = False

    def _started(self):
        self.handover = Handover(self.folder, 0, TASK)
        left = self.handover.take(CODES.__getitem__, largest=2**36)
        self.went_on = left is not None
        service = PsService(
            load_code=CODES.__getitem__,
            settings=Settings(),
            task=TASK,
            keeps_state=True,
            inherited=left and left.own,
        )
        if left:
            self.handover.took()
            service.take_over(left.owner)
        return service

    async def end(self):
        """What SIGTERM does."""
        self.is_over, self.has_left = True, False
        assert await self.service.drain()
        if (owner := self.service.owner) is not None:
            left = Inherited(77, owner, self.service.role.state_for_successor(0))
            self.has_left = await self.handover.leave(left, 60)

    async def hand_over(self):
        await self.end()
        self.service, self.is_over = self._started(), False

    async def answer(self, message, peer=None):
        async with asyncio.timeout(60):
            answer = self.service.handle(peer or self.chief, message)
            return await answer if hasattr(answer, "__await__") else answer


@asynccontextmanager
async def successors(folder):
    """In the session of ``ps_callers``."""
    made = Successors(folder)
    await made.answer(OpenSession(SESSION, 0, 1, []))
    yield made
    if not made.is_over:
        await made.end()
