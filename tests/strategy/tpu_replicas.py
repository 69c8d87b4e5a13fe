"""Batches for the replicas of a TPU strategy, and their results put together."""

import numpy as np

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
Y = RNG.normal(size=(8, 4)).astype(np.float32)
W = RNG.normal(size=(6, 4)).astype(np.float32)


def on_replicas(strategy, array):
    """Its rows, distributed to the replicas."""
    parts = np.split(array, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def whole(strategy, value):
    parts = strategy.experimental_local_results(value)
    return np.concatenate([np.asarray(part) for part in parts])
