"""One session of a program: it connects, makes what it needs, trains, and closes."""

import gc

import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs

AT_ONCE = 500
"""Closures between two joins."""
RARE = 5
"""How many of them are of each kind that is slow."""
ROWS, WIDTH = 64, 4
LARGE = 40_000
"""Elements of a result that stays on its worker until it is fetched."""


def play(spec, closures, began=lambda: None):
    """A whole session.

    Args:
        began: Called when the first closures have ended.
    """
    with connected(spec) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        steps = made(strategy, coordinator)
        while closures > 0:
            values = [
                coordinator.schedule(*steps[at % len(steps) if at < 3 * RARE else 0])
                for at in range(min(AT_ONCE, closures))
            ]
            coordinator.join()
            values[min(3, len(values) - 1)].fetch()
            closures -= len(values)
            began()


def connected(spec):
    return zs.ParameterServerStrategy(
        zs.cluster_resolver.SimpleClusterResolver(spec),
        variable_partitioner=zs.partitioners.FixedShardsPartitioner(2),
    )


def made(strategy, coordinator):
    """Variables, an optimizer and a dataset; steps of several kinds that use them, each
    with its arguments."""
    with strategy.scope():
        dense = zs.Variable(np.zeros(16, np.float32), name="dense")
        table = zs.Variable(zs.initializers.uniform(), shape=(ROWS, WIDTH), name="rows")
        adam = zs.Optimizer(optax.adam(0.01))
    draws = iter(coordinator.create_per_worker_dataset(numbers))

    @zs.function
    def add(i):
        dense.assign_add(jnp.full(16, i, jnp.float32))

    @zs.function
    def move(i):
        def loss(v, t):
            rows = zs.embedding_lookup(t, jnp.stack([i, ROWS - 1 - i]))
            return (rows**2).sum() + (v**2).sum()

        value, grads = zs.value_and_grad(loss, (0, 1))(dense, table)
        adam.apply_gradients(grads, (dense, table))
        return value

    @zs.function
    def draw(iterator):
        dense.assign_sub(jnp.full(16, next(iterator), jnp.float32))

    @zs.function
    def keep():
        return jnp.zeros(LARGE)

    @zs.function(eager=True)
    def add_in_parts(i):
        dense.assign_add(np.full(16, i, np.float32))
        dense.value()
        one = zs.IndexedSlices(np.ones((1, WIDTH), np.float32), np.array([i]))
        table.scatter_add(one)

    dense.assign_add(np.ones(16, np.float32))
    steps = [(add, (3,)), (move, (5,)), (draw, (draws,)), (keep, ())]
    return [*steps, (add_in_parts, (7,))]


def numbers():
    ids = np.arange(ROWS, dtype=np.int32)
    return zs.data.Dataset.from_tensor_slices(ids).repeat()


def objects():
    """In the process that calls it."""
    gc.collect()
    return len(gc.get_objects())


class Census:
    """An initializer: it makes the number of objects of the process that runs it."""

    def __call__(self, shape, dtype, partition_shape=None, partition_offset=None):
        return np.full(partition_shape or shape, objects(), dtype)


def census(spec):
    """By task: a session that does nothing but count."""
    servers, workers = len(spec.task_indices("ps")), len(spec.task_indices("worker"))
    with connected(spec) as strategy:
        with strategy.scope():
            there = zs.Variable(
                Census(), shape=(servers,), dtype="int64", name="census"
            )
        found = {f"ps:{n}": int(count) for n, count in enumerate(there.numpy())}
        coordinator = zs.ClusterCoordinator(strategy)

        @zs.function(eager=True)
        def count():
            return zs.get_worker_context().worker_index, objects()

        while len(found) < servers + workers:
            values = [coordinator.schedule(count) for _ in range(4 * workers)]
            coordinator.join()
            for value in values:
                index, number = value.fetch()
                found[f"worker:{int(index)}"] = int(number)
    return found
