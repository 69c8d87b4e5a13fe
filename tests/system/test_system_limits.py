"""What a look at a live run finds, in runs that are held up on purpose."""

import asyncio
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.config import Settings
from zstrat.launch import examine_run
from zstrat.transport import run

pytestmark = pytest.mark.processes


@pytest.fixture
def coordinator(daemons):
    """Of a session in which nothing has happened yet."""
    with zs.ParameterServerStrategy(daemons.resolver) as strategy:
        yield zs.ClusterCoordinator(strategy)


def looked_at(daemons):
    """One look, at the last ten seconds."""

    async def look():
        enough = asyncio.Event()
        enough.set()
        return await examine_run(daemons.spec, Settings(), 60.0, 30.0, enough)

    found = run(look())
    assert found.problems == {}
    return found


def test_a_dataset_that_waits_is_named(daemons, coordinator):
    def slow():
        while True:
            threading.Event().wait(0.3)  # for a disk that is not there
            yield np.ones(4, np.float32)

    @zs.function
    def step(iterator):
        return jnp.sum(next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(slow))
    for _ in range(10):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    found = looked_at(daemons)
    draws = [limit for limit in found.limits if limit.what == "draw"]
    assert draws
    assert draws[0] == found.limits[0]
    assert draws[0].task.startswith("worker:")
    assert "waits for its dataset" in draws[0].words
    # A quantile is off by a quarter at most.
    assert draws[0].numbers["draw_p50"] >= 0.3 / 1.25


def test_bytes_that_lie_on_one_parameter_server_are_named(daemons, coordinator):
    with coordinator.strategy.scope():
        large = zs.Variable(np.zeros((1024, 1024), np.float32), name="large")
    (server,) = {large.device.split("/task:")[1].split("/")[0]}

    @zs.function
    def step():
        large.assign_add(jnp.ones_like(large.value()))

    for _ in range(16):
        coordinator.schedule(step)
    coordinator.join()
    found = looked_at(daemons)
    (imbalance,) = [limit for limit in found.limits if limit.what == "imbalance"]
    assert imbalance.task == f"ps:{server}"
    assert imbalance.numbers[f"ps:{server}"] > 0.9 * sum(imbalance.numbers.values())
    assert "variable_partitioner" in imbalance.advice
