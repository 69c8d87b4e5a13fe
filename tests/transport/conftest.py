"""Endpoints, links and a network that breaks, on both kinds of loop."""

import asyncio
import contextlib
import gc
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from transport_pair import Pair

from zstrat.config import Settings, Timeouts
from zstrat.transport import Endpoint, Link, hello, new_event_loop, new_incarnation
from zstrat.wire import (
    CancelSteps,
    DropResults,
    Fetched,
    Inspect,
    Pull,
    Pulled,
    Push,
    Statistics,
)


def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": new_event_loop}


@pytest.fixture
def swift():
    """For tests that wait for a loss; too impatient for the others."""
    return Settings(timeouts=Timeouts(beat=0.1, patience=0.6, reconnect=0.5))


class Service:
    """A handler that echoes, and remembers who came and went."""

    def __init__(self):
        self.lost = asyncio.Queue()
        self.seen = []

    def __call__(self, remote, message):
        self.seen.append((remote, message))
        match message:
            case Push(arrays=arrays):
                return Fetched(arrays)
            case Pull(reads=[(size, _)]):
                return Pulled([1], (np.arange(size, dtype=np.uint8),))
            case Inspect():
                return Statistics({"role": remote.role})
            case CancelSteps(session):
                remote.notify(DropResults(session, []))
                return None
        raise KeyError(type(message).__name__)

    def on_lost(self, remote, reason):
        self.lost.put_nowait((remote, reason))


class Caller:
    """What a link tells its owner."""

    def __init__(self):
        self.opened, self.lost, self.notices = (asyncio.Queue() for _ in range(3))

    def hooks(self):
        return {
            "on_open": self.opened.put_nowait,
            "on_lost": self.lost.put_nowait,
            "on_notice": self.notices.put_nowait,
        }


class Net:
    """Makes endpoints and links, and closes what a test left open."""

    def __init__(self):
        self._stack = contextlib.AsyncExitStack()

    async def serve(self, address="127.0.0.1:0", job="ps", handler=None, **options):
        service = Service()
        me = options.pop("me", None) or hello(job, 0, new_incarnation())
        options.setdefault("settings", Settings())
        endpoint = Endpoint(me, handler or service, on_lost=service.on_lost, **options)
        self._stack.push_async_callback(endpoint.close)
        bound = await endpoint.bind(address)
        return endpoint, bound, service

    def link(self, address, job="worker", index=1, **options):
        caller = Caller()
        changes = {k: options.pop(k) for k in ("protocol",) if k in options}
        incarnation = options.pop("incarnation", None) or new_incarnation()
        me = replace(hello(job, index, incarnation), **changes)
        options.setdefault("settings", Settings())
        link = Link(address, me, name="/job:ps/task:0", **{**caller.hooks(), **options})
        self._stack.push_async_callback(link.close)
        link.start()
        return link, caller

    async def open(self, address, **options):
        link, caller = self.link(address, **options)
        await link.wait_open(asyncio.get_running_loop().time() + 10)
        return link, caller

    async def relay(self, address):
        relay = Relay(address)
        self._stack.push_async_callback(relay.close)
        await relay.start()
        return relay

    async def close(self):
        await self._stack.aclose()


class Relay:
    """A TCP relay whose connections can be cut, or held without a word."""

    def __init__(self, target):
        self._target, self._tasks, self._writers = target, set(), set()
        self._open = asyncio.Event()
        self._open.set()
        self.refuses = False
        """Whoever connects is hung up on."""

    async def start(self):
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _join(self, reader, writer):
        if self.refuses:
            writer.transport.abort()
            return
        host, port = self._target.rsplit(":", 1)
        there = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, there[1]), (there[0], writer)):
            self._writers.add(sink)
            task = asyncio.get_running_loop().create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source, sink):
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
        self._writers.discard(sink)

    def cut(self):
        for writer in list(self._writers):
            writer.transport.abort()

    @contextlib.contextmanager
    def held(self):
        """Nothing passes, and nobody is told."""
        self._open.clear()
        yield
        self._open.set()

    async def close(self):
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
async def net():
    net = Net()
    yield net
    await net.close()


@pytest.fixture
def held():
    """A function that counts what this process holds: descriptors and threads."""

    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), sorted(
            thread.name for thread in threading.enumerate()
        )

    return count
