"""A worker, its parameter servers and a coordinator in one process, without sockets."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from zstrat import errors
from zstrat.config import Settings, Timeouts
from zstrat.program import Resource, dump, rebuild
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
    Outcome,
    Printed,
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


class It(Resource):
    """Stands for a per-worker iterator among the arguments."""

    def __init__(self, resource):
        self.resource = resource


class World:
    """The coordinator's view; ``objects`` skips pickling, so tests can share events."""

    def __init__(
        self, ps_count=1, pickled=False, load_code=None, settings=SETTINGS, **options
    ):
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
        self.remote = self.chief()
        self.numbers = itertools.count(1)
        self.layouts, self.ends, self.seen = {}, {}, 0
        self.doubtful = set()

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

    def it(self, resource):
        """Stands for the iterator of that number among the arguments."""
        return It(resource)

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

    async def outcomes(self, steps):
        """What became of the steps: values, or errors; each is asserted to end once."""
        steps = list(steps)
        async with asyncio.timeout(100):
            while True:
                self._read()
                if all(step in self.ends for step in steps):
                    return [self.ends[step] for step in steps]
                self.remote.notified.clear()
                await self.remote.notified.wait()

    async def run(self, digest, steps, arguments=0, **more):
        self.dispatch(digest, steps, arguments, **more)
        return await self.outcomes(steps)

    def forget(self, *steps):
        for step in steps:
            del self.ends[step]

    def _read(self):
        for message in self.remote.notices[self.seen :]:
            if isinstance(message, Printed):
                continue
            self.layouts.update({layout.layout: layout for layout in message.layouts})
            at = 0
            for done in message.completions:
                assert done.step not in self.ends, f"step {done.step} ended twice"
                size = max(done.size, 0)
                data = message.results[at : at + size]
                at += size
                self.ends[done.step] = self._outcome(done, data)
                if done.outcome == Outcome.DOUBTFUL:
                    self.doubtful.add(done.step)
            assert at == len(message.results)
        self.seen = len(self.remote.notices)

    def _outcome(self, done, data):
        if done.outcome == Outcome.CANCELLED:
            return "cancelled" if done.error is None else errors.from_wire(done.error)
        if done.outcome in (Outcome.FAILED, Outcome.DOUBTFUL):
            return errors.from_wire(done.error)
        layout = self.layouts[done.layout]
        if done.size < 0:
            return "kept"
        leaves, at = [], 0
        for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True):
            leaf = np.frombuffer(
                data, np.dtype(dtype), int(np.prod(shape, dtype=int)), at
            )
            at += leaf.nbytes
            leaves.append(leaf.reshape(shape))
        assert at == len(data)
        return rebuild(layout.structure, leaves)

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
