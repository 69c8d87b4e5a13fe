"""StrategyExtended, the same methods for all strategies: here over a cluster of one
worker with one device, and over one with several."""

import numpy as np
import pytest

import zstrat as zs
from zstrat.strategy import PerReplica, get_replica_context, get_strategy


@pytest.fixture
def strategy(cluster):
    return cluster.strategy


@pytest.fixture
def four(make_cluster):
    return make_cluster(devices=4).strategy


def per_replica(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def test_a_value_that_is_the_same_everywhere(four, strategy):
    extended = four.extended
    assert extended.reduce_to("mean", 3.0, "CPU:0") == 3.0
    assert extended.reduce_to("sum", 0, "CPU:0") == 0
    np.testing.assert_array_equal(
        extended.reduce_to("sum", np.zeros((2, 3)), "CPU:0"), np.zeros((2, 3))
    )
    with pytest.raises(ValueError, match="DistributedValues"):
        extended.reduce_to("sum", 3.0, "CPU:0")
    assert strategy.extended.reduce_to("sum", 3.0, "CPU:0") == 3.0


def test_what_reduce_to_refuses(four):
    values, extended = per_replica(four, 1, 2, 3, 4), four.extended
    for destinations in (None, ["CPU:0"], ("CPU:0",)):
        with pytest.raises(AssertionError, match="batch_reduce_to"):
            extended.reduce_to("sum", values, destinations)
        with pytest.raises(AssertionError, match="batch_reduce_to"):
            extended.broadcast_to(1.0, destinations)
    with pytest.raises(ValueError, match="destinations must be"):
        extended.reduce_to("sum", values, 3)
    with pytest.raises(ValueError, match="reduce_op 'max'"):
        extended.reduce_to("max", values, values)
    with pytest.raises(ValueError, match="`value_destination_pairs`"):
        extended.batch_reduce_to("sum", [values])


def test_a_broadcast_has_one_value_for_each_replica(four):
    values = per_replica(four, 1, 2, 3, 4)
    found = four.extended.broadcast_to(np.array([1.0, 2.0]), values)
    for each in four.experimental_local_results(found):
        assert np.asarray(each).tolist() == [1.0, 2.0]
    assert four.extended.broadcast_to(3, values) == 3
    with pytest.raises(ValueError, match="destinations must be"):
        four.extended.broadcast_to(np.ones(2), object())


def test_what_update_returns_as_it_is_or_as_lists(strategy):
    with strategy.scope():
        v = zs.Variable([1.0, 2.0])

    def fn(var, scale, *, add):
        return {"var": var.assign(scale * var.value() + add), "n": 3, "no": None}

    grouped = strategy.extended.update(v, fn, args=(2.0,), kwargs={"add": 1.0})
    assert grouped == {"var": v, "n": 3, "no": None}
    assert v.numpy().tolist() == [3.0, 5.0]
    lists = strategy.extended.update(v, fn, (1.0,), {"add": 0.0}, group=False)
    assert lists == {"var": [v], "n": [3], "no": [None]}


def test_an_optimizer_of_one_variable_by_hand(four):
    """TF's way of applying gradients: reduce to the variable, update it there."""
    with four.scope():
        v = zs.Variable([1.0, 1.0])
        gradients = per_replica(
            four, *(np.array([n, 0.0], np.float32) for n in range(4))
        )
        (mean,) = four.extended.batch_reduce_to("mean", [(gradients, v)])
        four.extended.update(v, lambda var, g: var.assign_sub(g * 2), args=(mean,))
    assert v.numpy().tolist() == [-2.0, 1.0]


def test_what_update_refuses(strategy, four):
    with pytest.raises(ValueError, match="`var`"):
        strategy.extended.update(np.zeros(2), lambda var: var)
    with pytest.raises(ValueError, match="`var`"):
        strategy.extended.read_var(3)
    with four.scope():
        v = zs.Variable(1.0)
    values = per_replica(four, 1.0, 2.0, 3.0, 4.0)
    for kwargs in ({"args": (values,)}, {"kwargs": {"x": [values]}}):
        with pytest.raises(ValueError, match="reduce_to"):
            four.extended.update(v, lambda var, x: var, **kwargs)
    assert v.numpy() == 1.0


def test_what_belongs_to_no_variable_is_updated_with_the_first_one(strategy):
    with strategy.scope():
        b, a = zs.Variable(1.0, name="b"), zs.Variable(2.0, name="a")
        devices = strategy.extended.non_slot_devices([b, a])
        assert devices == a.device != b.device
        result = strategy.extended.update_non_slot(
            devices, lambda x, y: (x, y, zs.get_update_replica_id()), (1,), {"y": 2}
        )
        assert result == (1, 2, 0)
        assert strategy.extended.update_non_slot(
            devices, lambda: (1, None), group=False
        ) == ([1], [None])


def test_a_component_belongs_to_its_container(make_cluster):
    strategy = make_cluster(
        variable_partitioner=zs.partitioners.FixedShardsPartitioner(2)
    ).strategy
    with strategy.scope():
        sharded = zs.Variable(np.zeros((4, 2), np.float32))
        whole = zs.Variable(1.0)
    for part in sharded.variables:
        assert strategy.extended.value_container(part) is sharded
    assert strategy.extended.value_container(sharded) is sharded
    assert strategy.extended.value_container(whole) is whole
    assert strategy.extended.value_container(3) == 3
    assert get_strategy().extended.value_container(whole) is whole


@pytest.mark.shows("StrategyExtended.call_for_each_replica")
def test_methods_for_all_replicas_are_refused_inside_of_one(four):
    extended = four.extended
    with four.scope():
        v = zs.Variable(1.0)
    calls = {
        "reduce_to": lambda: extended.reduce_to("sum", 1.0, "CPU:0"),
        "batch": lambda: extended.batch_reduce_to("sum", []),
        "broadcast_to": lambda: extended.broadcast_to(1.0, "CPU:0"),
        "call_for_each_replica": lambda: extended.call_for_each_replica(lambda: 1),
        "update_non_slot": lambda: extended.update_non_slot("CPU:0", lambda: 1),
        "run_steps": lambda: extended.experimental_run_steps_on_iterator(
            lambda c: c, iter([])
        ),
    }

    def replica_fn():
        for call in calls.values():
            with pytest.raises(RuntimeError, match="get_replica_context"):
                call()
        return extended.read_var(v)

    results = four.extended.call_for_each_replica(replica_fn)
    assert [float(x) for x in four.experimental_local_results(results)] == [1.0] * 4


def test_outputs_of_a_loop_are_reduced_as_they_say(four):
    values = [per_replica(four, *(np.float32(n * k) for n in range(4))) for k in (1, 2)]

    def step(context, x):
        context.set_last_step_output("all", x)
        context.set_last_step_output("sum", x, "SUM")
        context.set_last_step_output("mean", x, aggregation=zs.VariableAggregation.MEAN)
        first = zs.VariableAggregation.ONLY_FIRST_TOWER
        context.set_last_step_output("first", x, first)
        context.set_last_step_output("none", x, zs.VariableAggregation.NONE)

    context = four.extended.experimental_run_steps_on_iterator(step, iter(values), 2)
    found = context.last_step_outputs
    assert found["all"] is found["none"] is values[1]
    assert float(found["sum"]) == 12.0
    assert float(found["mean"]) == 3.0
    assert float(found["first"]) == 0.0
    with pytest.raises(StopIteration):
        four.extended.experimental_run_steps_on_iterator(step, iter(values), 3)


def test_outputs_that_a_replica_hands_out_are_merged(strategy):
    def step(context, x, y):
        def replica_fn():
            assert get_replica_context() is not None
            context.set_last_step_output("x", x, "MEAN")
            context.set_non_tensor_output("y", y)
            with pytest.raises(AssertionError, match="'MEAN'"):
                context.set_last_step_output("z", x)

        strategy.run(replica_fn)

    context = strategy.extended.experimental_run_steps_on_iterator(
        step, iter([(1.0, "a"), (2.0, "b")]), 2
    )
    assert context.last_step_outputs == {"x": 2.0}
    assert context.non_tensor_outputs == {"y": ["b"]}


@pytest.mark.shows("Strategy.experimental_distribute_datasets_from_function")
def test_methods_by_the_names_that_they_had():
    strategy = zs.OneDeviceStrategy("CPU:0")
    given = []

    def dataset_fn(context):
        given.append(context.num_input_pipelines)
        return zs.data.Dataset.range(2)

    made = strategy.experimental_distribute_datasets_from_function(
        dataset_fn, zs.InputOptions()
    )
    assert [int(x) for x in made] == [0, 1]
    assert given == [1]
    with strategy.scope():
        v = zs.Variable(1.0)
        with strategy.colocate_vars_with(v):
            assert zs.Variable(2.0).device == v.device


@pytest.mark.shows("Strategy.experimental_run")
def test_methods_of_the_first_version(four, strategy):
    values = PerReplica((1, 2, 3, 4))
    assert four.unwrap(values) == [1, 2, 3, 4]
    assert four.unwrap(5) == [5]
    assert four.reduce("sum", values) == 10
    assert four.group(values) is None
    assert four.configure(cluster_spec={"worker": ["here:1"]}) is None
    several = {"worker": ["here:1", "there:1"]}
    with pytest.raises(ValueError, match="2 tasks that train together"):
        four.configure(cluster_spec=several, task_type="worker", task_id=0)
    assert four.configure(cluster_spec=several, task_type="evaluator") is None
    known = four.cluster_resolver.cluster_spec()
    assert four.configure(cluster_spec=known, task_type="worker", task_id=0) is None
    config = {"device_filters": ["/job:ps"]}
    copied = four.update_config_proto(config)
    assert copied == config
    assert copied is not config
    rows = strategy.experimental_make_numpy_dataset(np.arange(6).reshape(3, 2))
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert strategy.experimental_run(lambda x: x + 1, iter([1, 2])) == 2
    assert strategy.experimental_run(lambda: 7) == 7
