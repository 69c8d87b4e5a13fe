"""Distributed datasets of the local strategies, on four of the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.data import Dataset

R = 4
FOUR = [f"CPU:{n}" for n in range(R)]
X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=24).astype(np.float32)


def values(element):
    return [np.asarray(part).tolist() for part in element.values]


def devices_of(element):
    return [next(iter(shard.data.devices())) for shard in shards(element)]


def shards(element):
    return sorted(element.whole.addressable_shards, key=lambda shard: shard.index)


def test_a_batch_that_splits_is_one_array_over_the_devices():
    strategy = zs.MirroredStrategy(FOUR)
    data = {"x": X, "y": Y}
    dataset = Dataset.from_tensor_slices(data).batch(8)
    found = list(strategy.experimental_distribute_dataset(dataset))
    assert len(found) == 3
    for number, element in enumerate(found):
        mine = slice(8 * number, 8 * number + 8)
        for name in data:
            np.testing.assert_array_equal(element[name].whole, data[name][mine])
            assert devices_of(element[name]) == jax.local_devices()[:R]
        assert [part.shape for part in element["x"].values] == [(2, 3)] * R


def test_the_last_batch_comes_in_parts():
    strategy = zs.MirroredStrategy(FOUR)
    dataset = Dataset.from_tensor_slices((X[:9], Y[:9])).batch(8)
    *_, (x, y) = strategy.experimental_distribute_dataset(dataset)
    assert [part.shape for part in x.values] == [(1, 3), (0, 3), (0, 3), (0, 3)]
    np.testing.assert_array_equal(y.values[0], Y[8:9])
    spec = strategy.experimental_distribute_dataset(dataset).element_spec
    assert [each.shape for each in spec[0].values] == [(2, 3)] * R


def test_the_spec_has_the_dtypes_that_elements_have():
    strategy = zs.MirroredStrategy(FOUR)
    data = {"n": np.arange(8), "x": np.ones((8, 2), np.float16)}
    distributed = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(data).batch(8)
    )
    spec = distributed.element_spec
    element = next(iter(distributed))
    assert spec["n"].values[0].dtype == np.int32  # as jax keeps int64
    for name in data:
        for one, part in zip(spec[name].values, element[name].values, strict=True):
            assert (one.dtype, one.shape) == (part.dtype, part.shape)


@pytest.mark.parametrize("policy", ["dataset", "function"])
def test_a_step_trains_as_one_device_does(policy):
    strategy = zs.MirroredStrategy(FOUR)
    with strategy.scope():
        w = zs.Variable(np.zeros(3, np.float32))
        optimizer = zs.Optimizer(optax.sgd(0.1))
    if policy == "dataset":
        dataset = Dataset.from_tensor_slices((X, Y)).batch(8)
        distributed = strategy.experimental_distribute_dataset(dataset)
    else:

        def dataset_fn(context):
            size = context.get_per_replica_batch_size(8)
            return Dataset.from_tensor_slices((X, Y)).batch(size)

        distributed = strategy.distribute_datasets_from_function(dataset_fn)

    @zs.function
    def step(iterator):
        def replica(x, y):
            def loss(w):
                return jnp.mean((x @ w - y) ** 2) / R

            value, gradient = zs.value_and_grad(loss)(w)
            optimizer.apply_gradients(gradient, w)
            return value

        x, y = next(iterator)
        return strategy.reduce("sum", strategy.run(replica, args=(x, y)), None)

    iterator = iter(distributed)
    losses = [float(step(iterator)) for _ in range(3)]
    assert step.trace_count == 1

    expected, told = jnp.zeros(3), []
    for start in range(0, 24, 8):
        x, y = X[start : start + 8], Y[start : start + 8]
        value, gradient = jax.value_and_grad(
            lambda w, x=x, y=y: jnp.mean((x @ w - y) ** 2)
        )(expected)
        told.append(float(value))
        expected = expected - 0.1 * gradient
    np.testing.assert_allclose(losses, told, rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_one_input_function_for_each_replica():
    strategy = zs.MirroredStrategy(FOUR)
    options = zs.InputOptions(
        experimental_replication_mode=zs.InputReplicationMode.PER_REPLICA,
        experimental_fetch_to_device=False,
        experimental_place_dataset_on_device=True,
    )

    def dataset_fn(context):
        number = context.input_pipeline_id
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (R, R)
        return Dataset.range(10 * number, 10 * number + 2).batch(1)

    made = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert [values(x) for x in made] == [
        [[0], [10], [20], [30]],
        [[1], [11], [21], [31]],
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: zs.OneDeviceStrategy("CPU:1"),
        lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:2"], "CPU:1"),
    ],
)
def test_other_strategies_put_elements_on_their_devices(make):
    strategy = make()
    options = zs.InputOptions(
        experimental_replication_mode=zs.InputReplicationMode.PER_REPLICA
    )
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.distribute_datasets_from_function(lambda _: [X], options)
    (element,) = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(X).batch(24)
    )
    parts = strategy.experimental_local_results(element)
    np.testing.assert_array_equal(np.concatenate(parts), X)
    wanted = [1] if len(parts) == 1 else [0, 2]
    assert [next(iter(part.devices())).id for part in parts] == wanted
    sums = strategy.run(jnp.sum, args=(element,))
    total = strategy.reduce("sum", sums, None)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-4)


def test_elements_may_stay_on_the_host():
    strategy = zs.MirroredStrategy(FOUR)
    options = zs.InputOptions(experimental_fetch_to_device=False)
    (element,) = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(X).batch(24), options
    )
    assert element.whole is None
    assert all(isinstance(part, np.ndarray) for part in element.values)


@pytest.mark.parametrize("devices", [1, 4])
def test_bytes_may_come_in_the_order_of_another_machine(devices):
    """As files have them; jax takes those of this machine alone."""
    strategy = zs.MirroredStrategy(jax.devices()[:devices])
    given = np.arange(8, dtype=">f4"), np.arange(8, dtype=">i8")
    whole = Dataset.from_tensor_slices(given).batch(8)
    parts = whole.unbatch().batch(3)  # a replica's rows are of two of them
    for dataset in (whole, parts, [given]):
        found = [
            strategy.reduce(
                "sum",
                strategy.run(lambda x: (x[0].sum(), x[1].sum()), (batch,)),
                axis=None,
            )
            for batch in strategy.experimental_distribute_dataset(dataset)
        ]
        assert sum(float(x) for x, _ in found) == sum(range(8))
        assert sum(int(y) for _, y in found) == sum(range(8))
