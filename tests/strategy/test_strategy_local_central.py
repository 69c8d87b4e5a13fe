"""One replica apart from the device that keeps the variables; and arguments that are
bound to a device on which no replica is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

START = np.array([1.0, 2.0], np.float32)


@pytest.fixture
def central():
    return zs.CentralStorageStrategy(["CPU:1"], "CPU:0")


@pytest.fixture
def variable(central):
    with central.scope():
        return zs.Variable(START)


def elements(central):
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    data = zs.data.Dataset.from_tensor_slices(rows).batch(2)
    return rows, central.experimental_distribute_dataset(data)


def test_it_computes_where_the_replica_is(central, variable):
    def replica(x):
        variable.assign_add(x)
        return variable.value() * x

    result = central.run(replica, args=(np.full(2, 3, np.float32),))
    assert result.devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(result, (START + 3) * 3)
    np.testing.assert_array_equal(variable.numpy(), START + 3)
    assert variable.storage.kept.device_set == {jax.devices()[0]}


@pytest.mark.parametrize("in_a_step", [True, False])
def test_elements_of_a_dataset_are_there_too(central, variable, in_a_step):
    def replica(x):
        variable.assign_add(x.sum(0))
        return (x * variable.value()).sum()

    def each(x):
        return central.run(replica, args=(x,))

    step = zs.function(each) if in_a_step else each
    rows, data = elements(central)
    now = START
    for n, element in enumerate(data):
        part = rows[2 * n : 2 * n + 2]
        now = now + part.sum(0)
        np.testing.assert_allclose(step(element), (part * now).sum())
    np.testing.assert_array_equal(variable.numpy(), now)


def test_what_an_optimizer_keeps_travels(central, variable):
    with central.scope():
        optimizer = zs.Optimizer(optax.sgd(0.5, momentum=0.5))

    def replica(gradient):
        optimizer.apply_gradients([gradient], [variable])

    ones = jax.device_put(jnp.ones(2), jax.devices()[1])
    for _ in range(2):
        central.run(replica, args=(ones,))
    # The second step moves by 1 + 0.5.
    np.testing.assert_allclose(variable.numpy(), START - 0.5 * (1 + 1.5))
    assert variable.storage.kept.device_set == {jax.devices()[0]}


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
@pytest.mark.parametrize("transform", [jax.vmap, jax.grad])
def test_a_traced_argument_is_refused_with_words(devices, transform):
    strategy = zs.MirroredStrategy(devices)

    def outer(x):
        each = strategy.run(lambda y: y * 2, args=(x,))
        return strategy.reduce("mean", each, axis=None).sum()

    with pytest.raises(TypeError, match=r"zs\.function"):
        transform(outer)(jnp.ones(3))


@pytest.mark.parametrize("with_variables", [True, False])
@pytest.mark.parametrize("storage", [0, 2])
def test_an_argument_from_another_device(with_variables, storage):
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = zs.Variable(START)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group, np.float32)
    )
    shared = jax.device_put(jnp.full(2, 5.0), jax.devices()[storage])

    def replica(own, shared):
        return own + shared + (variable.value() if with_variables else 0)

    results = strategy.run(replica, args=(own, shared))
    for n, result in enumerate(strategy.experimental_local_results(results)):
        np.testing.assert_array_equal(result, n + 5 + START * with_variables)
