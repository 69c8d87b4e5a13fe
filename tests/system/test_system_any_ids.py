"""Tables of any id against real daemons: training as a partitioned variable, ids of
datasets, all rows."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.ids import hashes_of

pytestmark = [pytest.mark.processes]

ROWS, DIM, STEPS = 40, 4, 200


@pytest.fixture(scope="module")
def strategy(daemons):
    return zs.ParameterServerStrategy(daemons.resolver)


@pytest.fixture(scope="module")
def coordinator(strategy):
    with zs.ClusterCoordinator(strategy) as coordinator:
        yield coordinator


@pytest.mark.parametrize(
    "rule",
    [optax.sgd(0.1), optax.adagrad(0.1), optax.adam(0.01)],
    ids=["sgd", "adagrad", "adam"],
)
def test_dense_ids_train_as_a_partitioned_variable(strategy, coordinator, rule):
    """Bit by bit: the same first rows, the same gradients, 200 steps."""
    first = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    with strategy.scope():
        table = zs.HashTable(DIM, name="any")
        parts = [zs.Variable(half) for half in np.split(first, 2)]
        dense = zs.ShardedVariable(parts)
        one, other = zs.Optimizer(rule), zs.Optimizer(rule)
    table.assign(np.arange(ROWS), first)

    @zs.function
    def step(ids, y):
        def loss(where):
            return jnp.sum((zs.embedding_lookup(where, ids).sum(-1) - y) ** 2)

        value, gradient = zs.value_and_grad(loss)(table)
        one.apply_gradients([(gradient, table)])
        other.apply_gradients([(zs.grad(loss)(dense), dense)])
        return value

    draw = np.random.default_rng(1)
    for _ in range(STEPS):
        ids = np.concatenate([[0, ROWS - 1], draw.integers(ROWS, size=6)])
        y = draw.normal(size=8).astype(np.float32)
        coordinator.fetch(coordinator.schedule(step, args=(ids, y)))  # one at a time
    assert len(table) == ROWS
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), dense.numpy())


def test_ids_of_datasets_keep_their_bits_on_workers(strategy, coordinator):
    ids = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, (32, 3))
    ids[::4, 0] = 2**32  # 0 with 32 bits
    with strategy.scope():
        table = zs.HashTable(2, initializer=zs.initializers.constant(1.0))
        optimizer = zs.Optimizer(optax.sgd(0.5))

    data = coordinator.create_leased_dataset(ids, batch=4)

    @zs.function
    def step(iterator):
        batch = next(iterator)

        def loss(where):
            mask = (batch != 0).astype(jnp.float32)[..., None]
            return jnp.sum(zs.embedding_lookup(where, batch * 2 + 1) * mask)

        value, gradient = zs.value_and_grad(loss)(table)
        optimizer.apply_gradients([(gradient, table)])
        return value

    coordinator.schedule_epoch(step, iter(data))
    coordinator.join()
    unique, counts = np.unique(ids * 2 + 1, return_counts=True)
    wanted = np.repeat((1 - 0.5 * counts)[:, None], 2, 1)
    np.testing.assert_array_equal(table.lookup(unique), wanted)
    found = list(table.items())
    every = np.concatenate([some for some, _ in found])
    np.testing.assert_array_equal(np.sort(every), unique)
    buckets = hashes_of(every) >> np.uint64(52)
    assert (buckets[1:] >= buckets[:-1]).all()
    for some, rows in found:
        np.testing.assert_array_equal(table.lookup(some), rows)


def test_first_values_depend_on_seed_name_and_id(strategy):
    ids = np.array([5, -(2**60), 2**40])
    with strategy.scope():
        one = zs.HashTable(3, seed=1, name="one")
        again = zs.HashTable(3, seed=1, name="one")
        other = zs.HashTable(3, seed=1, name="other")
        wide = zs.HashTable((2, 3), seed=1, name="one", dtype=jnp.bfloat16)
    first = one.lookup(ids)
    assert len(one) == 0
    assert np.abs(first).max() <= 0.05
    assert len(np.unique(first)) == 9
    np.testing.assert_array_equal(again.lookup(ids), first)
    assert not np.isin(other.lookup(ids), first).any()
    assert wide.lookup(ids).shape == (3, 2, 3)
    assert wide.dim == 6
    one.assign(ids[:1], np.ones((1, 3), np.float32))
    np.testing.assert_array_equal(again.lookup(ids), first)
    one.remove(ids)
    np.testing.assert_array_equal(one.lookup(ids), first)


def test_lengths_of_rows_are_integers_of_any_kind(strategy):
    with strategy.scope():
        assert zs.HashTable(np.int64(3)).shape[1:] == (3,)
        assert zs.HashTable(np.array([3, 2])).shape[1:] == (3, 2)
        for dim in ("3", 3.0, [2.5], None):
            with pytest.raises(TypeError, match="dim="):
                zs.HashTable(dim)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: zs.HashTable(0), "dim"),
        (lambda: zs.HashTable(3, initializer=zs.initializers.he_normal()), "uniform"),
        (lambda: zs.HashTable(3, dtype="int32"), "int32"),
    ],
)
def test_tables_that_cannot_be_are_refused(strategy, make, error):
    with pytest.raises(ValueError, match="HashTable"):
        make()
    with strategy.scope(), pytest.raises(ValueError, match=error):
        make()
