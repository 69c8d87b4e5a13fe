"""OneDeviceStrategy and CentralStorageStrategy: where things are, and that they compute
what plain optax does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = np.ones(3, np.float32)


def trained(strategy, steps, inside):
    """Value and losses of some steps of training on X."""
    with strategy.scope():
        w = zs.Variable(W)
        optimizer = zs.Optimizer(optax.adam(0.1))
    replicas = strategy.num_replicas_in_sync

    def replica_fn(x):
        loss, grads = zs.value_and_grad(lambda w: jnp.mean((x @ w) ** 2) / replicas)(w)
        optimizer.apply_gradients([(grads, w)])
        return loss

    def step(x):
        return strategy.reduce("sum", strategy.run(replica_fn, (x,)), None)

    step = zs.function(step) if inside else step
    batch = strategy._mesh.layout.place_batch(X)
    return w, [float(step(batch)) for _ in range(steps)]


def expected(steps):
    rule = optax.adam(0.1)
    w, state, losses = jnp.asarray(W), rule.init(W), []
    for _ in range(steps):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((X @ w) ** 2))(w)
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
    ],
)
def test_variables_are_on_their_device(make, where, inside):
    w, losses = trained(make(), 3, inside)
    value, wanted = expected(3)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), value, rtol=1e-5)
    assert w.storage._value.devices() == {jax.devices()[where]}
    (beside,) = w.storage._slots.values()
    for leaf in beside.leaves:
        assert leaf.devices() == {jax.devices()[where]}


def test_a_transformation_that_changes_what_it_keeps_is_refused():
    def update(updates, state, params=None):
        return updates, (state, jnp.zeros(()))

    growing = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    with zs.OneDeviceStrategy("CPU:3").scope():
        w = zs.Variable(W)
        optimizer = zs.Optimizer(growing)

    @zs.function
    def step():
        optimizer.apply_gradients([(jnp.ones(3), w)])

    with pytest.raises(ValueError, match=r"'Optimizer'.*zs\.Optimizer.*params="):
        step()
    np.testing.assert_array_equal(w.numpy(), W)


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


def test_copies_with_central_storage():
    central = zs.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:5")
    with central.scope():
        v = zs.Variable(
            0.0,
            aggregation=zs.VariableAggregation.SUM,
            synchronization=zs.VariableSynchronization.ON_READ,
        )

    def fn():
        number = zs.get_replica_context().replica_id_in_sync_group
        v.assign_add(jnp.float32(1) * number + 1)
        return v.value()

    assert [float(x) for x in central.run(fn).values] == [1, 2]
    assert v.numpy() == 3
    assert v.storage._value.devices() == {jax.devices()[5]}
