"""Functions that jax compiles, called by replicas in turns: what jax has traced for one
replica, or for a call before, is nobody else's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

NONE, SUM = zs.VariableAggregation.NONE, zs.VariableAggregation.SUM
ON_READ = zs.VariableSynchronization.ON_READ


def number():
    return zs.get_replica_context().replica_id_in_sync_group


def meet():
    zs.get_replica_context().merge_call(lambda strategy: None)


def values(result):
    return [np.asarray(value).tolist() for value in result.values]


def ways(strategy):
    return strategy.run, zs.function(strategy.run), zs.function(strategy.run)


@pytest.mark.parametrize("kind", ["own", "read"])
def test_the_own_copy_of_now_is_read(two, kind):
    with two.scope():
        if kind == "own":
            v = zs.Variable(0.0, name="own", dtype="float32", aggregation=NONE)
        else:
            v = zs.Variable(
                0.0,
                name="read",
                dtype="float32",
                aggregation=SUM,
                synchronization=ON_READ,
            )

    @jax.jit
    def twice(x):
        return 2 * x * v.value()

    def replica():
        meet()
        return twice(jnp.float32(1))

    def add(x):
        v.assign_add(jnp.asarray(x * (number() + 1), jnp.float32))

    # The copies are equal, and may still be one array; then each has its own.
    expected = np.zeros(2)
    for added in (0, 10, 1):
        if added:
            two.run(add, args=(added,))
            expected += 2 * added * np.array([1, 2])
        for run in ways(two):
            assert values(run(replica)) == expected.tolist()


def test_what_the_replica_wrote_is_read(two):
    with two.scope():
        v = zs.Variable(0.0, name="own", dtype="float32", aggregation=NONE)

    @jax.jit
    def plus(x):
        return x + v.value()

    def replica():
        meet()
        before = plus(jnp.float32(100))
        v.assign(jnp.asarray(number() + 1, jnp.float32))
        return before, plus(jnp.float32(100))

    for run in ways(two):
        v.assign(0.0)
        before, after = run(replica)
        assert values(before) == [100, 100]
        assert values(after) == [101, 102]


def test_the_count_of_replicas_is_the_strategys(two):
    one, three = (
        zs.MirroredStrategy([f"CPU:{n}" for n in range(count)]) for count in (1, 3)
    )

    @jax.jit
    def count(x):
        return x * zs.get_replica_context().num_replicas_in_sync

    def replica():
        meet()
        return count(jnp.ones(1))

    assert values(two.run(replica)) == [[2]] * 2
    assert values(three.run(replica)) == [[3]] * 3
    assert one.run(replica).tolist() == [1]


def test_in_a_scan(two):
    with two.scope():
        v = zs.Variable(0.0, name="own", dtype="float32", aggregation=NONE)
    two.run(lambda: v.assign(jnp.asarray(number() + 1, jnp.float32)))

    def body(total, x):
        return total + x * v.value() + number(), None

    def replica():
        meet()
        return jax.lax.scan(body, jnp.float32(0), jnp.arange(3.0))[0]

    for run in ways(two):
        assert values(run(replica)) == [3, 9]
