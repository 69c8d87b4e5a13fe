"""Updates of variables in strategy.run over several local devices.

Where there is one device, it computes all the replicas; `test_strategy_local_replicas`
is this file once more in a process with eight.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from replicated_steps import run

import zstrat.variables as zv
from zstrat.program import (
    function,
)
from zstrat.strategy import get_replica_context


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
