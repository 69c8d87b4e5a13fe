"""A parameter server is killed for real, and the program goes on from a checkpoint."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.coordinator.recovery import Inventory
from zstrat.testing import leak_check

pytestmark = pytest.mark.processes

SLOTS = 200


@pytest.fixture(scope="module")
def cluster():
    with leak_check(), zs.LocalCluster(num_ps=2, num_workers=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Looked at behind all tests: what one has started again may stay for the next."""


def _strategy(local, **options):
    return zs.ParameterServerStrategy(
        local.resolver, on_ps_loss="restore", ps_wait_timeout=300, **options
    )


def test_no_error_and_each_step_once_on_the_restored_values(local, tmp_path, caplog):
    with _strategy(local) as strategy, ThreadPoolExecutor(2) as pool:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            counts = [zs.Variable(np.zeros(SLOTS, "f4"), name=name) for name in "ab"]
            rows = zs.Variable(np.ones((SLOTS, 2), "f4"), name="rows")
            adagrad = zs.Optimizer(optax.adagrad(0.1))
            born = zs.HashTable(1, initializer=zs.initializers.constant(0.0))
            sgd = zs.Optimizer(optax.sgd(1.0))
            ended = zs.Variable(7.0, name="ended", per_worker_variable=True)

        @zs.function
        def bump(i, number):
            looked_up = zs.grad(lambda t: jnp.sum(zs.embedding_lookup(t, number)))
            sgd.apply_gradients([(looked_up(born), born)])
            for count in counts:
                count.assign_add(jax.nn.one_hot(i, SLOTS, dtype=jnp.float32))
            ended.assign_add(1.0)
            looked_up = zs.grad(lambda t: jnp.sum(zs.embedding_lookup(t, i[None])))
            adagrad.apply_gradients([(looked_up(rows), rows)])
            return i

        def bumps(numbers):
            args = [(np.int32(i), ids[i]) for i in numbers]
            return [coordinator.schedule(bump, args=each) for each in args]

        ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, SLOTS)
        checkpoint = zs.Checkpoint(
            counts=counts, rows=rows, adagrad=adagrad, born=born, sgd=sgd
        )
        manager = zs.CheckpointManager(checkpoint, tmp_path, 3)
        values = bumps(range(50))
        coordinator.join()
        saved = manager.save()
        values += bumps(range(50, 100))
        coordinator.join()
        values += bumps(range(100, 150))
        values[100].fetch()
        local.kill("ps:1")
        values += bumps(range(150, SLOTS))
        reading, saving = pool.submit(counts[1].numpy), pool.submit(manager.save)
        local.restart("ps:1")
        coordinator.join()
        metrics = coordinator.metrics()
        assert metrics["ps_restores"] == 1
        assert f"filled from {saved}. {metrics['steps_lost']} steps" in caplog.text
        assert [int(value.fetch()) for value in values] == list(range(SLOTS))
        a, b = zs.values(counts)
        np.testing.assert_array_equal(a, b)
        moved = rows.numpy()[:, 0] < 1
        np.testing.assert_array_equal(moved, a == 1)
        np.testing.assert_array_equal(born.lookup(ids)[:, 0], -a)
        assert len(born) == a.sum()
        assert a.sum() == SLOTS - metrics["steps_lost"]
        assert set(a[:50]) == {1}, "what the checkpoint has"
        assert set(a[50:100]) == {0}, "what had ended after it"
        assert set(a[100:150]) <= {0, 1}
        assert set(a[150:]) == {1}, "what came behind the loss"
        own = sum(ended.read_all()) - 2 * 7
        assert own == a.sum() - 50, "what cannot be saved begins anew"
        assert reading.result().shape == (SLOTS,)
        checkpoint.restore(saving.result())


def test_adam_goes_on_as_if_restored_by_hand(local, tmp_path, monkeypatch, caplog):
    partitioner = zs.partitioners.FixedShardsPartitioner(2)
    with _strategy(local, variable_partitioner=partitioner) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            params = {
                "table": zs.Variable(np.ones((6, 2), "f4"), name="table"),
                "bias": zs.Variable(np.zeros(2, "f4"), name="bias"),
            }
            adam = zs.Optimizer(optax.adam(0.1), params=params, count_iterations=True)

        def loss(p, i):
            return jnp.sum((p["table"] * (i + 1) + p["bias"] - jnp.arange(2.0)) ** 2)

        @zs.function
        def train(i):
            adam.apply_gradients(zs.grad(loss)(params, i), params)

        def trained(numbers):
            for i in numbers:
                coordinator.schedule(train, args=(i,))
                coordinator.join()  # in this order
            state = zs.values([adam.state, params])
            return jax.tree.leaves((int(adam.iterations.numpy()), state))

        checkpoint = zs.Checkpoint(params=params, adam=adam)
        trained(range(3))
        saved = checkpoint.save(tmp_path / "c")
        trained(range(3, 5))
        create_again, killed = Inventory.create_again, []

        async def killing(inventory, client, patience):
            if not killed:  # the other one dies while they are filled
                killed.append("ps:0")
                await asyncio.to_thread(local.restart, "ps:0")
            await create_again(inventory, client, patience)

        monkeypatch.setattr(Inventory, "create_again", killing)
        local.restart("ps:1")
        by_itself = trained(range(5, 8))
        metrics = coordinator.metrics()
        assert (metrics["ps_restores"], metrics["steps_lost"]) == (1, 2)
        assert killed
        checkpoint.restore(saved)
        by_hand = trained(range(5, 8))
        assert by_itself[0] == 6
        zs.Checkpoint(params=params).save(tmp_path / "parts")
        assert "lacks variable 'Optimizer/iterations', optimizer 'Opt" in caplog.text
        jax.tree.map(np.testing.assert_array_equal, by_itself, by_hand)
