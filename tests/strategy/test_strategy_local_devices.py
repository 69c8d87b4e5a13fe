"""OneDeviceStrategy and CentralStorageStrategy: where things are, and that they compute
what plain optax does; and where TF says that a variable is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.cluster import TPUClusterResolver
from zstrat.tpu.experimental import DeviceAssignment, initialize_tpu_system

A, S = zs.VariableAggregation, zs.VariableSynchronization
HERE = "/job:localhost/replica:0/task:0/device:CPU:"
START = np.array([1.0, 2.0], np.float32)
ROWS = np.arange(16, dtype=np.float32).reshape(8, 2) / 8


def in_optax(count):
    """Value and losses of some steps of `test_variables_are_on_their_device`."""
    rule = optax.adam(0.1)
    w, state, losses = jnp.asarray(START), rule.init(START), []
    for _ in range(count):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((ROWS @ w) ** 2))(w)
        update, state = rule.update(grads, state, w)
        w = w + update
        losses.append(float(loss))
    return w, losses


@pytest.mark.shows("experimental.CentralStorageStrategy")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: zs.OneDeviceStrategy("CPU:3"), 3),
        (lambda: zs.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:5"), 5),
        (lambda: zs.CentralStorageStrategy(["CPU:4", "CPU:5"]), 0),
        (lambda: zs.CentralStorageStrategy(["CPU:4"]), 4),
        (lambda: zs.CentralStorageStrategy(["CPU:1"], "CPU:0"), 0),
    ],
)
def test_variables_are_on_their_device(make, where, inside):
    """And what an optimizer keeps of them; replicas compute where they are."""
    strategy = make()
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        w = zs.Variable(START)
        optimizer = zs.Optimizer(optax.adam(0.1))
        counts = [
            zs.Variable(0.0, synchronization=how, aggregation=A.SUM)
            for how in (S.AUTO, S.ON_READ)
        ]

    def replica_fn(x):
        loss, grads = zs.value_and_grad(lambda w: jnp.mean((x @ w) ** 2) / replicas)(w)
        optimizer.apply_gradients([(grads, w)])
        for count in counts:
            count.assign_add(x.sum())
        return loss

    def step(x):
        return strategy.reduce("sum", strategy.run(replica_fn, (x,)), None)

    step = zs.function(step) if inside else step
    data = zs.data.Dataset.from_tensor_slices(ROWS).batch(8).repeat(3)
    batches = strategy.experimental_distribute_dataset(data)
    losses = [float(step(batch)) for batch in batches]
    value, wanted = in_optax(3)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), value, rtol=1e-5)
    for count in counts:
        np.testing.assert_allclose(count.numpy(), 3 * ROWS.sum(), rtol=1e-5)
    computed = strategy.experimental_local_results(strategy.run(lambda: w.value() * 2))
    places = [f"{HERE}{next(iter(x.devices())).id}" for x in computed]
    assert tuple(places) == strategy.extended.worker_devices
    place = {jax.devices()[where]}
    (beside,) = w.storage._slots.values()
    for kept in (w.storage._value, *beside.leaves, *[c.storage._value for c in counts]):
        assert kept.devices() == place
    assert {v.device for v in (w, *counts)} == {f"{HERE}{where}"}
    assert f"{HERE}{where}" in repr(w)
    each = strategy.experimental_local_results(counts[1])
    assert [copy.device for copy in each] == [f"{HERE}{where}"] * replicas
    assert strategy.extended.parameter_devices == (w.device,)
    with strategy.scope():
        with strategy.extended.colocate_vars_with(w):
            assert zs.Variable(2.0).device == w.device
        there = strategy.extended.non_slot_devices([w])
        assert there == w.device
        for destination in (there, w):
            found = strategy.extended.reduce_to("MEAN", jnp.float32(2), destination)
            assert found.devices() == place
        assert strategy.extended.broadcast_to(jnp.ones(2), there).devices() == place


def test_a_transformation_that_changes_what_it_keeps_is_refused():
    def update(updates, state, params=None):
        return updates, (state, jnp.zeros(()))

    growing = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    with zs.OneDeviceStrategy("CPU:3").scope():
        w = zs.Variable(START)
        optimizer = zs.Optimizer(growing)

    @zs.function
    def step():
        optimizer.apply_gradients([(jnp.ones(2), w)])

    with pytest.raises(ValueError, match=r"'Optimizer'.*zs\.Optimizer.*params="):
        step()
    np.testing.assert_array_equal(w.numpy(), START)


def test_the_faces():
    one = zs.OneDeviceStrategy("/cpu:2")
    name = "/job:localhost/replica:0/task:0/device:CPU:2"
    assert one.extended.worker_devices == one.extended.parameter_devices == (name,)
    central = zs.CentralStorageStrategy(["CPU:1", "CPU:2"])
    assert central.num_replicas_in_sync == 2
    assert central.extended.parameter_devices == (
        "/job:localhost/replica:0/task:0/device:CPU:0",
    )
    assert zs.CentralStorageStrategy().num_replicas_in_sync == 1
    with pytest.raises(ValueError, match="'CPU:1'"):
        zs.CentralStorageStrategy(["CPU:1", "CPU:1"])
    with pytest.raises(ValueError, match="'TPU:0'"):
        zs.OneDeviceStrategy("TPU:0")


@pytest.mark.shows("OneDeviceStrategy")
def test_one_device_has_contexts_and_plain_values():
    one = zs.OneDeviceStrategy("CPU:3")

    def fn(x):
        context = zs.get_replica_context()
        assert zs.get_strategy() is one
        assert context.replica_id_in_sync_group == 0
        assert context.num_replicas_in_sync == 1
        merged = context.merge_call(lambda strategy, x: x + 1, (x,))
        return context.all_reduce("sum", merged)

    with one.scope():
        assert zs.in_cross_replica_context()
        result = one.run(fn, (jnp.arange(3),))
    assert result.tolist() == [1, 2, 3]
    assert one.experimental_local_results(result) == (result,)
    assert one.reduce("sum", result, axis=None) is result
    assert one.reduce("sum", result, axis=0) == 6
    assert one.gather(result, 0).tolist() == [1, 2, 3]
    assert one.run(lambda x: x * 2, (2,)) == 4
    numbers = one.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    assert one.experimental_local_results(numbers) == (1,)
    assert one.run(lambda x: x + 1, (numbers,)) == 2
    with pytest.raises(
        RuntimeError, match=r"run\(\).*get_replica_context\(\).*merge_call\(\)"
    ):
        one.run(lambda: one.run(lambda: 1))


def test_one_device_computes_there():
    one = zs.OneDeviceStrategy("CPU:3")
    assert one.run(lambda: jnp.ones(3) * 2).devices() == {jax.devices()[3]}
    elsewhere = jax.device_put(np.ones(3), jax.devices()[1])
    assert one.run(lambda x: x * 2, (elsewhere,)).devices() == {jax.devices()[3]}


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


def cpu(number):
    return jax.devices()[number]


@pytest.mark.parametrize("synchronization", [S.AUTO, S.ON_READ])
def test_each_copy_is_on_the_device_of_its_replica(synchronization):
    mirrored = zs.MirroredStrategy(["CPU:2", "CPU:1"])
    with mirrored.scope():
        v = zs.Variable(1.0, synchronization=synchronization, aggregation=A.MEAN)
    assert v.device == f"{HERE}2"
    copies = mirrored.experimental_local_results(v)
    assert [each.device for each in copies] == [f"{HERE}2", f"{HERE}1"]
    assert tuple(each.device for each in copies) == mirrored.extended.parameter_devices


def test_of_replicas_of_several_devices_the_first_ones_are_named():
    resolver = TPUClusterResolver("local")
    zs.experimental_connect_to_cluster(resolver)
    topology = initialize_tpu_system(resolver, mesh_shape=(1, 2, 2, 2))
    assignment = DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = zs.TPUStrategy(resolver, experimental_device_assignment=assignment)
    with strategy.scope():
        v = zs.Variable(1.0)
    names = strategy.extended.worker_devices
    assert len(set(names)) == 4
    assert v.device == names[0]
    copies = strategy.experimental_local_results(v)
    assert tuple(each.device for each in copies) == names


def test_elsewhere_it_is_on_the_host():
    with zs.OneDeviceStrategy("CPU:1").scope():
        v = zs.Variable(1.0)
    plain = zs.Variable(1.0)
    assert plain.device == f"{HERE}0"
    default = zs.get_strategy().extended
    assert default.variable_created_in_scope(plain)
    assert not default.variable_created_in_scope(v)
