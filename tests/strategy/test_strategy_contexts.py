"""The update context, strategies that are current without a scope, misuse of contexts,
and what the default strategy does."""

import copy
import threading

import numpy as np
import pytest

import zstrat as zs
import zstrat.variables as zv
from zstrat.strategy import (
    RunOptions,
    experimental_set_strategy,
    get_cross_replica_context,
    get_loss_reduction,
    get_replica_context,
    get_strategy,
    get_update_replica_id,
    has_strategy,
    in_cross_replica_context,
)


@pytest.fixture
def strategy(cluster):
    return cluster.strategy


@pytest.fixture
def other(make_cluster):
    return make_cluster().strategy


@pytest.fixture
def installed(strategy):
    experimental_set_strategy(strategy)
    yield strategy
    experimental_set_strategy(None)


def where():
    return in_cross_replica_context(), get_replica_context(), get_update_replica_id()


@pytest.mark.shows("StrategyExtended.update")
def test_update_is_a_cross_replica_context_that_knows_its_copy(strategy):
    with strategy.scope():
        v = zs.Variable(1.0)
        assert where() == (True, None, None)
        seen = strategy.extended.update(v, lambda var: (var is v, *where()))
        assert seen == (True, True, None, 0)
        assert where() == (True, None, None)

    def fn(var, amount):
        assert get_strategy() is strategy
        with strategy.scope():
            assert where() == (True, None, 0)
        return var.assign_add(amount)

    assert strategy.extended.update(v, fn, args=(2.0,)) is v
    strategy.run(lambda: strategy.extended.update(v, fn, args=(3.0,)))  # once for all
    assert v.numpy() == 6.0
    with pytest.raises(ZeroDivisionError):
        strategy.extended.update(v, lambda var: 1 / 0)
    assert where()[0] is False
    assert get_update_replica_id() is None
    assert not has_strategy()


@pytest.mark.shows("experimental_set_strategy")
def test_a_strategy_is_current_without_a_scope(installed):
    assert get_strategy() is installed
    assert has_strategy()
    assert in_cross_replica_context()
    assert get_replica_context() is None
    assert get_cross_replica_context() is installed
    assert installed.extended.variable_created_in_scope(zs.Variable(1.0))
    assert installed.run(lambda: get_replica_context().num_replicas_in_sync) == 1
    with installed.scope() as entered:
        assert entered is installed
    assert in_cross_replica_context()


def test_it_is_current_for_all_threads_and_until_it_is_taken_back(strategy):
    seen = []

    def look():
        made = zs.Variable(1.0)
        seen.append((get_strategy(), made.spec.ps == zv.LOCAL))

    experimental_set_strategy(strategy)
    try:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert seen == [(strategy, False)]
    finally:
        experimental_set_strategy(None)
    assert not has_strategy()
    assert get_replica_context() is not None
    assert zs.Variable(1.0).spec.ps == zv.LOCAL


def test_another_one_may_be_set_in_its_place(installed, other):
    experimental_set_strategy(other)
    assert get_strategy() is other
    with pytest.raises(RuntimeError, match="ParameterServerStrategy"):
        installed.scope().__enter__()
    experimental_set_strategy(get_strategy())
    experimental_set_strategy(installed)
    assert get_strategy() is installed


def test_what_was_created_in_a_scope_stays_apart_from_what_is_installed(
    installed, other
):
    experimental_set_strategy(None)
    with other.scope():
        assert other.extended.variable_created_in_scope(zs.Variable(1.0))
        with pytest.raises(RuntimeError, match="experimental_set_strategy"):
            experimental_set_strategy(installed)
    with pytest.raises(RuntimeError, match="experimental_set_strategy"):
        other.run(experimental_set_strategy, (None,))
    assert not has_strategy()


def test_only_strategies_are_set():
    with pytest.raises(TypeError, match="expected a strategy or None, got str"):
        experimental_set_strategy("mirrored")


def test_between_replicas_of_another_strategy_is_refused(strategy, other):
    calls = [
        lambda: strategy.run(lambda: None),
        lambda: strategy.reduce("sum", 1.0, axis=None),
        lambda: strategy.gather(np.ones(1), axis=0),
        lambda: strategy.experimental_distribute_values_from_function(lambda c: 1),
        lambda: strategy.extended.reduce_to("sum", 1.0, "CPU:0"),
        lambda: strategy.extended.colocate_vars_with(None),
        lambda: get_default().reduce("sum", 1.0, axis=None),
    ]
    with other.scope():
        for call in calls:
            with pytest.raises(RuntimeError, match="ParameterServerStrategy"):
                call()


def get_default():
    return zs.get_replica_context.__globals__["_DEFAULT"]


def test_a_replica_context_is_used_in_its_replica(strategy, other):
    context = strategy.run(get_replica_context)
    for use in (
        lambda: context.devices,
        lambda: context.all_reduce("sum", 1),
        lambda: context.all_gather(np.ones(1), axis=0),
        lambda: context.merge_call(lambda s: None),
    ):
        with pytest.raises(RuntimeError, match=r"`call_for_each_replica\(\)`"):
            use()
        with pytest.raises(RuntimeError, match="ReplicaContext"):
            strategy.run(use)
        with pytest.raises(RuntimeError, match="ParameterServerStrategy"):
            other.run(use)
    assert context.strategy is strategy
    assert context.replica_id_in_sync_group == 0
    assert context.num_replicas_in_sync == 1


def test_strategies_are_not_copied_but_stand_for_themselves(strategy):
    for each in (strategy, get_strategy()):
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.copy(each)
        assert copy.deepcopy(each) is each
    assert copy.deepcopy({"s": strategy})["s"] is strategy


@pytest.mark.shows("Strategy", "StrategyExtended")
def test_the_default_strategy_has_the_whole_face():
    default = get_strategy()
    extended = default.extended
    v = zs.Variable([1.0, 2.0])
    assert extended.value_container(v) is v
    assert extended.read_var(v).tolist() == [1.0, 2.0]
    assert extended.update(v, lambda var, x: var.assign_add(x), ([1.0, 1.0],)) is v
    assert extended.update(v, lambda var: var.numpy()[0], group=False) == [2.0]
    assert extended.reduce_to("sum", 3.0, v) == 3.0
    assert extended.broadcast_to(3, v) == 3
    assert extended.call_for_each_replica(lambda x: x + 1, (1,)) == 2
    assert not extended.experimental_between_graph
    assert extended.experimental_should_init
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert not extended.experimental_require_static_shapes
    assert default.gather(np.ones((2, 1)), axis=0).shape == (2, 1)
    assert default.experimental_local_results(3) == (3,)


@pytest.mark.shows("tf.distribute.RunOptions", "RunOptions", "get_loss_reduction")
def test_options_and_the_reduction_of_losses():
    options = RunOptions()
    assert options.experimental_enable_dynamic_batch_size
    assert not options.experimental_bucketizing_dynamic_shape
    assert options.experimental_xla_options is None
    assert get_strategy().run(lambda: 1, options=options) == 1
    with pytest.raises(TypeError, match=r"strategy\.run"):
        get_strategy().run(lambda: 1, (), {}, {"x": 1})
    assert get_loss_reduction() is zs.ReduceOp.SUM


def test_reductions_of_aggregations():
    of = zs.ReduceOp.from_variable_aggregation
    assert of(zs.VariableAggregation.SUM) is zs.ReduceOp.SUM
    assert of(zs.VariableAggregation.MEAN) is zs.ReduceOp.MEAN
    for aggregation in (
        zs.VariableAggregation.NONE,
        zs.VariableAggregation.ONLY_FIRST_REPLICA,
        zs.VariableAggregation.ONLY_FIRST_TOWER,
    ):
        with pytest.raises(ValueError, match="`VariableAggregation`"):
            of(aggregation)
