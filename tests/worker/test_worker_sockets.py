"""The worker behind real sockets: endpoint, links and a parameter server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from worker_coordinator import Coordinator

from zstrat import errors
from zstrat.config import Settings, Timeouts
from zstrat.data import Dataset
from zstrat.errors import PeerLostError, PSUnavailableError, StaleSessionError
from zstrat.program import digest, dump, function, load
from zstrat.ps import PsService
from zstrat.testing import FakeRemote
from zstrat.transport import Endpoint, Link, hello, new_incarnation
from zstrat.variables import VariableSpec, unbound
from zstrat.wire import (
    Batch,
    BuildResource,
    CloseSession,
    CreateVariables,
    Dispatch,
    Fetch,
    Inspect,
    Job,
    OpenSession,
    Pull,
    PutArguments,
    PutCode,
    Read,
    VariableEntry,
)
from zstrat.worker import WorkerService

SETTINGS = Settings(
    timeouts=Timeouts(beat=0.1, liveness=2.0, reconnect=0.2, connect=10.0, drain=5.0)
)


class Chief(Coordinator):
    """A coordinator of one worker and one ps, by hand."""

    def __init__(self, worker, ps):
        super().__init__(FakeRemote())
        me = hello("chief", 0, new_incarnation())
        self.session, self.ps_address = me.incarnation, ps
        self.worker = Link(
            worker,
            me,
            name="/job:worker/task:0",
            settings=SETTINGS,
            on_notice=self.remote.notify,
        )
        self.ps = Link(ps, me, name="/job:ps/task:0", settings=SETTINGS)

    async def open(self):
        deadline = asyncio.get_running_loop().time() + 20
        for link in (self.ps, self.worker):
            link.start()
            await link.wait_open(deadline)
        await self.ps.request(OpenSession(self.session, 0, 1, []))
        await self.worker.request(OpenSession(self.session, 0, 1, [self.ps_address]))

    async def close(self):
        await self.worker.close()
        await self.ps.close()

    async def variable(self, value):
        key = next(self.numbers)
        entry = VariableEntry(key, f"v{key}", True, False)
        await self.ps.request(CreateVariables(self.session, [entry], (value,)))
        return unbound(VariableSpec(key, f"v{key}", value.shape, value.dtype.name, 0))

    async def value(self, variable):
        reads = [Read(variable.spec.key, -1)]
        return (await self.ps.request(Pull(self.session, reads))).arrays[0]

    async def ship(self, obj):
        code, _ = dump(obj)
        await self.worker.request(PutCode(self.session, digest(code), code))
        return digest(code)

    def arguments(self, *args):
        number = next(self.numbers)
        code, arrays = dump((args, {}))
        self.worker.notify(PutArguments(self.session, number, code, arrays))
        return number

    def dispatch(self, function, steps, arguments=0):
        batch = Batch(function, arguments, 1, list(steps), 0)
        self.worker.notify(Dispatch(self.session, 0, [batch], b"", ()))


class Cluster:
    """One ps and one worker, bound on loopback."""

    async def start(self):
        self.ps = PsService(load_code=load, settings=SETTINGS, task="/job:ps/task:0")
        self.ps_endpoint = Endpoint(
            hello("ps", 0, new_incarnation()),
            self.ps.handle,
            settings=SETTINGS,
            on_lost=self.ps.lost,
        )
        self.ps_address = await self.ps_endpoint.bind("127.0.0.1:0")
        me = hello("worker", 0, new_incarnation())
        self.worker = WorkerService(
            SETTINGS,
            me,
            lambda address, name, **hooks: Link(
                address, me, name=name, settings=SETTINGS, **hooks
            ),
        )
        self.left = asyncio.Event()
        self.endpoint = Endpoint(
            me, self.worker.handle, settings=SETTINGS, on_lost=self.on_lost
        )
        self.address = await self.endpoint.bind("127.0.0.1:0")
        self.open = [self.endpoint, self.ps_endpoint]

    def on_lost(self, remote, reason):
        self.worker.lost(remote, reason)
        self.left.set()

    @asynccontextmanager
    async def chief(self):
        chief = Chief(self.address, self.ps_address)
        await chief.open()
        try:
            yield chief
        finally:
            await chief.close()

    async def stop(self):
        await self.worker.close()
        for endpoint in self.open:
            await endpoint.close()
        await self.ps.drain()

    async def end(self, endpoint):
        self.open.remove(endpoint)
        await endpoint.close()


@pytest.fixture
async def cluster():
    cluster = Cluster()
    await cluster.start()
    yield cluster
    await cluster.stop()


async def test_training_over_sockets(cluster):
    async with cluster.chief() as chief:
        w = await chief.variable(np.zeros((300, 300), np.float32))

        @function
        def step(iterator):
            batch = next(iterator)
            w.assign_add(batch["x"].sum() + 0 * w.value())
            return {"mean": w.value().mean()}

        def dataset_fn(context):
            rows = {"x": np.arange(8, dtype=np.float32)}
            return Dataset.from_tensor_slices(rows).batch(2).repeat().prefetch(2)

        maker = await chief.ship(dataset_fn)
        order = BuildResource(chief.session, 9, "iterator", maker, 0)
        built = await chief.worker.request(order)
        assert built.layout.shapes == [[2]]
        code, arguments = await chief.ship(step), chief.arguments(chief.it(9))
        results = await chief.run(code, range(1, 9), arguments)
        sums = np.cumsum([1, 5, 9, 13] * 2)
        assert [float(result["mean"]) for result in results] == sums.tolist()
        np.testing.assert_array_equal(
            await chief.value(w), np.full((300, 300), sums[-1], np.float32)
        )


async def test_large_results_and_arguments_in_chunks(cluster):
    async with cluster.chief() as chief:

        @function
        def step(x):
            return x * 2

        big = np.arange(3_000_000, dtype=np.float32)
        code = await chief.ship(step)
        assert await chief.run(code, [1], chief.arguments(big)) == ["kept"]
        fetched = await chief.worker.request(Fetch(chief.session, 1))
        np.testing.assert_array_equal(fetched.arrays[0], big * 2)


async def test_a_server_that_ends_fails_the_steps_in_time(cluster):
    async with cluster.chief() as chief:
        v = await chief.variable(np.zeros(3, np.float32))

        @function
        def step():
            v.assign_add(v.value() + 1)

        code = await chief.ship(step)
        await chief.run(code, [1])
        await cluster.end(cluster.ps_endpoint)
        for error in await chief.run(code, [2, 3, 4]):
            assert isinstance(error, PSUnavailableError)
            assert error.task == "/job:ps/task:0"


async def test_a_coordinator_that_goes_and_the_next_one(cluster):
    @function
    def step(x):
        return x + 1

    async with cluster.chief() as chief:
        code = await chief.ship(step)
        assert await chief.run(code, [1], chief.arguments(np.float32(1))) == [2]
    async with asyncio.timeout(100):
        await cluster.left.wait()
    assert cluster.worker.statistics()["session"] == 0
    async with cluster.chief() as chief:
        assert await chief.run(await chief.ship(step), [1], chief.arguments(1.5)) == [
            2.5
        ]
        with pytest.raises(StaleSessionError):
            await chief.worker.request(PutCode(1, b"", b""))


async def test_draining_says_so_and_observers_may_look(cluster):
    async with cluster.chief() as chief:

        @function
        def step():
            return 1

        code = await chief.ship(step)
        assert await cluster.worker.drain() is True
        (error,) = await chief.run(code, [1])
        assert error.retryable
        me = replace(hello("observer", 0, new_incarnation()))
        assert me.job == Job.OBSERVER
        link = Link(cluster.address, me, name="/job:worker/task:0", settings=SETTINGS)
        link.start()
        await link.wait_open(asyncio.get_running_loop().time() + 20)
        values = (await link.request(Inspect())).values
        assert values["draining"] is True
        with pytest.raises(errors.PermissionDeniedError):
            await link.request(CloseSession(chief.session, False))
        await link.close()
        await cluster.end(cluster.endpoint)
        with pytest.raises(PeerLostError):
            await chief.worker.request(Inspect())
