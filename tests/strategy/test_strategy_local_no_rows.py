"""Replicas that are one program and bring no rows: XLA gathers no empty arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

REPLICAS = 2
STRATEGIES = {
    "mirrored": lambda: zs.MirroredStrategy(jax.devices()[:REPLICAS]),
    "central": lambda: zs.CentralStorageStrategy(jax.devices()[:REPLICAS]),
}

pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


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
