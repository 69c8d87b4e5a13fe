"""Whatever is cancelled at whichever await: an update counts once or not at all, and
the session goes on."""

import numpy as np
import optax
import pytest
from cancels import cancelled_everywhere

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster():
    with zs.LocalCluster(1, 1) as cluster:
        yield cluster


async def test_an_update_counts_once_or_not_at_all_and_nothing_is_held(
    cluster, tmp_path
):
    strategy = zs.ParameterServerStrategy(cluster)
    with strategy.scope():
        v = zs.Variable(np.zeros(3, "f4"), name="v")
        optimizer = zs.Optimizer(optax.sgd(1.0))
    coordinator = zs.AsyncClusterCoordinator(strategy)
    checkpoint = zs.Checkpoint(v=v)
    manager = zs.CheckpointManager(checkpoint, tmp_path / "c", 2)

    @zs.function
    def step():
        v.assign_add(np.ones(3, "f4"))

    def schedule():
        return coordinator.schedule(step)

    async def fetch():
        await coordinator.fetch(await schedule())

    async def join():
        await schedule()
        await coordinator.join()

    def gradient():
        return optimizer.apply_gradients_async([(np.full(3, -1, "f4"), v)])

    async def profile():
        async with coordinator.profile(tmp_path / "line.json", seconds=1000):
            await schedule()
        assert (tmp_path / "line.json").exists()

    async def counted():
        await coordinator.join()
        first, *others = await v.read_value_async()
        assert [*others] == [first, first]
        return first

    for make, counts, cancelled_counts in (
        (schedule, {1}, {0}),
        (fetch, {1}, {0, 1}),
        (join, {1}, {0, 1}),
        (lambda: v.assign_add_async(np.ones(3, "f4")), {1}, {0, 1}),
        (gradient, {1}, {0, 1}),
        (profile, {1}, {0, 1}),
        (manager.save_async, {0}, {0}),
        (lambda: checkpoint.write_async(tmp_path / "one"), {0}, {0}),
    ):
        before = await counted()
        async for was_cancelled in cancelled_everywhere(make):
            after = await counted()
            assert after - before in (cancelled_counts if was_cancelled else counts)
            before = after
    async for _ in cancelled_everywhere(manager.restore_or_initialize_async):
        await counted()
    strategy.close()
