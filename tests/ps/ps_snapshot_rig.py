"""Parameter servers in this process that are saved and loaded, on disks that halt."""

import asyncio
import contextlib
import threading
from functools import partial
from pathlib import Path

import numpy as np
import optax
from ps_callers import SESSION, caller
from ps_trees import binding

from zstrat.config import Settings, Timeouts
from zstrat.ps import PinnedTensor, PsClient, PsService, PsUpdate, Ref
from zstrat.ps.snapshots import _snapshot_files as disk_module
from zstrat.testing import FakeLink, FakeRemote
from zstrat.wire import BindOptimizer, Job, OpenSession, UpdateOp, VariableEntry

TASK = "/job:ps/task:0"


OPTIMIZERS = {
    b"adam": lambda: optax.adam(0.1),
    b"momentum": lambda: optax.sgd(0.1, momentum=0.9),
}


class Rig:
    def __init__(self, servers: int = 2):
        self.chief = caller()
        self.services = [
            PsService(
                load_code=lambda code: OPTIMIZERS[code](),
                settings=Settings(timeouts=Timeouts()),
                task=f"/job:ps/task:{index}",
                incarnation=5,
            )
            for index in range(servers)
        ]
        for service in self.services:
            service.handle(self.chief, OpenSession(SESSION, 0, 1, []))
        links = [
            FakeLink(
                partial(service.handle, self.chief),
                name=f"/job:ps/task:{index}",
                hello=FakeRemote(Job.PS, 5, index=index).hello,
            )
            for index, service in enumerate(self.services)
        ]
        for link in links:
            link.start()
        self.client = PsClient(links, SESSION)

    async def create(self, ps: int, key: int, value, sharded: bool = False) -> Ref:
        entry = VariableEntry(key, f"v{key}", True, sharded)
        await self.client.create([(ps, entry, np.asarray(value))])
        return Ref(ps, key)

    async def optimizer(self, name: str, *refs: Ref, gradients="f4") -> None:
        """Number 9, which moves these variables, each in a tree of its own."""
        await self.client.create_optimizer(9, name, name.encode())
        await self.bind(name, *refs, gradients=gradients)

    async def bind(self, name: str, *refs: Ref, gradients="f4") -> None:
        for ref in refs:
            value = await self.read(ref)
            tree = {"w": ((ref.key,), value.shape, value.dtype)}
            told = binding(OPTIMIZERS[name.encode()](), tree, gradients)
            data = (np.frombuffer(told.encoded(), np.uint8),)
            message = BindOptimizer(SESSION, 9, data)
            await self.client.each([(ref.ps, message)], object)

    async def update(self, ref: Ref, op: UpdateOp, *arrays, optimizer: int = 0) -> None:
        update = PsUpdate(ref.ps, ref.key, op, optimizer, arrays)
        await self.client.push(-1, 0, 0, [update])

    async def read(self, ref: Ref) -> np.ndarray:
        (value,) = await self.client.pull([ref])
        return value

    async def bytes_of(self, tensor: PinnedTensor, number: int = 1) -> np.ndarray:
        dtype, shape = np.dtype(tensor.entry.dtype), tensor.entry.shape
        size = int(np.prod(shape)) * dtype.itemsize
        got = await self.client.read_snapshot(tensor.ps, number, tensor.place, 0, size)
        return got.view(dtype).reshape(shape)

    def statistics(self, ps: int = 0):
        return self.services[ps].statistics()


def halt(monkeypatch, name: str):
    """Holds the writing thread up in a method of `NewFile`; gates: (reached, go on)."""
    reached, onward = threading.Event(), threading.Event()
    method = disk_module.NewFile.__dict__[name]

    def held(file, *arguments):
        reached.set()
        assert onward.wait(100), "the test never went on"
        return method(file, *arguments)

    monkeypatch.setattr(disk_module.NewFile, name, held)
    return reached, onward


def size_of(path: str) -> int:
    return Path(path).stat().st_size


async def wait(gate: threading.Event) -> None:
    assert await asyncio.to_thread(gate.wait, 30)


@contextlib.asynccontextmanager
async def snapshot_rig():
    rig = Rig()
    yield rig
    for service in rig.services:
        assert await service.drain()
