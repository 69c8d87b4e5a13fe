"""Distributed datasets on real workers with several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def strategy():
    with zs.LocalCluster(num_ps=1, num_workers=1, worker_devices=2) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        yield strategy
        strategy.close()


@pytest.mark.shows("ParameterServerStrategy.experimental_distribute_dataset")
def test_a_dataset_function_distributes_over_the_replicas_of_its_worker(strategy):
    coordinator = zs.ClusterCoordinator(strategy)

    def dataset_fn():
        x = np.arange(12, dtype=np.float32).reshape(6, 2)
        dataset = zs.data.Dataset.from_tensor_slices({"x": x}).repeat().batch(2)
        return strategy.experimental_distribute_dataset(dataset)

    @zs.function
    def step(iterator):
        batch = next(iterator)
        assert isinstance(batch["x"], zs.PerReplica)
        sums = strategy.run(lambda batch: jnp.sum(batch["x"]), args=(batch,))
        return strategy.gather(strategy.run(lambda b: b["x"], args=(batch,)), 0), sums

    dataset = coordinator.create_per_worker_dataset(dataset_fn)
    one = jax.ShapeDtypeStruct((1, 2), np.float32)
    assert dataset.element_spec["x"].values == (one, one)
    iterator = iter(dataset)
    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(4)]
    coordinator.join()
    for number, value in enumerate(values):
        start = 4 * (number % 3)
        rows, sums = value.fetch()
        np.testing.assert_array_equal(rows, np.arange(start, start + 4).reshape(2, 2))
        assert [float(x) for x in sums.values] == [2 * start + 1, 2 * start + 5]


def test_a_handle_is_a_per_worker_dataset_itself(strategy):
    coordinator = zs.ClusterCoordinator(strategy)
    handle = strategy.distribute_datasets_from_function(
        lambda context: zs.data.Dataset.range(8).batch(
            context.get_per_replica_batch_size(4)
        )
    )
    iterator = iter(coordinator.create_per_worker_dataset(handle))

    @zs.function
    def step(iterator):
        return strategy.reduce("sum", next(iterator), axis=0)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(2)]
    coordinator.join()
    assert [int(value.fetch()) for value in values] == [6, 22]
    coordinator.schedule(step, args=(iterator,))
    with pytest.raises(zs.OutOfRangeError):
        coordinator.join()
