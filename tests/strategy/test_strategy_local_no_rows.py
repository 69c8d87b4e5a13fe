"""Replicas that are one program and bring no rows: XLA gathers no empty arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

REPLICAS = 2
WAYS = ["by itself", "in a step"]
STRATEGIES = {
    "mirrored": lambda: zs.MirroredStrategy(jax.devices()[:REPLICAS]),
    "central": lambda: zs.CentralStorageStrategy(jax.devices()[:REPLICAS]),
}

pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("shape", "axis"), [((0,), 0), ((0, 3), 0), ((3, 0), 1)])
def test_what_is_gathered_is_what_numpy_concatenates(strategy, way, shape, axis):
    def replica():
        return zs.get_replica_context().all_gather(jnp.zeros(shape), axis=axis)

    def program():
        return strategy.run(replica)

    found = (program if way == WAYS[0] else zs.function(program))()
    expected = np.concatenate([np.zeros(shape, np.float32)] * REPLICAS, axis)
    for part in strategy.experimental_local_results(found):
        assert (part.shape, part.dtype) == (expected.shape, expected.dtype)


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
