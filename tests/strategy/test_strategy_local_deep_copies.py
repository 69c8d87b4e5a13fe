"""`copy.deepcopy` of variables of a strategy of one process."""

import copy

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization

STRATEGIES = {
    "one device": lambda: zs.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: zs.MirroredStrategy(["CPU:1", "CPU:2"]),
    "central": lambda: zs.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:0"),
    "several workers": zs.MultiWorkerMirroredStrategy,
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES)
def strategy(request):
    return request.param()


def created(strategy, value, **how):
    with strategy.scope():
        return zs.Variable(value, name="w", **how)


@pytest.mark.parametrize("where", ["outside", "scope"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_copy_belongs_to_the_strategy_of_its_original(strategy, where, dtype):
    w = created(strategy, np.array([1, 2], dtype), dtype=dtype, trainable=False)
    if where == "scope":
        with strategy.scope():
            twin = copy.deepcopy({"w": w})["w"]
    else:
        twin = copy.deepcopy({"w": w})["w"]
    w.assign(np.zeros(2, dtype))
    np.testing.assert_array_equal(twin.numpy(), [1, 2])
    assert type(twin) is type(w)
    assert strategy.extended.variable_created_in_scope(
        twin
    ) == strategy.extended.variable_created_in_scope(w)
    assert (twin.device, twin.dtype, twin.name) == (w.device, w.dtype, "w")
    assert (twin.trainable, twin.aggregation) == (False, A.NONE)
    assert twin.spec.key != w.spec.key


def test_a_copy_is_trained_as_its_original(strategy):
    w = created(strategy, 1.0, aggregation=A.MEAN)
    twin = copy.deepcopy(w)
    with strategy.scope():
        optimizer = zs.Optimizer(optax.sgd(0.5))

    @zs.function
    def step():
        def replica():
            loss, grads = zs.value_and_grad(lambda v: v * 3.0)(twin)
            optimizer.apply_gradients(grads / strategy.num_replicas_in_sync, twin)
            return loss

        return strategy.run(replica)

    step()
    assert (float(w.numpy()), float(twin.numpy())) == (1.0, -0.5)


@pytest.mark.parametrize(
    ("how", "merged"),
    [
        ({"synchronization": S.ON_READ, "aggregation": A.SUM}, 3.0),
        ({"synchronization": S.ON_READ, "aggregation": A.MEAN}, 1.5),
        ({"synchronization": S.ON_READ, "aggregation": A.ONLY_FIRST_REPLICA}, 1.0),
        ({"aggregation": A.NONE}, 1.0),
    ],
)
def test_each_replica_has_its_own_value_of_the_copy(how, merged):
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    v = created(strategy, 0.0, **how)

    def replica():
        number = zs.get_replica_context().replica_id_in_sync_group
        v.assign(jnp.float32(number + 1))

    strategy.run(replica)
    twin = copy.deepcopy(v)
    strategy.run(lambda: v.assign(jnp.float32(9)))
    copies = strategy.experimental_local_results(twin)
    assert [float(each.numpy()) for each in copies] == [1.0, 2.0]
    assert float(twin.numpy()) == merged
    assert type(twin) is type(v)
    assert (twin.synchronization, twin.trainable) == (v.synchronization, v.trainable)


def test_a_value_that_no_one_may_read_is_copied():
    """Each replica has its own, and there is no rule that makes one of them."""
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    v = created(strategy, 4.0, synchronization=S.ON_READ)
    twin = copy.deepcopy(v)
    copies = strategy.experimental_local_results(twin)
    assert [float(each.numpy()) for each in copies] == [4.0, 4.0]


def test_it_is_refused_in_the_scope_of_another_strategy(strategy):
    w = created(strategy, [1.0, 2.0])
    words = r"'w'.*zs\.Variable"
    with (
        zs.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(RuntimeError, match=words),
    ):
        copy.deepcopy(w)


def test_a_plain_variable_goes_where_the_scope_puts_it(strategy):
    plain = zs.Variable([1.0, 2.0])
    with strategy.scope():
        twin = copy.deepcopy(plain)
    assert strategy.extended.variable_created_in_scope(twin)
    again = copy.deepcopy(plain)
    assert not strategy.extended.variable_created_in_scope(again)


def test_replicas_that_run_in_turns_make_one_copy():
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    w = created(strategy, [1.0, 2.0])
    made = []

    def replica():
        zs.get_replica_context().merge_call(lambda _: None)
        made.append(copy.deepcopy(w))

    strategy.run(replica)
    assert made[-1] is made[-2]
    assert strategy.extended.variable_created_in_scope(made[-1])
    np.testing.assert_array_equal(made[-1].numpy(), [1.0, 2.0])
