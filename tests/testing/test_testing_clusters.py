"""Clusters of daemons and of threads, and what befalls their tasks."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.testing import DaemonCluster, ThreadCluster, in_thread

ROOT = Path(__file__).resolve().parents[2]
SWIFT = Settings(timeouts=Timeouts(beat=0.2, liveness=2.0, reconnect=0.3))

pytestmark = pytest.mark.processes


def counting(cluster):
    """A strategy over the cluster, a variable, and a step that adds one to it."""
    strategy = zs.ParameterServerStrategy(cluster.resolver, settings=cluster.settings)
    with strategy.scope():
        count = zs.Variable(np.float32(0))

    @zs.function
    def step():
        count.assign_add(1.0)
        return zs.get_current_worker_index()

    return strategy, count, step


@pytest.mark.parametrize("kind", [DaemonCluster, ThreadCluster])
def test_a_program_trains_on_either_through_cuts(kind):
    with kind(1, 2, settings=SWIFT) as cluster:
        assert cluster.tasks == ("ps:0", "worker:0", "worker:1")
        strategy, count, step = counting(cluster)
        with strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            for task in cluster.tasks:
                coordinator.schedule(step)
                cluster.reset(task)
            with cluster.blackholed("worker:0"):  # the other one does its work
                for _ in range(7):
                    coordinator.schedule(step)
                coordinator.join()
            assert count.numpy() == 10.0
        with pytest.raises(ValueError, match=r"'ps:1'.*ps:0"):
            cluster.relay("ps:1")


def test_a_daemon_is_frozen_and_killed_and_comes_back():
    with DaemonCluster(1, 2, settings=SWIFT) as cluster:
        strategy, count, step = counting(cluster)
        with strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            with cluster.frozen("worker:0"):
                assert coordinator.schedule(step).fetch() in (0, 1)
                coordinator.join()
            before = cluster.local.pid("worker:1")
            with cluster.killed("worker:1"):
                assert not cluster.local.is_running("worker:1")
                assert coordinator.schedule(step).fetch() == 0
            assert cluster.local.is_running("worker:1")
            assert cluster.local.pid("worker:1") != before
            assert count.numpy() == 2.0


async def test_a_cluster_for_programs_of_asyncio():
    async with in_thread(ThreadCluster(settings=SWIFT)) as cluster:
        strategy, count, step = await asyncio.to_thread(counting, cluster)
        coordinator = zs.AsyncClusterCoordinator(strategy)
        async with in_thread(cluster.blackholed("worker:0")):
            value = await coordinator.schedule(step)
        assert await coordinator.fetch(value) == 0
        await coordinator.join()
        assert await asyncio.to_thread(count.numpy) == 1.0
        await asyncio.to_thread(strategy.close)


def test_what_does_not_start_leaves_nothing():
    unlucky = Settings(timeouts=Timeouts(connect=0.001))
    with pytest.raises(zs.DeadlineExceededError), DaemonCluster(settings=unlucky):
        pass


def test_the_test_of_the_page_passes():
    path = ROOT / "docs" / "testing.md"
    (block,) = re.findall(
        r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
    )
    names = {}
    exec(compile(block, str(path), "exec"), names)
    (test,) = [each for name, each in names.items() if name.startswith("test_")]
    test()
