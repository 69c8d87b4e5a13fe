"""Values that are bound to the device of their replica, as all are on accelerators, and
integers that jax would cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def bound(make):
    """A value that replica i has on device i alone."""
    return zs.PerReplica(
        tuple(jax.device_put(make(n), jax.devices()[n]) for n in range(2))
    )


def context():
    return zs.get_replica_context()


MERGES = {
    "reduce": lambda strategy, x: strategy.reduce("sum", x, axis=None),
    "reduce_to": lambda strategy, x: strategy.extended.reduce_to("SUM", x, x),
    "one place": lambda s, x: s.extended.reduce_to("SUM", x, "/device:CPU:1"),
    "a tree": lambda s, x: {"a": [s.reduce("sum", x, axis=None)]}["a"][0],
}


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_what_a_merge_call_gives_is_on_the_device_of_the_replica(two, merge):
    def fn(x):
        return context().merge_call(merge, (x,)) * x

    for value in (
        bound(lambda n: jnp.array([n + 1.0, 2.0])),
        two.run(lambda x: x, (bound(lambda n: jnp.array([n + 1.0, 2.0])),)),
    ):
        found = two.run(fn, (value,))
        for number, part in enumerate(found.values):
            np.testing.assert_array_equal(part, [3.0 * (number + 1), 8.0])
            assert part.devices() == {jax.devices()[number]}


def test_a_merge_call_in_a_step_of_the_user(two):
    @zs.function
    def step(x):
        def fn(x):
            return context().merge_call(MERGES["reduce"], (x,)) * x

        return two.run(fn, (x,))

    found = step(two.run(lambda x: x, (bound(lambda n: jnp.array([n + 1.0])),)))
    assert [float(part[0]) for part in found.values] == [3.0, 6.0]


def test_what_is_bound_to_no_device_is_the_same_object(two):
    shared = jnp.ones(2)

    def fn():
        return context().merge_call(lambda strategy: shared)

    assert two.run(fn) is shared
