"""What makes a strategy's steps be traced anew, and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.program import StepIterator

A, S = zs.VariableAggregation, zs.VariableSynchronization


def step_of(two):
    with two.scope():
        variable = zs.Variable(np.float32(1))

    @zs.function
    def step():
        return two.reduce("sum", two.run(variable.value), axis=None)

    return step, variable


def assigning(metric):
    def replica():
        metric.assign(jnp.float32(3))

    return replica


@pytest.mark.parametrize("aggregation", [A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA])
def test_a_metric_for_each_epoch_does_not(two, aggregation):
    step, _ = step_of(two)
    for _ in range(3):
        assert step() == 2
        with two.scope():
            metric = zs.Variable(
                np.float32(0), aggregation=aggregation, synchronization=S.ON_READ
            )
        two.run(assigning(metric))
        assert metric.numpy() == (6 if aggregation is A.SUM else 3)
    assert step.trace_count == 1


def test_a_variable_that_begins_to_have_copies_does(two):
    step, variable = step_of(two)
    step()

    def own():
        number = zs.get_replica_context().replica_id_in_sync_group
        variable.assign(jnp.asarray(number, jnp.float32) + 5)

    two.run(own)
    assert step() == 5 + 6
    assert step.trace_count == 2


def test_another_variable_that_begins_to_have_copies_does_not(two):
    step, variable = step_of(two)
    for number in range(3):
        assert step() == 2
        with two.scope():
            metric = zs.Variable(np.float32(0))
        two.run(assigning(metric))
        assert step.trace_count == 1, number
    two.run(assigning(variable))
    assert step() == 6
    assert step.trace_count == 2


def test_another_kind_of_random_numbers_does(two):
    def drawn():
        return jax.random.normal(jax.random.PRNGKey(3), (4,))

    for kind in ("threefry2x32", "rbg", "threefry2x32"):
        with jax.default_prng_impl(kind):
            found = two.run(drawn).values[1]
            np.testing.assert_allclose(found, drawn(), rtol=1e-6)


STRATEGIES = {
    "default": zs.get_strategy,
    "one device": lambda: zs.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: zs.MirroredStrategy(["CPU:0", "CPU:1"]),
    "more replicas than devices": lambda: zs.MirroredStrategy(["CPU:0"]),
    "central": lambda: zs.experimental.CentralStorageStrategy(),
    "processes": lambda: zs.MultiWorkerMirroredStrategy(),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_body_runs_once_for_each_signature(name):
    """As that of ``tf.function``: with reads, updates, draws and rows, under
    differentiation and in replicas."""
    strategy, ran = STRATEGIES[name](), []
    with strategy.scope():
        scale = zs.Variable(np.float32(2), aggregation=A.MEAN)
        table = zs.Variable(np.arange(8, dtype=np.float32).reshape(4, 2))

    def replica(x):
        ran.append("replica")
        rows = zs.embedding_lookup(table, jnp.array([1, 2]))
        scale.assign_add(1.0)
        return jnp.sum(rows) * x * scale.value()

    @zs.function
    def step(iterator, x):
        ran.append("step")
        x = x + next(iterator)
        grad = jax.grad(lambda y: y * scale.value())(x)
        total = strategy.reduce("sum", strategy.run(replica, args=(x,)), axis=None)
        return total, grad

    @zs.function
    def updates(x):
        ran.append("updates")
        scale.assign(x)
        table.scatter_add(zs.IndexedSlices(jnp.ones((1, 2)), jnp.array([3])))

    elements = zs.data.Dataset.from_tensors(np.float32(1)).repeat()
    iterator = StepIterator(elements)
    count = strategy.num_replicas_in_sync
    for value in (1.0, 5.0):
        updates(2.0)
        total, grad = step(iterator, value)
        assert float(total) == count * 14 * (value + 1) * float(scale.numpy())
        assert float(grad) == 2
    assert ran == ["updates", "step", "replica"]
    assert table.numpy()[3].tolist() == [8, 9]


def test_a_body_that_reads_first_in_a_loop_gives_the_same(two):
    """There a value is made up inside of what jax traces by itself."""
    with two.scope():
        v = zs.Variable(np.float32(3))

    def replica(x):
        return jax.lax.fori_loop(0, 4, lambda _, y: y + v.value(), x)

    @zs.function
    def step(x):
        y = jax.lax.scan(lambda c, _: (c * v.value(), None), x, length=2)[0]
        v.assign_add(1.0)
        out = two.run(replica, args=(y,))
        return two.reduce("sum", out, axis=None)

    assert float(step(1.0)) == 2 * (9 + 4 * 4)
    assert float(step(1.0)) == 2 * (16 + 4 * 5)
