"""Replica functions that return random keys run, in turns: no program returns them."""

import jax
import numpy as np
import pytest

import zstrat as zs


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: zs.OneDeviceStrategy("CPU:1"),
        lambda: zs.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
        lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    ],
)
def test_keys_are_returned(strategy):
    strategy = strategy()
    own = strategy.experimental_distribute_values_from_function(
        lambda context: jax.random.key(context.replica_id_in_sync_group)
    )

    def fn(key, own):
        return jax.random.split(key, 2), {"own": jax.random.fold_in(own, 1)}

    found = strategy.run(fn, (jax.random.key(7), own))
    for number, result in enumerate(strategy.experimental_local_results(found)):
        expected = fn(jax.random.key(7), jax.random.key(number))
        jax.tree.map(
            np.testing.assert_array_equal,
            *[jax.tree.map(jax.random.key_data, x) for x in (result, expected)],
        )
