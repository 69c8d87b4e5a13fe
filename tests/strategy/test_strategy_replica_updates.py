"""Updates of variables in strategy.run over several local devices.

Where there is one device, it computes all the replicas; `test_strategy_local_replicas`
is this file once more in a process with eight.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from replicated_steps import R, run

import zstrat.variables as zv
from zstrat.program import (
    function,
)
from zstrat.strategy import get_replica_context

AGGREGATIONS = [
    (zv.VariableAggregation.SUM, 0 + 1 + 2 + 3),
    (zv.VariableAggregation.MEAN, 1.5),
    (zv.VariableAggregation.ONLY_FIRST_REPLICA, 0),
]


@pytest.mark.shows("tf.Variable(aggregation=)")
@pytest.mark.parametrize(("aggregation", "expected"), AGGREGATIONS)
def test_updates_follow_the_aggregation_and_happen_once(four, aggregation, expected):
    strategy = four.strategy
    with strategy.scope():
        a, b, c = (zv.Variable(10.0, aggregation=aggregation) for _ in range(3))

    def step():
        def replica_fn():
            number = get_replica_context().replica_id_in_sync_group * 1.0
            a.assign(number)
            b.assign_add(number)
            c.assign_sub(number)
            return b.value() + a.value()

        return strategy.run(replica_fn)

    seen = run(four, step)
    values = [float(v.numpy()) for v in (a, b, c)]
    assert values == [expected, 10 + expected, 10 - expected]
    assert {float(v) for v in seen.values} == {10 + 2 * expected}


def test_only_the_first_replica_counts_even_if_others_are_not_numbers(four):
    strategy = four.strategy
    first = zv.VariableAggregation.ONLY_FIRST_REPLICA
    with strategy.scope():
        x = zv.Variable(5.0, aggregation=first)
        flag = zv.Variable(False, aggregation=first)

    def step():
        def replica_fn():
            number = get_replica_context().replica_id_in_sync_group
            x.assign(jnp.where(number == 0, 1.0, jnp.nan))
            flag.assign(number == 0)

        strategy.run(replica_fn)

    run(four, step)
    assert x.numpy() == 1.0
    assert flag.numpy() == np.True_


def test_an_update_without_aggregation_is_refused(four):
    strategy = four.strategy
    with strategy.scope():
        x = zv.Variable(5.0, name="x")

    @function
    def step():
        strategy.run(lambda: x.assign_add(1.0))

    with pytest.raises(ValueError, match="'x'"):
        step.plan()


@pytest.mark.parametrize("name", ["scatter_add", "scatter_sub", "scatter_mul"])
@pytest.mark.parametrize(
    "aggregation",
    [zv.VariableAggregation.SUM, zv.VariableAggregation.ONLY_FIRST_REPLICA],
)
def test_rows_of_all_replicas_are_joined(four, name, aggregation):
    strategy = four.strategy
    with strategy.scope():
        table = zv.Variable(np.ones((3, 2), np.float32), aggregation=aggregation)

    def step():
        def replica_fn():
            number = get_replica_context().replica_id_in_sync_group
            rows = jnp.full((1, 2), 2.0) + number
            getattr(table, name)(zv.IndexedSlices(rows, number[None] % 2))

        strategy.run(replica_fn)

    run(four, step)
    expected = zv.Variable(np.ones((3, 2), np.float32))
    count = R if aggregation is zv.VariableAggregation.SUM else 1
    for i in range(count):
        getattr(expected, name)(zv.IndexedSlices(np.full((1, 2), 2.0 + i), [i % 2]))
    np.testing.assert_allclose(table.numpy(), expected.numpy())


@pytest.mark.parametrize("name", ["scatter_min", "scatter_max", "scatter_update"])
def test_rows_that_cannot_be_summed_are_refused(four, name):
    strategy = four.strategy
    with strategy.scope():
        table = zv.Variable(
            np.ones((3, 2), np.float32), aggregation=zv.VariableAggregation.SUM
        )

    @function
    def step():
        rows = zv.IndexedSlices(np.ones((1, 2)), [0])
        strategy.run(lambda: getattr(table, name)(rows))

    with pytest.raises(NotImplementedError, match=name):
        step.plan()


def test_sparse_gradients_of_all_replicas_are_summed(four):
    strategy = four.strategy
    with strategy.scope():
        table = zv.Variable(np.zeros((4, 2), np.float32))
        optimizer = zv.Optimizer(optax.sgd(1.0))

    def step():
        def replica_fn():
            number = get_replica_context().replica_id_in_sync_group
            indices = jnp.stack([number, number * 0])
            rows = zv.IndexedSlices(jnp.ones((2, 2)), indices, table.shape)
            optimizer.apply_gradients(rows.to_dense(), table)

        strategy.run(replica_fn)

    run(four, step)
    np.testing.assert_array_equal(table.numpy()[:, 0], [-5, -1, -1, -1])


def test_updates_before_and_after_the_replicas_are_seen(four):
    strategy = four.strategy
    total = zv.VariableAggregation.SUM
    with strategy.scope():
        x = zv.Variable(1.0, aggregation=total)

    def step():
        x.assign_add(1.0)
        inside = strategy.run(lambda: (x.value(), x.assign_add(1.0)) and x.value())
        return inside, x.value()

    inside, after = run(four, step)
    assert {float(v) for v in inside.values} == {6.0}
    assert after == x.numpy() == 6.0


def test_a_read_after_a_gradient_is_refused_inside_replicas_too(four):
    strategy = four.strategy
    with strategy.scope():
        x = zv.Variable(1.0, name="x")
        optimizer = zv.Optimizer(optax.sgd(1.0))

    @function
    def step():
        def replica_fn():
            optimizer.apply_gradients(1.0, x)
            return x.value()

        return strategy.run(replica_fn)

    with pytest.raises(RuntimeError, match="'x'"):
        step.plan()
