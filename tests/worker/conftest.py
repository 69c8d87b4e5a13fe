"""A worker, its parameter servers and a coordinator in one process, without sockets."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from zstrat import errors
from zstrat.config import Settings, Timeouts
from zstrat.errors import PeerLostError
from zstrat.program import Resource, dump, rebuild
from zstrat.program import load as load_pickled
from zstrat.ps import PsService
from zstrat.variables import VariableSpec, detached
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


@dataclass(eq=False)
class FakeRemote:
    """What a service sees of a peer; keeps what it is told."""

    role: Job
    hello: Hello
    name: str = "chief:0"
    alive: bool = True
    told: list = field(default_factory=list)
    refuse: list = field(default_factory=list)
    rang: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self, message):
        if self.refuse:
            error = self.refuse[0](message)
            if error is not None:
                self.refuse.pop(0)
                raise error
        self.told.append(message)
        self.rang.set()


class FakeLink:
    """A link to a `PsService`: a message takes one turn of the loop, in order."""

    def __init__(self, service, name, log):
        self.service, self.name, self.log = service, name, log
        self.caller = FakeRemote(Job.WORKER, hello("worker"), "worker:0")
        self.peer, self.lost, self.closed, self.started = (
            hello("ps"),
            False,
            False,
            False,
        )
        self.held = None

    def start(self):
        assert not self.started, "a link is started once"
        self.started = True

    async def wait_open(self, deadline):
        if self.lost:
            raise errors.DeadlineExceededError(f"{self.name} did not answer")
        return self.peer

    def submit(self, message, *, deadline=None):
        future = asyncio.get_running_loop().create_future()
        self.log.append(message)
        if self.lost:
            future.set_exception(PeerLostError(self.name, "it was cut"))
        elif self.held is not None:
            self.held.append((message, future))
        else:
            asyncio.get_running_loop().call_soon(self._serve, message, future)
        return future

    def _serve(self, message, future):
        try:
            answer = self.service.handle(self.caller, message)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
            return
        if asyncio.iscoroutine(answer):
            answer = asyncio.ensure_future(answer)
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(
                lambda done: future.done() or future.set_result(done.result())
            )
        elif not future.done():
            future.set_result(answer)

    def release(self):
        held, self.held = self.held, None
        for message, future in held:
            self._serve(message, future)

    def cut(self):
        self.lost = True
        for _, future in self.held or ():
            future.set_exception(PeerLostError(self.name, "it was cut"))

    async def close(self, reason=""):
        self.closed = True


class It(Resource):
    """Stands for a per-worker iterator among the arguments."""

    def __init__(self, resource):
        self.resource = resource


class World:
    """The coordinator's view; ``objects`` skips pickling, so tests can share events."""

    def __init__(self, ps_count=1, pickled=False, load_code=None, **options):
        self.pickled = pickled
        self.log = []
        self.services = [
            PsService(load_code=load_code, settings=SETTINGS, task=f"/job:ps/task:{i}")
            for i in range(ps_count)
        ]
        self.links = []
        self.exits, self.crashes = [], []
        self.objects = []
        self.worker = WorkerService(
            SETTINGS,
            hello("worker"),
            self.make_link,
            on_exit=lambda: self.exits.append(True),
            on_crash=self.crashes.append,
            load=load_pickled if pickled else self.load,
            **options,
        )
        self.session = 1000
        self.remote = self.chief()
        self.numbers = itertools.count(1)
        self.layouts, self.ends, self.seen = {}, {}, 0

    def chief(self):
        return FakeRemote(Job.CHIEF, hello("chief"))

    def make_link(self, address, name, *, on_open, on_lost):
        link = FakeLink(self.services[int(address)], name, self.log)
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
        message = OpenSession(self.session, index, worker_count, addresses, prefetch)
        return await self.ask(message)

    async def ask(self, message, remote=None):
        async with asyncio.timeout(30):
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
        return detached(spec)

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

    def dispatch(self, digest, steps, arguments=0, attempt=1, low_water=0):
        batch = Batch(digest, arguments, attempt, list(steps))
        self.worker.handle(self.remote, Dispatch(self.session, low_water, [batch]))

    async def outcomes(self, steps):
        """What became of the steps: values, or errors; each is asserted to end once."""
        steps = list(steps)
        async with asyncio.timeout(30):
            while True:
                self._read()
                if all(step in self.ends for step in steps):
                    return [self.ends[step] for step in steps]
                self.remote.rang.clear()
                await self.remote.rang.wait()

    async def run(self, digest, steps, arguments=0, **more):
        self.dispatch(digest, steps, arguments, **more)
        return await self.outcomes(steps)

    def forget(self, *steps):
        for step in steps:
            del self.ends[step]

    def _read(self):
        for message in self.remote.told[self.seen :]:
            self.layouts.update({layout.layout: layout for layout in message.layouts})
            at = 0
            for done in message.completions:
                assert done.step not in self.ends, f"step {done.step} ended twice"
                size = max(done.size, 0)
                data = message.results[at : at + size]
                at += size
                self.ends[done.step] = self._outcome(done, data)
            assert at == len(message.results)
        self.seen = len(self.remote.told)

    def _outcome(self, done, data):
        if done.outcome == Outcome.CANCELLED:
            return "cancelled" if done.error is None else errors.from_wire(done.error)
        if done.outcome == Outcome.FAILED:
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
