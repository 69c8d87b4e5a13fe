"""Rows of a variable that is brought together when it is read, of several devices."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat import VariableAggregation as Aggregation

ON_READ = zs.VariableSynchronization.ON_READ
ROWS = np.arange(3, dtype=np.float32).reshape(3, 1)
IDS = np.array([2, 0, 2])


def counted(strategy, aggregation):
    with strategy.scope():
        v = zs.Variable(
            np.zeros((3, 1), np.float32),
            aggregation=aggregation,
            synchronization=ON_READ,
        )

    def replica():
        number = zs.get_replica_context().replica_id_in_sync_group
        v.assign_add(jnp.asarray(ROWS) * (number + 1))

    strategy.run(replica)
    return v


def merged(strategy, read):
    found = strategy.run(lambda: zs.get_replica_context().merge_call(lambda _: read()))
    return strategy.experimental_local_results(found)[0]


def ways(strategy, v):
    return {
        "sparse_read": lambda: v.sparse_read(IDS),
        "embedding_lookup": lambda: zs.embedding_lookup(v, IDS),
        "step": lambda: zs.function(lambda: v.sparse_read(IDS))(),
        "merge_call": lambda: merged(strategy, lambda: v.sparse_read(IDS)),
        "lookup in merge_call": lambda: merged(
            strategy, lambda: zs.embedding_lookup(v, IDS)
        ),
    }


@pytest.mark.parametrize("how", list(ways(None, None)))
def test_rows_of_all_copies(two, how):
    v = counted(two, Aggregation.SUM)
    np.testing.assert_array_equal(ways(two, v)[how](), (ROWS * 3)[IDS])


@pytest.mark.parametrize("how", list(ways(None, None)))
def test_what_has_no_one_value_has_no_rows(two, how):
    v = counted(two, Aggregation.NONE)
    with pytest.raises(ValueError, match="NONE"):
        ways(two, v)[how]()
