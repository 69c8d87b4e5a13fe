"""A worker, its parameter servers and a coordinator in one process, without sockets."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from worker_coordinator import Coordinator, It

from zstrat import errors
from zstrat.config import Settings, Timeouts
from zstrat.program import dump
from zstrat.program import load as load_pickled
from zstrat.ps import PsService
from zstrat.testing import FakeLink, FakeRemote
from zstrat.variables import VariableSpec, unbound
from zstrat.wire import (
    Batch,
    BuildResource,
    CloseSession,
    CreateVariables,
    Dispatch,
    Failure,
    Hello,
    Job,
    OpenSession,
    Pull,
    PutArguments,
    PutCode,
    Read,
    VariableEntry,
)
from zstrat.worker import WorkerService

TIMEOUTS = Timeouts(connect=5.0, request=20.0, drain=5.0)
SETTINGS = Settings(timeouts=TIMEOUTS)


def hello(job, index=0):
    return Hello(1, job, index, 77, "here", 1)


class Gate:
    """Holds the thread that comes to it."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def hold(self):
        self.reached.set()
        assert self.opened.wait(100)

    async def wait_reached(self):
        assert await asyncio.to_thread(self.reached.wait, 60)

    def open(self):
        self.opened.set()


class World(Coordinator):
    """The coordinator's view; ``objects`` skips pickling, so tests can share events."""

    def __init__(
        self, ps_count=1, pickled=False, load_code=None, settings=SETTINGS, **options
    ):
        super().__init__(self.chief())
        self.pickled = pickled
        self.log = []
        self.services = [
            PsService(load_code=load_code, settings=settings, task=f"/job:ps/task:{i}")
            for i in range(ps_count)
        ]
        self.links = []
        self.has_servers = True
        """Whether links that are made from now on find the parameter servers."""
        self.exits, self.crashes = [], []
        self.objects = []
        self.worker = WorkerService(
            settings,
            hello("worker"),
            self.make_link,
            on_exit=lambda: self.exits.append(True),
            on_crash=self.crashes.append,
            load=load_pickled if pickled else self.load,
            **options,
        )
        self.listens = "listen" in options
        """Whether the coordinator wants to hear what steps print."""
        self.session = 1000

    def chief(self):
        return FakeRemote(Job.CHIEF, 77)

    def make_link(self, address, *, name, expect, on_open, on_lost):
        service, caller = self.services[int(address)], FakeRemote(Job.WORKER, 77)
        link = FakeLink(
            lambda message: service.handle(caller, message),
            name=name,
            address=address,
            hello=hello("ps") if self.has_servers else None,
            on_open=on_open,
            on_lost=on_lost,
        )
        link.caller, link.sent = caller, self.log
        self.links.append(link)
        return link

    # pickling, or not

    def dump(self, obj):
        if self.pickled:
            return dump(obj)
        self.objects.append(obj)
        return str(len(self.objects) - 1).encode(), ()

    def load(self, code, arrays, resolve):
        found = self.objects[int(code)]
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, tuple):
            args, kwargs = found
            real = [resolve(a.resource) if isinstance(a, It) else a for a in args]
            return tuple(real), kwargs
        return found

    # what a coordinator does

    async def open(self, worker_count=3, index=1, session=None, prefetch=0):
        self.session = self.session if session is None else session
        for service in self.services:
            service.handle(self.remote, OpenSession(self.session, 0, 1, []))
        addresses = [str(i) for i in range(len(self.services))]
        return await self.ask(
            OpenSession(
                self.session, index, worker_count, addresses, prefetch, self.listens
            )
        )

    async def ask(self, message, remote=None):
        async with asyncio.timeout(100):
            answer = self.worker.handle(remote or self.remote, message)
            if asyncio.iscoroutine(answer) or asyncio.isfuture(answer):
                answer = await answer
        if isinstance(answer, Failure):
            raise errors.from_wire(answer.error)
        return answer

    def variable(self, value, ps=0):
        value = np.asarray(value)
        key = next(self.numbers)
        entry = VariableEntry(key, f"v{key}", True, False)
        message = CreateVariables(self.session, [entry], (value,))
        self.services[ps].handle(self.remote, message)
        spec = VariableSpec(key, f"v{key}", value.shape, value.dtype.name, ps)
        return unbound(spec)

    def value(self, variable):
        pull = Pull(self.session, [Read(variable.spec.key, -1)])
        return self.services[variable.spec.ps].handle(self.remote, pull).arrays[0]

    async def ship(self, obj):
        code, _ = self.dump(obj)
        digest = f"digest {next(self.numbers)}".encode()
        await self.ask(PutCode(self.session, digest, code))
        return digest

    def arguments(self, *args, **kwargs):
        number = next(self.numbers)
        code, arrays = self.dump((args, kwargs))
        self.worker.handle(
            self.remote, PutArguments(self.session, number, code, arrays)
        )
        return number

    async def build(self, maker, resource=None, purpose="iterator", arguments=0):
        digest = await self.ship(maker)
        resource = next(self.numbers) if resource is None else resource
        order = BuildResource(self.session, resource, purpose, digest, arguments)
        built = await self.ask(order)
        return resource, built.layout

    def dispatch(
        self,
        digest,
        steps,
        arguments=0,
        attempt=1,
        low_water=0,
        size=0,
        inputs=b"",
        arrays=(),
    ):
        batch = Batch(digest, arguments, attempt, list(steps), size)
        message = Dispatch(self.session, low_water, [batch], inputs, arrays)
        self.worker.handle(self.remote, message)

    # what many tests do

    async def once(self, step, *args, **more):
        """The outcome of the function as step 1."""
        digest = await self.ship(step)
        arguments = self.arguments(*args) if args else 0
        return (await self.run(digest, [1], arguments, **more))[0]

    async def reading(self, maker, *steps):
        """The digests of the functions, and arguments for them: one iterator."""
        resource, _ = await self.build(maker)
        digests = [await self.ship(step) for step in steps]
        return *digests, self.arguments(self.it(resource))

    async def until(self, is_so):
        """Waits, while the worker works, for something that a link is to be sent."""
        async with asyncio.timeout(100):
            while not is_so():
                await self.worker._executor.submit(lambda: None)

    def gate(self):
        return Gate()

    async def end(self):
        if self.worker.statistics()["session"] == self.session:
            await self.ask(CloseSession(self.session, False))
        await self.worker.close()
        assert not self.crashes
        for service in self.services:
            await service.drain()


@pytest.fixture
async def world():
    world = World()
    await world.open()
    yield world
    await world.end()


@pytest.fixture
async def shipping():
    """The same, but everything is really pickled."""
    world = World(ps_count=2, pickled=True)
    await world.open()
    yield world
    await world.end()


@pytest.fixture
async def closed():
    """A world whose session was not opened yet."""
    world = World()
    yield world
    await world.end()


@pytest.fixture
async def impatient():
    """The same, whose worker waits for parameter servers for no time at all."""
    world = World(settings=replace(SETTINGS, timeouts=replace(TIMEOUTS, connect=0.01)))
    yield world
    await world.end()


@pytest.fixture
async def make_world():
    """Worlds of any kind, with their session open."""
    worlds = []

    async def make(prefetch=0, **options):
        worlds.append(World(**options))
        await worlds[-1].open(prefetch=prefetch)
        return worlds[-1]

    yield make
    for world in worlds:
        await world.end()


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
async def timed():
    clock = Clock()
    world = World(clock=clock)
    world.clock = clock
    await world.open()
    yield world
    await world.end()
