"""A result that is wanted at a value per replica is one for each replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs

R = 3
PARTS = [np.full(2, n, np.float32) for n in range(R)]
DESTINATIONS = {
    "on one device": lambda: [jnp.asarray(x) for x in PARTS],
    "of numpy": lambda: PARTS,
    "numbers": lambda: [0, 1, 2],
}


@pytest.fixture(params=DESTINATIONS)
def wanted(request):
    return zs.PerReplica(DESTINATIONS[request.param]())


def require_one_each(found, expected):
    entries = zs.OneDeviceStrategy("CPU:0").experimental_local_results(found)
    assert isinstance(found, zs.Mirrored)
    assert len(entries) == R
    for entry in entries:
        np.testing.assert_array_equal(entry, expected)


def test_the_methods_of_a_strategy(wanted):
    extended = zs.OneDeviceStrategy("CPU:0").extended
    require_one_each(extended.reduce_to("MEAN", PARTS[1], wanted), PARTS[1])
    tree = {"a": PARTS[1], "b": [PARTS[2]]}
    found = extended.batch_reduce_to("MEAN", [(tree, wanted), (PARTS[1], "CPU:0")])
    require_one_each(found[0]["a"], PARTS[1])
    require_one_each(found[0]["b"][0], PARTS[2])
    np.testing.assert_array_equal(found[1], PARTS[1])
    require_one_each(extended.broadcast_to(PARTS[1], wanted), PARTS[1])


def test_the_same_in_a_step(wanted):
    extended = zs.OneDeviceStrategy("CPU:0").extended

    @zs.function
    def step(x):
        found = extended.reduce_to("SUM", {"a": x}, wanted)["a"]
        assert isinstance(found, zs.Mirrored)
        return extended.broadcast_to(x, wanted).values, found.values

    for values in step(PARTS[1]):
        np.testing.assert_array_equal(values, [PARTS[1]] * R)


def test_the_same_of_several_processes():
    wanted = zs.PerReplica(PARTS)

    def program(strategy, rank):
        return strategy.extended.reduce_to("SUM", PARTS[rank + 1], wanted)

    for found in ranks(2, program):
        require_one_each(found, [3, 3])


def test_one_replica_has_a_plain_value():
    wanted = zs.PerReplica([PARTS[0]])
    extended = zs.OneDeviceStrategy("CPU:0").extended
    found = extended.reduce_to("MEAN", jnp.asarray(PARTS[1]), wanted)
    assert isinstance(found, jax.Array)
