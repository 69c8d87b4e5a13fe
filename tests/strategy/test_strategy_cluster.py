"""The strategy with real daemons: workers of several devices, refusals from a ps."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

TRUTH = np.array([1.0, -2.0, 3.0], np.float32)


@pytest.fixture(scope="module")
def strategy():
    with zs.LocalCluster(num_ps=2, num_workers=1, worker_devices=2) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        yield strategy
        strategy.close()


def test_two_replicas_of_a_worker_train_one_model(strategy):
    assert strategy.num_replicas_in_sync == 2
    coordinator = zs.ClusterCoordinator(strategy)
    with strategy.scope():
        w = zs.Variable(np.zeros(3, np.float32), name="w")
        optimizer = zs.Optimizer(optax.sgd(0.05), count_iterations=True)

    def dataset_fn():
        x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        return zs.data.Dataset.from_tensor_slices((x, x @ TRUTH)).repeat().batch(16)

    @zs.function
    def step(iterator):
        def replica_fn(batch):
            x, y = batch
            assert x.shape == (8, 3)
            loss, gradient = zs.value_and_grad(
                lambda w: jnp.mean((x @ w - y) ** 2) / strategy.num_replicas_in_sync
            )(w)
            optimizer.apply_gradients([(gradient, w)])
            return loss

        losses = strategy.run(replica_fn, args=(next(iterator),))
        return strategy.reduce("sum", losses, axis=None), losses

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(200)]
    coordinator.join()
    np.testing.assert_allclose(w.numpy(), TRUTH, atol=1e-2)
    assert optimizer.iterations.numpy() == 200
    total, parts = values[0].fetch()
    assert isinstance(parts, zs.PerReplica)
    np.testing.assert_allclose(total, sum(parts.values), rtol=1e-6)


def test_a_worker_traces_a_step_in_the_scope_of_its_strategy(strategy):
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function
    def step(x):
        here = zs.get_strategy()
        parts = here.run(lambda x: x + 1, args=(x,))
        return here.num_replicas_in_sync, here.reduce("sum", parts, axis=None)

    assert coordinator.schedule(step, args=(1.0,)).fetch() == (2, 4.0)


def test_what_mixes_variables_is_refused_when_the_tree_is_known(strategy):
    """The norm of what adam makes of all gradients: no ps has all of them."""
    mixes = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))
    with strategy.scope():
        a, b = zs.Variable([1.0], name="a"), zs.Variable([2.0], name="b")
        with pytest.raises(ValueError, match=r"'mixes'.*'a'.*'b'"):
            zs.Optimizer(mixes, name="mixes", params=[a, b])
        late = zs.Optimizer(mixes, name="late")
        with pytest.raises(ValueError, match=r"'late'.*'a'.*'b'"):
            late.apply_gradients([(np.float32([1.0]), a), (np.float32([1.0]), b)])
        zs.Optimizer(optax.sgd(1.0)).apply_gradients([(np.float32([1.0]), a)])
    assert (a.numpy(), b.numpy()) == ([0.0], [2.0])


def test_gradients_are_clipped_by_the_norm_of_all(strategy):
    with strategy.scope():
        a, b = zs.Variable([0.0], name="a"), zs.Variable([0.0], name="b")
        clip = zs.Optimizer(optax.clip_by_global_norm(1.0), name="clip")
    # What the transformation makes of gradients is added: a norm of 5 becomes 1.
    clip.apply_gradients([(np.float32([3.0]), a), (np.float32([4.0]), b)])
    np.testing.assert_allclose([*a.numpy(), *b.numpy()], [0.6, 0.8], rtol=1e-6)


async def test_variables_block_or_wait_in_a_running_loop(strategy):
    with strategy.scope():
        x = zs.Variable([1.0, 2.0])
    x.assign_add([1.0, 1.0])
    await asyncio.gather(*(x.assign_sub_async([0.5, 0.5]) for _ in range(2)))
    np.testing.assert_array_equal(await x.value_async(), [1.0, 2.0])
    np.testing.assert_array_equal(x.numpy(), [1.0, 2.0])


def test_deleted_variables_are_gone(strategy):
    with strategy.scope():
        kept = zs.Variable([1.0])
        gone = zs.create_variables([np.float32([1]), np.float32([2])])
    strategy.delete_variables(gone)
    for variable in gone:
        with pytest.raises(zs.errors.NotFoundError):
            variable.numpy()
    with pytest.raises(zs.errors.NotFoundError):
        strategy.delete_variables(gone)
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
