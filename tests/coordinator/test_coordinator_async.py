"""The same coordinator, awaited: on any event loop, beside the blocking one."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.coordinator import (
    AsyncClusterCoordinator,
    ClusterCoordinator,
    RemoteValue,
)
from zstrat.errors import CancelledError, ClosureInputError, DeadlineExceededError


@zs.function
def double(x):
    return x * 2


@zs.function
def large(n):
    return jnp.zeros(1000) + n


@zs.function
def draw(iterator):
    return iterator.get_next()


@zs.function(eager=True)
def bad():
    raise ValueError("boom")


@zs.function(eager=True)
def late():
    raise TimeoutError("mine")


@pytest.fixture
def strategy(world):
    world.coordinator().shutdown()
    return world.strategy


async def test_schedule_await_and_join(strategy):
    async with AsyncClusterCoordinator(strategy) as coordinator:
        values = [await coordinator.schedule(double, args=(i,)) for i in range(50)]
        assert await values[3] == 6
        results = await asyncio.gather(*list(values))
        assert [int(x) for x in results] == list(range(0, 100, 2))
        assert await coordinator.fetch({"a": values[1], "b": "c"}) == {"a": 2, "b": "c"}
        await coordinator.join()
        assert await coordinator.done()
        assert coordinator.metrics()["scheduled_closures"] == 50


async def test_the_lines_of_the_readme(strategy):
    async with AsyncClusterCoordinator(strategy) as coordinator:
        rows = [np.float32(7)] * 9
        iterator = iter(await coordinator.create_per_worker_dataset(lambda: rows))
        values = [await coordinator.schedule(draw, args=(iterator,)) for _ in range(3)]
        await coordinator.join()
        assert await values[0] == await values[0].fetch(timeout=60) == 7
        assert isinstance(await values[0].get(), jax.Array)
        blocking = ClusterCoordinator(strategy)
        assert await asyncio.to_thread(blocking.fetch, values) == [7, 7, 7]


async def test_a_shutdown_is_carried_out_though_it_is_cancelled(world, strategy):
    """And though every thread of the program waits for what it ends."""
    coordinator = AsyncClusterCoordinator(strategy)
    await asyncio.to_thread(world.on_loop, world.hold)
    value = await coordinator.schedule(double, args=(1,))
    loop, only = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    loop.set_default_executor(only)
    waiting = loop.run_in_executor(None, RemoteValue.fetch, value, 20)
    ending = asyncio.create_task(coordinator.shutdown())
    await asyncio.sleep(0)  # it waits
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    with pytest.raises(CancelledError):
        await waiting
    await asyncio.to_thread(world.on_loop, world.release)


async def test_fetch_tells_its_own_lateness_from_that_of_a_step(world, strategy):
    async with AsyncClusterCoordinator(strategy) as coordinator:
        await asyncio.to_thread(world.on_loop, world.hold)
        value = await coordinator.schedule(late)
        with pytest.raises(DeadlineExceededError):
            await value.fetch(timeout=0.01)
        await asyncio.to_thread(world.on_loop, world.release)
        with pytest.raises(TimeoutError, match="mine"):
            await value.fetch(timeout=60)
        with pytest.raises(TimeoutError, match="mine"):
            await coordinator.join()


async def test_large_results_are_awaited_too(strategy):
    async with AsyncClusterCoordinator(strategy) as coordinator:
        value = await coordinator.schedule(large, args=(2,))
        np.testing.assert_array_equal(await value, np.full(1000, 2))
        assert (await value).shape == (1000,)


async def test_an_error_is_raised_once(strategy):
    coordinator = AsyncClusterCoordinator(strategy)
    value = await coordinator.schedule(bad)
    with pytest.raises(ValueError, match="boom"):
        await value
    with pytest.raises(ValueError, match="boom"):
        await coordinator.schedule(double, args=(1,))
    await coordinator.join()
    assert await coordinator.done()
    assert [str(error) for error in coordinator.errors] == ["boom"]
    await coordinator.shutdown()


async def test_the_loop_is_free_while_it_waits(world, strategy):
    async with AsyncClusterCoordinator(strategy, max_queued=2) as coordinator:
        await asyncio.to_thread(world.on_loop, world.hold)

        async def many():
            return [await coordinator.schedule(double, args=(1,)) for _ in range(20)]

        scheduling = asyncio.ensure_future(many())
        joining = asyncio.ensure_future(coordinator.join())
        await asyncio.to_thread(
            world.until, lambda: sum(len(w.queue) for w in world.workers) >= 2
        )
        assert not scheduling.done()
        await asyncio.to_thread(world.on_loop, world.release)
        values = await scheduling
        await joining
        assert {int(await value) for value in values} == {2}


async def test_a_wait_that_is_cancelled_loses_nothing(world, strategy):
    async with AsyncClusterCoordinator(strategy) as coordinator:
        await asyncio.to_thread(world.on_loop, world.hold)
        value = await coordinator.schedule(double, args=(4,))
        for wait in (coordinator.join(), coordinator.fetch(value)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait, 0.01)
        assert not coordinator._core.engine.waiters.watchers
        assert not value._bells
        await asyncio.to_thread(world.on_loop, world.release)
        assert await value == 8


async def test_leaving_with_an_error_cancels(world, strategy):
    with contextlib.suppress(KeyError):
        async with AsyncClusterCoordinator(strategy) as coordinator:
            await asyncio.to_thread(world.on_loop, world.hold)
            value = await coordinator.schedule(double, args=(4,))
            raise KeyError
    with pytest.raises(CancelledError):
        await value


async def test_both_faces_share_one_queue(strategy):
    blocking = ClusterCoordinator(strategy)
    awaited = AsyncClusterCoordinator(strategy)
    assert awaited.strategy is blocking.strategy
    await awaited.schedule(bad)
    with pytest.raises(ValueError, match="boom"):
        blocking.join()
    await awaited.join()


async def test_what_is_built_on_each_worker_is_awaited(strategy):
    def broken():
        raise ValueError("no such file")

    coordinator = AsyncClusterCoordinator(strategy)
    dataset = await coordinator.create_per_worker_dataset(lambda: [np.ones(3)])
    for value in (*iter(dataset).values, *dataset.build().values):
        for there in (value, value.fetch(), value.get()):
            with pytest.raises(NotImplementedError, match="stays on its worker"):
                await there
    dataset = await coordinator.create_per_worker_dataset(broken)
    for value in iter(dataset).values:
        for failing in (value, value.fetch(timeout=100)):
            with pytest.raises(ClosureInputError, match="ValueError"):
                await failing
    blocking = ClusterCoordinator(strategy).create_per_worker_dataset(broken)
    with pytest.raises(ClosureInputError, match="ValueError"):
        iter(blocking).values[0].fetch()
