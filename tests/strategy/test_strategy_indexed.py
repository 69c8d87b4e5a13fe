"""Data that a coordinator leases, distributed by a strategy without one."""

import jax
import numpy as np
import pytest

import zstrat as zs


@pytest.mark.parametrize("drop", [False, True])
def test_replicas_share_each_batch_of_the_permutation(drop):
    data = zs.data.Dataset.from_indexed(
        np.arange(22), 8, shuffle_seed=1, epochs=2, drop_remainder=drop
    )
    strategy = zs.MirroredStrategy(jax.devices()[:2])
    found = []
    for batch in strategy.experimental_distribute_dataset(data):
        rows = [np.asarray(x) for x in strategy.experimental_local_results(batch)]
        found.append(np.concatenate(rows).tolist())
    assert found == [batch.tolist() for batch in data]
