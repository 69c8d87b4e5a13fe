"""A user's program against real daemons: values, errors, datasets, training."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from system_worlds import of_one_worker

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def strategy(daemons):
    with zs.ParameterServerStrategy(daemons.resolver) as strategy:
        yield strategy


@pytest.fixture
def coordinator(strategy):
    return zs.ClusterCoordinator(strategy)


def test_variables_are_placed_round_robin_and_read_back(strategy):
    outside = zs.Variable(7.0)
    with strategy.scope():
        placed = [zs.Variable(float(i)) for i in range(4)]
    tasks = [int(v.device.split("task:")[1].split("/")[0]) for v in placed]
    assert [(b - a) % 2 for a, b in pairwise(tasks)] == [1, 1, 1]
    assert placed[0].device.startswith("/job:ps/replica:0/task:")
    assert placed[0].device.endswith("/device:CPU:0")
    assert "ps" not in outside.device
    assert [float(v.numpy()) for v in placed] == [0.0, 1.0, 2.0, 3.0]


def test_the_coordinator_assigns_and_scatters(strategy):
    with strategy.scope():
        v = zs.Variable(np.zeros((4, 2), np.float32))
    v.assign(np.ones((4, 2), np.float32))
    v.assign_add(np.full((4, 2), 2.0, np.float32))
    v.assign_sub(np.full((4, 2), 0.5, np.float32))
    rows = np.array([[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]], np.float32)
    v.scatter_add(zs.IndexedSlices(rows, np.array([1, 1, 3])))
    expected = np.full((4, 2), 2.5, np.float32)
    expected[1] += 2
    expected[3] += 5
    np.testing.assert_array_equal(v.numpy(), expected)


def test_assigning_another_shape_or_dtype_is_refused_by_name(strategy):
    with strategy.scope():
        v = zs.Variable(np.zeros((4, 2), np.float32), name="narrow")
    with pytest.raises(ValueError, match=r"\(4, 2\).*\(3, 2\)"):
        v.assign(np.zeros((3, 2), np.float32))
    for update in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ValueError, match="'narrow'"):
            update(np.ones((4, 2), np.complex64))
        with pytest.raises(ValueError, match="'narrow'"):
            update(np.full((4, 2), "one"))
    np.testing.assert_array_equal(v.numpy(), np.zeros((4, 2)))
    with strategy.scope():
        n = zs.Variable(np.zeros(3, np.int32), name="whole")
    with pytest.raises(ValueError, match="'whole'"):
        n.assign(np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(n.numpy(), np.zeros(3))
    n.assign(np.arange(3, dtype=np.int64))  # of the same kind
    np.testing.assert_array_equal(n.numpy(), [0, 1, 2])


@pytest.mark.shows("ClusterCoordinator.create_per_worker_dataset")
def test_each_worker_has_its_own_dataset(coordinator):
    def dataset(context):
        me, count = context.input_pipeline_id, context.num_input_pipelines
        while True:
            yield np.array([me, count], np.int32)

    @zs.function
    def look(iterator):
        return next(iterator)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    values = [coordinator.schedule(look, args=(iterator,)) for _ in range(50)]
    coordinator.join()
    seen = {tuple(int(n) for n in value.fetch()) for value in values}
    assert seen <= {(0, 2), (1, 2)}


def test_workers_of_a_cluster_form_a_group(daemons, coordinator):
    """The endpoint of a daemon serves its group, too."""
    resolver = daemons.resolver

    def total(context):
        options = {"transport": "tcp", "rendezvous_timeout": 30}
        with zs.collectives.Group(resolver, **options) as group:
            rank = context.input_pipeline_id
            found = group.all_reduce(np.full(100_000, rank + 1.0))
            assert group.rank == rank
        return zs.data.Dataset.from_tensor_slices(found[:1])

    @zs.function
    def first(iterator):
        return next(iterator)

    iterator = iter(coordinator.create_per_worker_dataset(total))
    value = coordinator.schedule(first, args=(iterator,))
    coordinator.join()
    np.testing.assert_array_equal(value.fetch(), 3.0)


def test_a_dataset_function_that_creates_a_variable_is_refused(coordinator):
    def dataset_fn():
        return [zs.Variable(np.zeros(1, np.float32), name="mine").value()]

    @zs.function
    def take(iterator):
        return next(iterator)

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    coordinator.schedule(take, args=(iterator,))
    with pytest.raises(zs.ClosureInputError, match="'mine'") as caught:
        coordinator.join()
    assert isinstance(caught.value.original_exception, ValueError)


def test_many_small_variables_train_as_in_optax(strategy, coordinator):
    """Their gradients and values travel side by side; each is a variable still."""
    shapes = [(4, 6), (6,), (3, 2), ()] * 12
    rng = np.random.default_rng(0)
    start = [np.asarray(rng.normal(size=shape), np.float32) for shape in shapes]
    rule = optax.adam(0.05)
    with strategy.scope():
        weights = [zs.Variable(value) for value in start]
        optimizer = zs.Optimizer(rule)

    def loss(values, x):
        return sum(jnp.sum(jnp.tanh(value * x - 1.0) ** 2) for value in values)

    @zs.function
    def step(x):
        error, gradients = zs.value_and_grad(loss)(weights, x)
        optimizer.apply_gradients(gradients, weights)
        return error

    @jax.jit
    def move(values, state, x):
        error, gradients = jax.value_and_grad(loss)(values, x)
        updates, state = rule.update(gradients, state, values)
        return error, optax.apply_updates(values, updates), state

    values, state = start, rule.init(start)
    for turn in range(6):
        x = np.float32(1 + turn)
        got = coordinator.schedule(step, args=(x,)).fetch()
        error, values, state = move(values, state, x)
        np.testing.assert_allclose(got, error, rtol=1e-5)
        if turn == 2:  # between two steps, by the program
            weights[5].assign(np.ones(6, np.float32))
            weights[6].assign_add(np.ones((3, 2), np.float32))
            values[5], values[6] = np.ones(6, np.float32), values[6] + 1
    for weight, value in zip(weights, values, strict=True):
        np.testing.assert_allclose(weight.numpy(), value, rtol=1e-5, atol=1e-6)


def test_one_worker_reads_what_it_wrote(daemons):
    with zs.ParameterServerStrategy(of_one_worker(daemons)) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            v = zs.Variable(np.float32(0.0))

        @zs.function
        def increment():
            v.assign(v.value() + 1.0)
            return v.value()

        values = [coordinator.schedule(increment) for _ in range(100)]
        coordinator.join()
        # One worker runs one closure after the other: no read may be stale.
        assert [float(value.fetch()) for value in values] == list(range(1, 101))
        assert v.numpy() == 100.0


def test_training_equals_plain_optax_on_one_worker(daemons):
    """Though all steps were scheduled before the first one ended."""
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
    initial = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
    rule = optax.adam(0.1)

    def loss_fn(params):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    expected, state, losses = initial, rule.init(initial), []
    for _ in range(20):
        loss, grads = jax.value_and_grad(loss_fn)(expected)
        updates, state = rule.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
        losses.append(float(loss))

    with zs.ParameterServerStrategy(of_one_worker(daemons)) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            params = zs.create_variables(initial)
            optimizer = zs.Optimizer(rule)

        @zs.function
        def step():
            loss, grads = zs.value_and_grad(loss_fn)(params)
            optimizer.apply_gradients(grads, params)
            return loss

        values = [coordinator.schedule(step) for _ in range(20)]
        coordinator.join()
        got = [float(value.fetch()) for value in values]
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        np.testing.assert_allclose(params["w"].numpy(), expected["w"], rtol=1e-5)
        np.testing.assert_allclose(params["b"].numpy(), expected["b"], atol=1e-6)
        assert step.trace_count == 1
