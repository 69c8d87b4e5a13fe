"""Training under TPUStrategy on eight devices: the same numbers as on one device, merge
calls, and datasets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tpu_replicas import RNG, W, X, on_replicas, whole

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.tpu.experimental import DeviceAssignment, initialize_tpu_system


@pytest.mark.parametrize("split", [[2, 3], [3, 2], [1, 6], [6, 1]])
def test_training_with_splits_of_several_primes(make_tpu, split):
    """A step with a variable, over six of the devices; by hand in numpy."""
    strategy = make_tpu([1, 1, 1, 6], 1, mesh_shape=(1, 1, 1, 8))
    x = RNG.normal(size=(6, 6)).astype(np.float32)
    with strategy.scope():
        w = zs.Variable(W)
        optimizer = zs.Optimizer(optax.sgd(0.5))

    @zs.function
    def train_step(x):
        def replica(x):
            cut = strategy.experimental_split_to_logical_devices(x, split)
            gradient = zs.grad(lambda w: jnp.mean((cut @ w) ** 2))(w)
            optimizer.apply_gradients([(gradient, w)])
            return cut * 2

        return strategy.run(replica, args=(x,))

    expected = W.astype(np.float64)
    for _ in range(3):
        np.testing.assert_allclose(train_step(x), 2 * x)
        expected -= 0.5 * 2 * x.T @ (x @ expected) / 24
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("shape", "replicas"), [([1, 1, 1, 2], 4), ([1, 2, 2, 2], 1)])
def test_a_variable_that_is_brought_together_when_it_is_read(make_tpu, shape, replicas):
    strategy = make_tpu(shape, replicas)
    with strategy.scope():
        total = zs.Variable(
            0.0,
            synchronization=zs.VariableSynchronization.ON_READ,
            aggregation=zs.VariableAggregation.SUM,
        )

    @zs.function
    def step_fn(x):
        total.assign_add(jnp.sum(x))

    for _ in range(2):
        strategy.run(step_fn, args=(on_replicas(strategy, X),))
    np.testing.assert_allclose(total.numpy(), 2 * X.sum(), rtol=1e-4)


@pytest.mark.parametrize(("shape", "replicas"), [([1, 1, 1, 2], 4), ([1, 2, 2, 2], 1)])
def test_arrays_of_any_device_are_arguments(make_tpu, shape, replicas):
    strategy = make_tpu(shape, replicas)
    with strategy.scope():
        w = zs.Variable(W)
    elsewhere = jax.device_put(X, jax.devices()[3])
    step_fn = zs.function(lambda x: x @ w.value())
    for given in (elsewhere, X, jnp.asarray(X)):
        result = strategy.run(step_fn, args=(given,))
        for part in strategy.experimental_local_results(result):
            np.testing.assert_allclose(part, X @ W, rtol=1e-4, atol=1e-5)
    again = strategy.run(zs.function(lambda y: y * 2), args=(result,))
    for part in strategy.experimental_local_results(again):
        np.testing.assert_allclose(part, 2 * X @ W, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_own_step", [True, False])
def test_a_merge_call_is_made_once_for_all_replicas(make_tpu, is_own_step):
    strategy = make_tpu([1, 1, 1, 2], 4)

    def replica(x):
        context = zs.get_replica_context()
        total = context.merge_call(
            lambda strategy, x: strategy.reduce("sum", x, axis=0), args=(x,)
        )
        assert isinstance(total, jax.core.Tracer)
        return total * 2

    step = functools.partial(strategy.run, zs.function(replica))
    if not is_own_step:
        step = zs.function(lambda args: strategy.run(replica, args=args))
    for _ in range(2):
        result = step((on_replicas(strategy, X),))
        for part in strategy.experimental_local_results(result):
            np.testing.assert_allclose(part, 2 * X.sum(0), rtol=1e-4, atol=1e-5)


def test_replicas_with_batches_of_different_sizes_are_one_program(make_tpu):
    strategy = make_tpu([1, 1, 1, 2], 4)
    sizes = [3, 3, 2, 0]
    parts = np.split(X, np.cumsum(sizes)[:-1])
    given = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    result = strategy.run(zs.function(lambda x: x * 2), args=(given,))
    for part, expected in zip(
        strategy.experimental_local_results(result), parts, strict=True
    ):
        np.testing.assert_allclose(part, 2 * expected)


def test_python_that_looks_at_a_value_is_refused(make_tpu):
    """Elsewhere it would run replica by replica, on values."""
    for shape, replicas in (([1, 1, 1, 2], 4), ([1, 2, 2, 2], 1)):
        strategy = make_tpu(shape, replicas)
        step_fn = zs.function(lambda x: x if x.sum() > 0 else -x)
        words = "while_loop"
        with pytest.raises(TypeError, match=words):
            strategy.run(step_fn, args=(on_replicas(strategy, X),))


def test_a_step_of_its_own_returns_what_programs_return(make_tpu):
    strategy = make_tpu([1, 1, 1, 2], 4)
    step_fn = zs.function(lambda: {1, 2})
    with pytest.raises(TypeError, match=r"is compiled, and it returns a set"):
        strategy.run(step_fn)


@pytest.mark.shows("experimental.TPUStrategy")
def test_the_strategy_of_the_first_version(make_tpu):
    strategy = zs.compat.v1.distribute.experimental.TPUStrategy(steps_per_run=2)
    assert isinstance(strategy, zs.TPUStrategy)
    assert strategy.num_replicas_in_sync == 8


def test_a_resolver_of_hosts_without_a_tpu_is_no_obstacle():
    resolver = SimpleClusterResolver(ClusterSpec({}))
    topology = initialize_tpu_system(resolver, mesh_shape=[2, 2, 1, 2])
    strategy = zs.TPUStrategy(
        resolver, DeviceAssignment.build(topology, num_replicas=8)
    )
    assert strategy.cluster_resolver is resolver


def rows_fn(context):
    """TensorFlow's two rows, again and again, one at a time."""
    del context
    labels = np.array([[1], [0]], np.int32)
    rows = zs.data.Dataset.from_tensor_slices((X[:2, :5], labels))
    return rows.repeat().batch(1, drop_remainder=True)


@pytest.mark.shows("tf.distribute.TPUStrategy")
@pytest.mark.shows("TPUStrategy.distribute_datasets_from_function", "tape.gradient")
@pytest.mark.shows("optimizer.apply_gradients")
def test_tensorflows_training_loop(tpu_resolver):
    """Every replica draws a row of its own: four times each of two."""
    strategy = zs.TPUStrategy(tpu_resolver)
    start = RNG.normal(size=(5, 2)).astype(np.float32)
    with strategy.scope():
        w = zs.Variable(start)
        optimizer = zs.Optimizer(optax.sgd(0.1))
    iterator = iter(strategy.distribute_datasets_from_function(rows_fn))

    def loss(w, features, labels):
        scores = jax.nn.log_softmax(features @ w)
        return -jnp.mean(jnp.take_along_axis(scores, labels, axis=1))

    @zs.function
    def train_step(iterator):
        def step_fn(inputs):
            features, labels = inputs
            gradient = zs.grad(lambda w: loss(w, features, labels))(w)
            optimizer.apply_gradients(zip([gradient], [w], strict=True))

        strategy.run(step_fn, args=(next(iterator),))

    train_step(iterator)
    labels = np.array([[1], [0]], np.int32)
    # The mean over two rows, times two rows, times four of each.
    gradient = 8 * jax.grad(loss)(start, X[:2, :5], labels)
    np.testing.assert_allclose(w.numpy(), start - 0.1 * gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.shows("TPUStrategy.experimental_distribute_dataset")
def test_batches_that_are_too_short_for_all_replicas_end_the_data(make_tpu):
    """Shapes are static: of ten rows in batches of eight the last two are left out."""
    strategy = make_tpu([1, 1, 1, 2], 4)
    rows = np.arange(10, dtype=np.float32)
    dataset = zs.data.Dataset.from_tensor_slices(rows).batch(8)
    double = zs.function(lambda x: x * 2)
    found = [
        whole(strategy, strategy.run(double, args=(x,)))
        for x in strategy.experimental_distribute_dataset(dataset)
    ]
    np.testing.assert_array_equal(np.concatenate(found), 2 * rows[:8])


@pytest.mark.shows("TPUStrategy.experimental_distribute_values_from_function")
def test_values_that_were_placed_by_hand(tpu_resolver):
    """TensorFlow's fourth example of distributed values."""
    strategy = zs.TPUStrategy(tpu_resolver)
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with jax.default_device(jax.devices()[i]):
            multiple_values.append(jnp.ones(()) * i)

    def value_fn(ctx):
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed = strategy.experimental_distribute_values_from_function(value_fn)
    result = strategy.run(zs.function(lambda x: x + 1), args=(distributed,))
    results = strategy.experimental_local_results(result)
    assert [float(value) for value in results] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_result_that_is_wanted_at_replicas_of_several_devices(make_tpu):
    strategy = make_tpu([1, 1, 1, 2], 4)
    value = strategy.run(zs.function(lambda: jnp.ones(3)))
    found = strategy.extended.reduce_to("SUM", value, value)
    entries = strategy.experimental_local_results(found)
    np.testing.assert_array_equal(entries, [[4, 4, 4]] * 4)
