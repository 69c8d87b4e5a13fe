"""Endpoints, links and a network that breaks, on both kinds of loop."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
from transport_pair import Pair

from zstrat.config import Settings, Timeouts
from zstrat.testing import Relay
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
    """For tests that wait for a loss by silence; too impatient for the others."""
    return Settings(timeouts=Timeouts(beat=0.1, liveness=0.6))


@pytest.fixture
def brittle():
    """For tests that wait for the loss of what broke: nobody is lost by silence."""
    return Settings(timeouts=Timeouts(beat=0.1, liveness=60.0, reconnect=0.5))


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
            case Pull(reads=[(size, *_)]):
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

    def relay(self, address):
        return self._stack.enter_context(Relay(address))

    async def close(self):
        await self._stack.aclose()


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
async def net():
    net = Net()
    yield net
    await net.close()
