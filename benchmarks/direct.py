"""A worker's client of one ps that holds some arrays, without a step around it.

The transfer alone is measured: the client remembers nothing, so every pull moves all
bytes, and a push counts when the ps has applied it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

import zstrat as zs
from zstrat.config import environment, settings_from
from zstrat.launch import LocalCluster
from zstrat.ps import PsClient, PsUpdate, Ref
from zstrat.transport import Link, hello, new_event_loop, new_incarnation
from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence


class Client:
    """Pull and push of float32 arrays."""

    def __init__(
        self, address: str, session: int, keys: Sequence[int], transport: str
    ) -> None:
        self._loop = new_event_loop()
        self._keys = keys
        self._loop.run_until_complete(self._open(address, session, transport))

    async def _open(self, address: str, session: int, transport: str) -> None:
        self._link = Link(
            address,
            hello("worker", 7, new_incarnation()),
            name="/job:ps/task:0",
            settings=replace(settings_from(environment()), transport=transport),
        )
        self._link.start()
        await self._link.wait_open(self._loop.time() + 10)
        self._client = PsClient([self._link], session, memory=0)

    async def pull(self) -> list[np.ndarray]:
        return await self._client.pull([Ref(0, key) for key in self._keys])

    async def push(self, delta: np.ndarray) -> None:
        """Adds ``delta`` to each."""
        updates = [PsUpdate(0, key, UpdateOp.ADD, 0, (delta,)) for key in self._keys]
        await self._client.push(-1, 0, 0, updates)

    def seconds(self, once: Callable[[], Awaitable[object]], repeats: int) -> float:
        """Median duration, on a loop that runs on as it does in a worker."""
        return self._loop.run_until_complete(_seconds(once, repeats))

    def close(self) -> None:
        self._loop.run_until_complete(self._link.close())
        self._loop.close()


async def _seconds(once: Callable[[], Awaitable[object]], repeats: int) -> float:
    times = []
    for _ in range(3 + repeats):
        began = time.perf_counter()
        await once()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


@contextlib.contextmanager
def client(elements: int, transport: str, count: int = 1) -> Iterator[Client]:
    """The client, and a ps that holds ``count`` arrays of so many elements."""
    with LocalCluster(num_ps=1, num_workers=1, transport=transport) as local:
        strategy = zs.ParameterServerStrategy(local.resolver)
        with strategy.scope():
            variables = [
                zs.Variable(np.zeros(elements, np.float32)) for _ in range(count)
            ]
        address = local.spec.task_address("ps", 0)
        session, keys = strategy.session.session, [v.spec.key for v in variables]
        direct = Client(address, session, keys, transport)
        try:
            yield direct
        finally:
            direct.close()
            strategy.session.close()
