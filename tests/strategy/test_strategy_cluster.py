"""The strategy with real daemons: a worker of several devices, what is deleted, and a
program that knows only some tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

TRUTH = np.array([1.0, -2.0, 3.0], np.float32)
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def strategy():
    with zs.LocalCluster(num_ps=2, num_workers=1, worker_devices=2) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        yield strategy
        strategy.close()


@pytest.mark.shows("ParameterServerStrategy.experimental_distribute_dataset")
@pytest.mark.parametrize("is_handle", [True, False])
def test_two_replicas_of_a_worker_train_one_model(strategy, is_handle):
    """On a distributed dataset that the worker makes, or was given a handle of."""
    coordinator = zs.ClusterCoordinator(strategy)
    with strategy.scope():
        w = zs.Variable(np.zeros(3, np.float32), name="w")
        optimizer = zs.Optimizer(optax.sgd(0.05), count_iterations=True)

    def dataset_fn():
        rows = zs.data.Dataset.from_tensor_slices({"x": X, "y": X @ TRUTH})
        return strategy.experimental_distribute_dataset(rows.repeat().batch(16))

    @zs.function
    def step(iterator):
        here = zs.get_strategy()
        assert here.num_replicas_in_sync == strategy.num_replicas_in_sync == 2

        def replica_fn(batch):
            x, y = batch["x"], batch["y"]
            assert x.shape == (8, 3)

            def loss_fn(w):
                return jnp.mean((x @ w - y) ** 2) / 2

            loss, gradient = zs.value_and_grad(loss_fn)(w)
            optimizer.apply_gradients([(gradient, w)])
            return loss

        batch = next(iterator)
        losses = here.run(replica_fn, args=(batch,))
        rows = here.gather(here.run(lambda b: b["x"], args=(batch,)), 0)
        return here.reduce("sum", losses, axis=None), losses, rows

    dataset = coordinator.create_per_worker_dataset(
        dataset_fn() if is_handle else dataset_fn
    )
    if not is_handle:
        one = jax.ShapeDtypeStruct((8, 3), np.float32)
        assert dataset.element_spec["x"].values == (one, one)
    iterator = iter(dataset)
    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(200)]
    coordinator.join()
    np.testing.assert_allclose(w.numpy(), TRUTH, atol=1e-2)
    assert optimizer.iterations.numpy() == 200
    for number in (0, 1, 6):
        total, parts, rows = values[number].fetch()
        np.testing.assert_allclose(total, sum(parts.values), rtol=1e-6)
        np.testing.assert_array_equal(rows, np.split(X, 4)[number % 4])


def test_deleted_variables_are_gone(strategy):
    with strategy.scope():
        kept = zs.Variable([1.0])
        gone = zs.create_variables([np.float32([1]), np.float32([2])])
    strategy.delete_variables(gone)
    for use in (gone[0].numpy, gone[1].numpy, lambda: strategy.delete_variables(gone)):
        with pytest.raises(zs.errors.NotFoundError):
            use()
    assert kept.numpy() == [1.0]


def test_a_program_that_knows_only_some_workers(daemons):
    spec = daemons.spec
    known = {
        "ps": [spec.task_address("ps", 0)],
        "worker": {"1": spec.task_address("worker", 1)},
    }
    resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(known))
    with zs.ParameterServerStrategy(resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)

        @zs.function
        def which():
            context = zs.get_worker_context()
            return context.worker_index, context.worker_count

        assert coordinator.schedule(which).fetch() == (0, 1)
