"""Random keys among results, elements and gathered values of replica functions.

No program returns keys: functions that do run in turns.
"""

import jax
import numpy as np
import pytest

import zstrat as zs

pytestmark = pytest.mark.parametrize(
    "strategy",
    [
        lambda: zs.OneDeviceStrategy("CPU:1"),
        lambda: zs.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
        lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    ],
)


def require_equal(found, expected):
    data = [jax.tree.map(jax.random.key_data, x) for x in (found, expected)]
    jax.tree.map(np.testing.assert_array_equal, *data)


def keys_of(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda context: jax.random.key(context.replica_id_in_sync_group)
    )


def test_keys_are_returned(strategy):
    strategy = strategy()

    def fn(key, own):
        return jax.random.split(key, 2), {"own": jax.random.fold_in(own, 1)}

    found = strategy.run(fn, (jax.random.key(7), keys_of(strategy)))
    for number, result in enumerate(strategy.experimental_local_results(found)):
        require_equal(result, fn(jax.random.key(7), jax.random.key(number)))


def test_keys_are_gathered_outside_of_a_step(strategy):
    strategy = strategy()

    def fn(key):
        return zs.get_replica_context().all_gather(key[None], axis=0)

    found = strategy.run(fn, (keys_of(strategy),))
    every = jax.vmap(jax.random.key)(np.arange(strategy.num_replicas_in_sync))
    for result in strategy.experimental_local_results(found):
        require_equal(result, every)


def pairs(context):
    del context
    return ({"key": jax.random.key(n), "n": np.float32(n)} for n in range(4))


def test_elements_with_a_key_are_drawn_outside_of_a_step(strategy):
    strategy = strategy()
    count = strategy.num_replicas_in_sync
    iterator = iter(strategy.distribute_datasets_from_function(pairs))
    drawn = strategy.run(lambda b: jax.random.normal(b["key"]), (next(iterator),))
    expected = [jax.random.normal(jax.random.key(n)) for n in range(count)]
    assert list(strategy.experimental_local_results(drawn)) == expected


def test_elements_with_a_key_are_refused_where_a_step_draws_them(strategy):
    strategy = strategy()
    iterator = iter(strategy.distribute_datasets_from_function(pairs))

    @zs.function
    def step(iterator):
        return strategy.run(lambda b: jax.random.normal(b["key"]), (next(iterator),))

    with pytest.raises(TypeError, match=r"jax\.random\.wrap_key_data"):
        step(iterator)
