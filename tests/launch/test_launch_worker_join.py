"""A worker that reports itself: whom it waits for, and when it ends."""

from __future__ import annotations

import asyncio

import pytest

from zstrat.config import Settings, Timeouts
from zstrat.errors import DeadlineExceededError
from zstrat.launch import JoinPlace, Server, WorkerJoin

SETTINGS = Settings(timeouts=Timeouts(connect=0.1))


class Worker:
    """A worker of which one session is opened while it reports itself, if ``comes``."""

    def __init__(self, comes):
        self._numbers = iter([0, comes, comes])
        self.waits = asyncio.Event()

    @property
    def sessions(self):
        return next(self._numbers)

    async def wait_left(self, since):
        assert since == 0
        self.waits.set()
        await asyncio.Event().wait()


@pytest.fixture
def join():
    with Server({"ps": ["127.0.0.1:0"]}) as server:
        place = JoinPlace(server.target.removeprefix("tcp://"), "127.0.0.1:1")
        yield WorkerJoin(place, SETTINGS, 3)


async def test_a_worker_that_no_program_takes_ends(join):
    with pytest.raises(DeadlineExceededError, match="no program has opened a session"):
        await join.stay(0, Worker(comes=0))


async def test_a_worker_that_a_program_has_stays_though_it_heard_no_answer(join):
    worker = Worker(comes=1)
    staying = asyncio.create_task(join.stay(0, worker))
    waiting = asyncio.create_task(worker.waits.wait())
    await asyncio.wait([staying, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert not staying.done(), staying
    staying.cancel()
    await asyncio.wait([staying])
