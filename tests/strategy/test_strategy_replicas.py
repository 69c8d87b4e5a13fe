"""strategy.run over several local devices, against plain jax on the whole batch.

Where there is one device, it computes all the replicas; `test_strategy_local_replicas`
is this file once more in a process with eight. The results must be the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from replicated_steps import R, W, X, Y, batches, run

import zstrat.variables as zv
from zstrat.program import (
    WorkerContext,
    function,
    get_worker_context,
    worker_context,
)
from zstrat.strategy import PerReplica, get_replica_context


def test_each_replica_gets_its_rows_of_what_was_drawn_and_the_rest_whole(four):
    strategy = four.strategy

    def step(iterator, scale):
        x, y = next(iterator)

        def replica_fn(x, y, scale, shared, flag, also):
            assert flag == "flag"
            assert x.shape == (2, 3)
            assert y.shape == (2,)
            assert also["whole"].shape == (8, 3)
            return (x * scale).sum(axis=1) + shared.sum() * 0 + y * 0

        rows = strategy.run(
            replica_fn, (x, y, scale, W, "flag"), {"also": {"whole": x + 0}}
        )
        assert isinstance(rows, PerReplica)
        return (
            strategy.gather(rows, axis=0),
            strategy.experimental_local_results(rows),
            strategy.reduce("mean", rows, axis=0),
            rows,
        )

    gathered, local, mean, rows = run(four, step, batches((X, Y)), np.float32(2))
    expected = 2 * X.sum(axis=1)
    np.testing.assert_allclose(gathered, expected, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(local), expected, rtol=1e-5)
    np.testing.assert_allclose(mean, expected.mean(), rtol=1e-5)
    assert isinstance(rows, PerReplica)
    np.testing.assert_allclose(rows.values[3], expected[6:], rtol=1e-5)


def test_a_batch_that_does_not_split_evenly_is_refused(four):
    def step(iterator):
        return four.strategy.run(lambda x: x.sum(), args=(next(iterator),))

    with pytest.raises(ValueError, match=r"7 elements does not split evenly.*4"):
        function(step).plan((batches(X[:7]),))


@pytest.mark.shows("tf.distribute.ReplicaContext.all_reduce")
@pytest.mark.shows("ReplicaContext.replica_id_in_sync_group")
def test_replicas_know_their_number_and_reduce_among_themselves(four):
    strategy = four.strategy

    def step(x):
        def replica_fn(x):
            context = get_replica_context()
            assert context.num_replicas_in_sync == R
            number = context.replica_id_in_sync_group
            slices = zv.IndexedSlices(jnp.ones((1, 2)) * number, number[None], (R, 2))
            total, mean, joined = (
                context.all_reduce("SUM", {"a": [number, x], "b": number * 2.0}),
                context.all_reduce("mean", number * 1.0),
                context.all_reduce("MEAN", slices).to_dense(),
            )
            return number, total, mean, joined, None, "same"

        return strategy.run(replica_fn, args=(x,))

    number, total, mean, joined, none, same = run(four, step, np.float32(3))
    assert (none, same) == (None, "same")
    assert [int(n) for n in number.values] == [0, 1, 2, 3]
    assert {int(n) for n in total["a"][0].values} == {6}
    assert {float(n) for n in total["a"][1].values} == {12.0}
    assert {float(n) for n in total["b"].values} == {12.0}
    assert {float(n) for n in mean.values} == {1.5}
    for dense in joined.values:
        np.testing.assert_allclose(dense, np.arange(4)[:, None] * np.ones(2) / 4)


def test_rows_of_the_replicas_are_one_value_per_replica(four):
    strategy = four.strategy

    def step():
        def replica_fn():
            number = get_replica_context().replica_id_in_sync_group
            rows = zv.IndexedSlices(jnp.ones((1, 2)) * number, number[None] % 2, (2, 2))
            return {"rows": rows, "fixed": zv.IndexedSlices(number[None], np.zeros(1))}

        result = strategy.run(replica_fn)
        assert isinstance(result["rows"], PerReplica)
        assert len(strategy.experimental_local_results(result["rows"])) == R
        total = strategy.reduce("sum", result["rows"], axis=None)
        return result, total.to_dense()

    result, total = run(four, step)
    np.testing.assert_allclose(total, [[2, 2], [4, 4]])
    rows = result["rows"].values[3]
    assert isinstance(rows, zv.IndexedSlices)
    assert (rows.values.tolist(), rows.indices.tolist()) == ([[3, 3]], [1])
    assert rows.dense_shape == (2, 2)
    fixed = [(r.values.item(), r.indices.item()) for r in result["fixed"].values]
    assert fixed == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_functions_that_jax_remembers_see_the_value_of_this_trace(four):
    strategy = four.strategy
    with strategy.scope():
        x = zv.Variable(3.0, aggregation=zv.VariableAggregation.SUM)

    @jax.jit
    def remembered(y):
        return x.value() * y

    def step(y):
        def replica_fn(y):
            before = remembered(y)
            x.assign_add(1.0)
            return before, remembered(y)

        return strategy.run(replica_fn, args=(y,))

    before, after = run(four, step, np.float32(2))
    assert {float(v) for v in before.values} == {6.0}
    assert {float(v) for v in after.values} == {14.0}


def test_a_draw_inside_a_replica_is_refused(four):
    @function
    def step(iterator):
        return four.strategy.run(lambda: next(iterator))

    with pytest.raises(RuntimeError, match=r"next\(\).*strategy\.run"):
        step.plan((batches(X),))


def test_per_replica_arguments_are_handed_out(four):
    strategy = four.strategy
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: {"n": np.float32(context.replica_id_in_sync_group) + 1}
    )
    uneven = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(context.replica_id_in_sync_group + 1, np.float32)
    )

    def step():
        return strategy.run(lambda tree, k: tree["n"] * k, (numbers, 2.0))

    result = run(four, step)
    assert [float(v) for v in result.values] == [2.0, 4.0, 6.0, 8.0]
    for runs in (strategy.run, lambda *given: run(four, lambda: strategy.run(*given))):
        result = runs(lambda x: 2 * x, (uneven,))
        assert [v.tolist() for v in result.values] == [[2.0] * n for n in (1, 2, 3, 4)]
    with pytest.raises(ValueError, match="has 2 values"):
        strategy.run(lambda x: x, args=(PerReplica((1, 2)),))


def test_replicas_outside_of_a_step_read_and_update_the_ps(four):
    strategy = four.strategy
    with strategy.scope():
        x = zv.Variable(1.0, aggregation=zv.VariableAggregation.MEAN)
    result = strategy.run(lambda: x.assign_add(2.0).value())
    assert [float(v) for v in result.values] == [3.0] * R
    assert x.numpy() == 3.0


def test_an_eager_step_runs_replicas_too(four):
    strategy = four.strategy
    with strategy.scope():
        w = zv.Variable(W)
        optimizer = zv.Optimizer(optax.sgd(1.0))

    @function(eager=True)
    def step(iterator):
        def replica_fn(x):
            optimizer.apply_gradients([(x.sum(axis=0), w)])
            return x.sum()

        return strategy.reduce("sum", strategy.run(replica_fn, (next(iterator),)), None)

    np.testing.assert_allclose(step(batches(X)), X.sum(), rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), W - X.sum(axis=0), rtol=1e-5)


def test_a_replica_may_ask_for_its_worker(four):
    strategy = four.strategy

    @function
    def step():
        return strategy.run(lambda: get_worker_context().worker_index)

    shipped = four.ship(step)
    for index in (1, 0):
        token = worker_context.set(WorkerContext(index, 2))
        try:
            assert four.run(shipped) == index
        finally:
            worker_context.reset(token)


def test_the_body_is_compiled_once(four):
    strategy = four.strategy
    with strategy.scope():
        w = zv.Variable(W)

    def step(iterator):
        return strategy.run(lambda x: x @ w.value(), (next(iterator),))

    shipped = four.ship(function(step))
    iterator = batches(X, X, X)
    for _ in range(3):
        result = four.run(shipped, iterator)
        np.testing.assert_allclose(np.concatenate(result.values), X @ W, rtol=1e-4)
    assert shipped.trace_count == 1
