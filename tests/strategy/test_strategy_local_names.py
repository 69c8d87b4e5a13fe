"""Examples of the pages of tf.distribute, with their numbers, on devices of this
process; what other tests show is not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs


def numbers(strategy, value):
    return [float(x) for x in strategy.experimental_local_results(value)]


@pytest.mark.shows("run(args=, kwargs=)")
def test_a_constant_goes_to_each_replica(two):
    @zs.function
    def replica_fn(value, scale=1.0):
        return value * scale

    result = two.run(replica_fn, args=(jnp.float32(3.0),), kwargs={"scale": 2.0})
    assert numbers(two, result) == [6.0, 6.0]


@pytest.mark.shows("tf.distribute.ReplicaContext.all_reduce")
@pytest.mark.shows("ValueContext.replica_id_in_sync_group")
def test_the_numbers_of_the_replicas_are_summed_in_each(two):
    @zs.function
    def run():
        def value_fn(value_context):
            return jnp.asarray(value_context.replica_id_in_sync_group)

        distributed = two.experimental_distribute_values_from_function(value_fn)

        def replica_fn(value):
            return zs.get_replica_context().all_reduce("sum", value)

        return two.run(replica_fn, args=(distributed,))

    assert numbers(two, run()) == [1, 1]


@pytest.mark.shows("tf.distribute.ValueContext")
@pytest.mark.shows("ValueContext.num_replicas_in_sync")
def test_the_number_of_replicas_twice(two):
    told = []

    @zs.function
    def run():
        def value_fn(value_context):
            told.append(value_context)
            return value_context.num_replicas_in_sync

        distributed = two.experimental_distribute_values_from_function(value_fn)
        return two.run(lambda value: value * 2, args=(distributed,))

    assert run() == 4
    assert {type(each) for each in told} == {zs.ValueContext}


@pytest.mark.shows("ReplicaContext.replica_id_in_sync_group")
@pytest.mark.shows("tf.distribute.ReduceOp.SUM", "tf.distribute.ReduceOp.MEAN")
def test_each_replica_has_a_number_and_they_are_reduced(two):
    def step_fn():
        return jnp.asarray(zs.get_replica_context().replica_id_in_sync_group)

    per_replica = two.run(step_fn)
    assert numbers(two, per_replica) == [0, 1]
    assert two.reduce(zs.ReduceOp.SUM, per_replica, axis=None) == 1
    assert two.reduce(zs.ReduceOp.MEAN, per_replica, axis=None) == 0.5


@pytest.mark.shows("tf.distribute.ReplicaContext.all_gather")
def test_rows_of_all_replicas_in_each(two):
    def replica_fn():
        context = zs.get_replica_context()
        own = jnp.full((1, 2), context.replica_id_in_sync_group)
        return context.all_gather(own, axis=0)

    for each in two.experimental_local_results(two.run(replica_fn)):
        assert each.tolist() == [[0, 0], [1, 1]]


@pytest.mark.shows("VariableSynchronization.ON_WRITE")
def test_copies_are_kept_in_sync_by_the_same_updates(two):
    with two.scope():
        mirrored = zs.Variable(
            1.0,
            synchronization=zs.VariableSynchronization.ON_WRITE,
            aggregation=zs.VariableAggregation.SUM,
        )
    regular = zs.Variable(1.0)
    copies = two.run(lambda: mirrored.value())
    assert numbers(two, copies) == [1.0, 1.0]
    places = [x.devices() for x in two.experimental_local_results(copies)]
    assert places == [{device} for device in jax.devices()[:2]]
    two.run(lambda x: mirrored.assign_add(x), args=(zs.PerReplica((1.0, 2.0)),))
    assert numbers(two, two.run(lambda: mirrored.value())) == [4.0, 4.0]
    assert mirrored.numpy() == 4.0
    assert not two.extended.variable_created_in_scope(regular)


@pytest.mark.shows("tf.distribute.DistributedValues", "unwrapping and merging")
def test_values_are_taken_apart_and_merged_again(two):
    """fn(w0) on d0, fn(w1) on d1; one object where all return the same one."""
    w = two.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    assert isinstance(w, zs.DistributedValues)
    same = object()
    doubled, marker = two.run(lambda value: (value * 2, same), args=(w,))
    assert isinstance(doubled, zs.DistributedValues)
    assert isinstance(doubled, zs.PerReplica)
    assert numbers(two, doubled) == [0.0, 2.0]
    assert marker is same
    mirrored = two.extended.broadcast_to(jnp.ones(1), doubled)
    assert isinstance(mirrored, zs.DistributedValues)


@pytest.mark.shows("MirroredStrategy")
def test_a_batch_of_all_is_dealt_out_in_halves(two):
    global_batch_size = 2
    dataset = zs.data.Dataset.range(4).batch(global_batch_size)
    dist_dataset = two.experimental_distribute_dataset(dataset)

    @zs.function
    def replica_fn(value):
        return value * 2

    result = [two.run(replica_fn, args=(x,)) for x in dist_dataset]
    found = [
        [part.tolist() for part in two.experimental_local_results(each)]
        for each in result
    ]
    assert found == [[[0], [2]], [[4], [6]]]


@pytest.fixture
def tpu():
    """Eight replicas of one device."""
    return zs.TPUStrategy()


@pytest.mark.shows("TPUStrategy.gather")
def test_rows_of_the_cores_are_joined(tpu):
    values = tpu.experimental_distribute_values_from_function(
        lambda _: np.array([[1], [2]])
    )

    @zs.function
    def run():
        return tpu.gather(values, axis=0)

    assert run().tolist() == [[1], [2]] * 8
    assert np.asarray(tpu.gather(values, axis=1)).tolist() == [[1] * 8, [2] * 8]


@pytest.mark.shows("TPUStrategy.reduce")
def test_values_of_the_cores_are_reduced(tpu):
    @zs.function
    def step_fn():
        return jnp.asarray(zs.get_replica_context().replica_id_in_sync_group)

    per_replica = tpu.run(step_fn)
    assert tpu.reduce("SUM", per_replica, axis=None) == sum(range(8))
    rows = tpu.experimental_distribute_values_from_function(
        lambda context: np.arange(4.0) + 4 * context.replica_id_in_sync_group
    )
    assert tpu.reduce("sum", rows, axis=0) == sum(range(32))


@pytest.mark.shows("Variable.distribute_strategy", "Variable.get_shape")
@pytest.mark.shows("MirroredVariable.values")
def test_a_variable_knows_its_strategy_and_its_copies(two):
    with two.scope():
        v = zs.Variable([1.0, 2.0])
        counts = zs.Variable(0.0, synchronization=zs.VariableSynchronization.ON_READ)
    for variable in (v, counts):
        assert variable.distribute_strategy is two
        assert [copy.device[-5:] for copy in variable.values] == ["CPU:0", "CPU:1"]
    assert v.get_shape() == v.shape == (2,)
    assert zs.Variable(1.0).distribute_strategy is None
    zs.experimental_set_strategy(zs.OneDeviceStrategy("CPU:1"))
    try:
        assert zs.Variable(1.0).distribute_strategy is zs.get_strategy()
    finally:
        zs.experimental_set_strategy(None)
