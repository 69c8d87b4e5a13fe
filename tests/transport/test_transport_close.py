"""What closing ends, and what it leaves: nothing."""

import asyncio

import numpy as np
import pytest
from transport_talk import push

from zstrat.config import Settings, Timeouts
from zstrat.errors import ClosedError, PeerLostError
from zstrat.testing import ProcessResources
from zstrat.transport import Endpoint, hello, new_incarnation
from zstrat.wire import Inspect


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_nothing_is_left_after_close(net, transport):
    async def round_trip():
        endpoint, address, _ = await net.serve(settings=Settings(transport=transport))
        link, _ = await net.open(address, settings=Settings(transport=transport))
        await link.request(push(np.zeros(2_000_000, np.uint8)))
        waiting = link.submit(Inspect())
        await link.close()
        await endpoint.close()
        assert waiting.done()
        waiting.exception()

    await round_trip()  # pyzmq starts its collector thread with the first large array
    before = ProcessResources.held()
    for _ in range(3):
        await round_trip()
    # Fewer where libzmq had not yet let go of what an earlier test closed.
    after = ProcessResources.held()
    assert after.descriptors <= before.descriptors
    assert after.threads == before.threads
    assert len(asyncio.all_tasks()) == 1


async def test_closing_an_endpoint_cancels_its_handlers(net):
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    endpoint, address, _ = await net.serve(handler=lambda remote, message: wait())
    link, _ = await net.open(address)
    waiting = link.submit(Inspect())
    await began.wait()
    await endpoint.close()
    assert ended.is_set()
    with pytest.raises(PeerLostError):
        await waiting


async def test_an_endpoint_is_bound_once(net):
    endpoint, _, _ = await net.serve()
    with pytest.raises(ClosedError):
        await endpoint.bind("127.0.0.1:0")
    unbound = Endpoint(
        hello("ps", 0, new_incarnation()), print, settings=Settings(timeouts=Timeouts())
    )
    await unbound.close()


async def test_closing_that_is_cancelled_closes_all_the_same(net):
    """A handler that takes its time to end does not keep the address."""
    began, clinging, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stubborn():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            clinging.set()
            await ended.wait()

    endpoint, address, _ = await net.serve(handler=lambda remote, message: stubborn())
    link, _ = await net.open(address)
    waiting = link.submit(Inspect())
    await began.wait()
    closing = asyncio.ensure_future(endpoint.close())
    await clinging.wait()
    closing.cancel()
    ended.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(PeerLostError):
        await waiting
    await net.serve(address)
