"""What a parameter server remembers of closures, where it can remember little."""

import contextlib

import numpy as np
import pytest

import zstrat as zs
from zstrat.coordinator import _fences, _queue
from zstrat.ps.store import _ledger

CAPACITY = 16
STEPS = 5 * CAPACITY


@pytest.fixture
def strategy(monkeypatch):
    """A ps and two workers in this process, with a ledger of a few steps."""
    monkeypatch.setattr(_ledger, "CAPACITY", CAPACITY)
    monkeypatch.setattr(_queue, "MAX_AHEAD", CAPACITY // 2)
    monkeypatch.setattr(_fences, "INTERVAL", 0.0)
    with contextlib.ExitStack() as stack:
        addresses = {"ps": [], "worker": []}
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1)):
            place = {job: {index: "127.0.0.1:0"}}
            server = stack.enter_context(zs.Server(place, job, index))
            addresses[job].append(server.target.removeprefix("tcp://"))
        resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(addresses))
        yield stack.enter_context(zs.ParameterServerStrategy(resolver))


def test_a_closure_may_outlive_more_others_than_can_be_remembered(strategy):
    with strategy.scope():
        count, gate = (zs.Variable(np.float32(0), name=name) for name in ("n", "gate"))

    @zs.function(eager=True)
    def slow():
        while not gate.value():
            pass
        count.assign_add(np.float32(1000))

    @zs.function
    def quick():
        count.assign_add(np.float32(1))

    coordinator = zs.ClusterCoordinator(strategy, closures_in_flight=1)
    held = coordinator.schedule(slow)
    others = [coordinator.schedule(quick) for _ in range(STEPS)]
    ahead = CAPACITY // 2 - 1
    others[ahead - 1].fetch(timeout=60)
    metrics = coordinator.metrics()
    assert metrics["low_water"] == 1
    assert (metrics["inflight_closures"], metrics["queued_closures"]) == (
        1,
        STEPS - ahead,
    )
    assert not held.is_ready
    gate.assign(np.float32(1))
    coordinator.join(timeout=60)
    assert count.numpy() == 1000 + STEPS
