"""Values that are bound to the device of their replica, as all are on accelerators, and
arguments that are bound to any one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_replicas import context

import zstrat as zs


@pytest.fixture
def own(two):
    """1 and 1 in replica 0, 2 and 2 in replica 1."""
    return two.experimental_distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group + 1, np.float32)
    )


def on(number, value, dtype="float32"):
    """5 and 5, say, that lie on one device and may be nowhere else."""
    return jax.device_put(jnp.full(2, value, dtype), jax.devices()[number])


def bound(make):
    return zs.PerReplica(
        tuple(jax.device_put(make(n), jax.devices()[n]) for n in range(2))
    )


def merge_call(merge_fn, *args):
    return zs.get_replica_context().merge_call(merge_fn, args)


def reduced(strategy, value):
    return strategy.reduce("sum", value, axis=None)


def added(strategy, value):
    parts = strategy.experimental_local_results(value)
    return parts[0] + parts[-1]


def assert_are(two, result, *expected):
    found = two.experimental_local_results(result)
    assert len(found) == len(expected)
    for part, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(part, np.full(2, wanted))


@pytest.mark.parametrize("device", [0, 1, 5])
@pytest.mark.parametrize("merge", [reduced, added])
def test_it_is_used_before_and_after_a_meeting(two, own, device, merge):
    """As an argument, as what it was multiplied with, and as captured."""
    shared = on(device, 5.0)

    def given(own, shared):
        return merge_call(merge, own * shared) + shared

    def multiplied(own, shared):
        y = own * shared
        return merge_call(merge, y) + y

    def captured(own):
        return merge_call(merge, own * 5) + shared

    assert_are(two, two.run(given, (own, shared)), 20, 20)
    assert_are(two, two.run(multiplied, (own, shared)), 20, 25)
    assert_are(two, two.run(captured, (own,)), 20, 20)


@pytest.mark.parametrize("first", [reduced, added])
def test_what_one_meeting_gave_goes_to_the_next(two, first):
    """1 + 2 in both replicas, and twice that."""
    value = bound(lambda n: jnp.full(2, n + 1.0))

    def fn(x):
        return merge_call(added, merge_call(first, x)) + 0

    assert_are(two, two.run(fn, (value,)), 6, 6)


def test_what_a_meeting_gives_is_bound_to_no_device(two):
    """It is where the replica is, and may be added to what is elsewhere."""
    there = on(3, 5.0)

    def fn():
        given = merge_call(lambda _: there)
        return given, merge_call(added, given)

    given, total = two.run(fn)
    first, second = two.experimental_local_results(given)
    np.testing.assert_array_equal(first + second, [10, 10])
    for number, part in enumerate((first, second)):
        assert part.devices() == {jax.devices()[number]}
    for part in two.experimental_local_results(total):
        np.testing.assert_array_equal(part, [10, 10])


def test_one_device_that_is_not_the_first_computes_there():
    one = zs.OneDeviceStrategy("CPU:1")
    where = []

    def fn(x):
        merge_call(lambda _: None)
        where.append((x + 1).devices())
        return x + 1

    np.testing.assert_array_equal(one.run(fn, (on(0, 5.0),)), [6, 6])
    assert where == [{jax.devices()[1]}]


def test_keys_of_jax_come_along(two):
    key = jax.device_put(jax.random.key(3), jax.devices()[0])
    expected = np.asarray(jax.random.uniform(jax.random.key(3), 2))

    def fn(key):
        drawn = jax.random.uniform(key, 2)
        total = merge_call(reduced, drawn)
        return total - drawn

    for part in two.experimental_local_results(two.run(fn, (key,))):
        np.testing.assert_allclose(part, expected, rtol=1e-6)


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
