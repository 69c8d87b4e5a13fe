"""What makes a strategy's steps be traced anew, and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization


@pytest.fixture
def replicas():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def step_of(replicas):
    with replicas.scope():
        variable = zs.Variable(np.float32(1))

    @zs.function
    def step():
        return replicas.reduce("sum", replicas.run(variable.value), axis=None)

    return step, variable


def assigning(metric):
    def replica():
        metric.assign(jnp.float32(3))

    return replica


@pytest.mark.parametrize("aggregation", [A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA])
def test_a_metric_for_each_epoch_does_not(replicas, aggregation):
    step, _ = step_of(replicas)
    for _ in range(3):
        assert step() == 2
        with replicas.scope():
            metric = zs.Variable(
                np.float32(0), aggregation=aggregation, synchronization=S.ON_READ
            )
        replicas.run(assigning(metric))
        assert metric.numpy() == (6 if aggregation is A.SUM else 3)
    assert step.trace_count == 1


def test_a_variable_that_begins_to_have_copies_does(replicas):
    step, variable = step_of(replicas)
    step()

    def own():
        number = zs.get_replica_context().replica_id_in_sync_group
        variable.assign(jnp.asarray(number, jnp.float32) + 5)

    replicas.run(own)
    assert step() == 5 + 6
    assert step.trace_count == 2


def test_another_variable_that_begins_to_have_copies_does_not(replicas):
    step, variable = step_of(replicas)
    for number in range(3):
        assert step() == 2
        with replicas.scope():
            metric = zs.Variable(np.float32(0))
        replicas.run(assigning(metric))
        assert step.trace_count == 1, number
    replicas.run(assigning(variable))
    assert step() == 6
    assert step.trace_count == 2


def test_another_kind_of_random_numbers_does(replicas):
    def drawn():
        return jax.random.normal(jax.random.PRNGKey(3), (4,))

    for kind in ("threefry2x32", "rbg", "threefry2x32"):
        with jax.default_prng_impl(kind):
            found = replicas.run(drawn).values[1]
            np.testing.assert_allclose(found, drawn(), rtol=1e-6)
