"""A worker that reports itself: whom it waits for, and when it ends."""

import asyncio
import logging
import socket

import pytest

from zstrat.config import Settings, Timeouts
from zstrat.errors import DeadlineExceededError
from zstrat.launch import JoinAddresses, Server, WorkerJoin
from zstrat.transport import Link, hello

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


class Told(logging.Handler):
    """Waits until something is logged."""

    def __init__(self, what):
        super().__init__()
        self._what = what
        self.said = asyncio.Event()

    def emit(self, record):
        if record.getMessage() == self._what:
            self.said.set()


@pytest.fixture
def server():
    with Server({"ps": ["127.0.0.1:0"]}) as server:
        yield server.target.removeprefix("tcp://")


@pytest.fixture
def join(server):
    return WorkerJoin(JoinAddresses((server,), "127.0.0.1:1"), SETTINGS, 3)


async def test_a_worker_that_no_program_takes_ends(join):
    with pytest.raises(DeadlineExceededError):
        await join.stay(0, Worker(comes=0))


async def test_a_worker_that_a_program_has_stays_though_it_heard_no_answer(join):
    worker = Worker(comes=1)
    staying = asyncio.create_task(join.stay(0, worker))
    waiting = asyncio.create_task(worker.waits.wait())
    await asyncio.wait([staying, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert not staying.done(), staying
    staying.cancel()
    await asyncio.wait([staying])


async def test_whose_a_number_is_the_program_decides(server, join):
    other = Link(server, hello("worker", 0, 4), name="ps", settings=SETTINGS)
    other.start()
    await other.wait_open(asyncio.get_running_loop().time() + 30)
    with pytest.raises(DeadlineExceededError):
        await join.stay(0, Worker(comes=0))
    await other.close()


async def test_where_one_server_is_away_the_next_is_asked(server, caplog, monkeypatch):
    settings = Settings(timeouts=Timeouts(connect=100.0, liveness=0.1))
    caplog.set_level(logging.INFO, "zstrat.task")
    waits = Told(f"reported to {server}, waiting for its program")
    monkeypatch.setattr(logging.getLogger("zstrat.task"), "handlers", [waits])
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{nobody.getsockname()[1]}"
        join = WorkerJoin(JoinAddresses((away, server), "127.0.0.1:1"), settings, 3)
        asking = asyncio.create_task(join.number())
        await waits.said.wait()
        asking.cancel()
        await asyncio.wait([asking])
    assert f"trying the next server: the parameter server at {away}" in caplog.text
