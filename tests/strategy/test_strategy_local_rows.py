"""Rows of a variable of which each replica has a copy: those of its own copy; outside
of replicas those of what is read there; and replicas that bring no rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from in_replicas import meet, number, values

import zstrat as zs

pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")

NONE, SUM = zs.VariableAggregation.NONE, zs.VariableAggregation.SUM


ON_READ = zs.VariableSynchronization.ON_READ


def tables(strategy):
    """A table of each kind; copy i has the rows ``[0, 10, 20] * (i + 1)``."""
    with strategy.scope():
        own = zs.Variable(np.zeros((3, 1), np.float32), name="own", aggregation=NONE)
        read = zs.Variable(
            np.zeros((3, 1), np.float32),
            name="read",
            aggregation=SUM,
            synchronization=ON_READ,
        )

    def fill():
        rows = jnp.arange(3.0).reshape(3, 1) * 10
        own.assign(rows * (number() + 1))
        read.assign(rows * (number() + 1))

    strategy.run(fill)
    return own, read


@pytest.mark.parametrize("is_step", [False, True])
def test_gradients_of_rows_of_the_own_copy(two, is_step):
    own, _ = tables(two)

    def replica():
        meet()

        def loss(table):
            return (zs.embedding_lookup(table, jnp.array([1])) ** 2).sum()

        value, gradient = zs.value_and_grad(loss)(own)
        return value, gradient.values[:, 0]

    run = zs.function(two.run) if is_step else two.run
    value, gradient = run(replica)
    assert values(value) == [100, 400]
    assert values(gradient) == [[20], [40]]


def test_rows_that_are_not_there_are_named(two):
    own, _ = tables(two)

    def adding(row):
        meet()
        rows = jnp.full((2, 1), 1.0)
        own.scatter_add(zs.IndexedSlices(rows, jnp.array([row, row])))

    def reading(row):
        meet()
        return own.sparse_read([row])

    for replica in (adding, reading):
        for row in (3, -1):
            with pytest.raises(IndexError, match=f"{row}"):
                two.run(replica, args=(row,))


def test_outside_of_replicas_rows_are_of_what_is_read(two):
    """The sum of both copies of the one, the first copy of the other."""
    own, read = tables(two)
    ids = np.array([1, 2, 1])

    def rows():
        looked_up = [zs.embedding_lookup(table, ids) for table in (own, read)]
        return own.sparse_read([1]), read.sparse_read([1, 2]), read.value(), looked_up

    for first, summed, whole, looked_up in (rows(), zs.function(rows)()):
        assert np.asarray(first).tolist() == [[10]]
        assert np.asarray(summed).tolist() == [[30], [60]]
        assert np.asarray(whole).tolist() == [[0], [30], [60]]
        for found, factor in zip(looked_up, (1, 3), strict=True):
            np.testing.assert_array_equal(found[:, 0], factor * 10 * ids)


def test_in_merge_call_rows_are_of_what_is_read(two):
    own, read = tables(two)

    def replica():
        return zs.get_replica_context().merge_call(
            lambda strategy: (
                own.sparse_read([1]),
                read.sparse_read([1]),
                zs.embedding_lookup(read, np.array([1])),
            )
        )

    for run in (two.run, zs.function(two.run)):
        first, *summed = map(np.asarray, run(replica))
        assert first.tolist() == [[10]]
        assert [found.tolist() for found in summed] == [[[30]]] * 2


REPLICAS = 2


STRATEGIES = {
    "mirrored": lambda: zs.MirroredStrategy(jax.devices()[:REPLICAS]),
    "central": lambda: zs.CentralStorageStrategy(jax.devices()[:REPLICAS]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def test_an_empty_batch_moves_no_row(strategy):
    with strategy.scope():
        table = zs.Variable(np.ones((4, 2), np.float32))
        optimizer = zs.Optimizer(optax.sgd(1.0))
        counts = zs.Variable(
            np.ones(4), dtype="float32", aggregation=zs.VariableAggregation.SUM
        )
    ids = np.zeros(0, np.int32)

    def replica(ids):
        def loss(table):
            return zs.embedding_lookup(table, ids).sum()

        optimizer.apply_gradients([(zs.grad(loss)(table), table)])
        counts.scatter_add(zs.IndexedSlices(jnp.zeros(0), ids))

    strategy.run(replica, args=(ids,))
    np.testing.assert_array_equal(table.numpy(), np.ones((4, 2)))
    np.testing.assert_array_equal(counts.numpy(), np.ones(4))
