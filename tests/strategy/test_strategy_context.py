"""Scopes and contexts: which strategy is current, and on which side of it code runs."""

import asyncio
import threading

import numpy as np
import pytest

import zstrat.variables as zv
from zstrat.strategy import (
    ReplicaContext,
    get_cross_replica_context,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)


def state():
    return (
        has_strategy(),
        in_cross_replica_context(),
        get_replica_context() is not None,
        get_cross_replica_context() is not None,
    )


OUTSIDE = (False, False, True, False)
CROSS = (True, True, False, True)
REPLICA = (True, False, True, False)


@pytest.fixture
def strategy(cluster):
    return cluster.strategy


@pytest.fixture
def other(make_cluster):
    return make_cluster().strategy


@pytest.mark.shows("get_replica_context", "get_strategy", "has_strategy")
@pytest.mark.shows("in_cross_replica_context")
def test_the_states_of_a_program(strategy):
    seen = [state()]
    with strategy.scope() as entered:
        assert entered is strategy
        assert get_strategy() is strategy
        assert get_cross_replica_context() is strategy
        seen.append(state())
        strategy.run(lambda: seen.append(state()))
        seen.append(state())
    seen.append(state())
    strategy.run(lambda: seen.append(state()))
    seen.append(state())
    assert seen == [OUTSIDE, CROSS, REPLICA, CROSS, OUTSIDE, REPLICA, OUTSIDE]


@pytest.mark.shows("ReplicaContext")
def test_the_replica_context_of_one_replica(strategy):
    def merge(merging, value, *, plus):
        assert merging is strategy
        assert state() == CROSS
        return value + plus

    def replica_fn():
        context = get_replica_context()
        assert isinstance(context, ReplicaContext)
        assert context.merge_call(merge, (4,), {"plus": 1}) == 5
        assert state() == REPLICA
        assert context.strategy is get_strategy() is strategy
        assert context.replica_id_in_sync_group == 0
        assert context.num_replicas_in_sync == 1
        assert context.devices == ("/device:CPU:0",)
        with context as again:
            assert again is context is get_replica_context()
        return context.all_reduce("SUM", {"x": 3})

    assert strategy.run(replica_fn) == {"x": 3}
    with pytest.raises(ValueError, match="reduce_op 'median'"):
        strategy.run(lambda: get_replica_context().all_reduce("median", 1))


def test_a_scope_may_be_entered_again(strategy):
    scope = strategy.scope()
    with scope, scope, strategy.scope():
        assert in_cross_replica_context()
    assert state() == OUTSIDE
    with scope:
        assert state() == CROSS


def test_strategies_are_not_mixed(strategy, other):
    with strategy.scope():
        with pytest.raises(RuntimeError, match="ParameterServerStrategy"):
            other.scope().__enter__()
        with pytest.raises(RuntimeError, match="ParameterServerStrategy"):
            other.run(lambda: None)
        assert get_strategy() is strategy
    assert strategy.run(lambda: state()) == REPLICA

    def replica_fn():
        with pytest.raises(RuntimeError, match="ParameterServerStrategy"):
            other.scope().__enter__()

    strategy.run(replica_fn)


def test_scopes_are_left_in_reverse_order(strategy):
    outer, inner = strategy.scope(), strategy.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="ParameterServerStrategy"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert state() == OUTSIDE


def test_what_is_for_the_cross_replica_context_is_refused_in_a_replica(strategy):
    calls = [
        lambda: strategy.scope().__enter__(),
        lambda: strategy.run(lambda: None),
        lambda: strategy.reduce("sum", 1, axis=None),
        lambda: strategy.gather(np.ones(1), axis=0),
        lambda: strategy.experimental_distribute_values_from_function(lambda c: 1),
    ]

    def replica_fn():
        for call in calls:
            with pytest.raises(RuntimeError, match="get_replica_context"):
                call()
        return strategy.experimental_local_results(1)

    assert strategy.run(replica_fn) == (1,)
    # That of the default strategy is where code is that has entered nothing.
    assert get_strategy().run(lambda: strategy.run(state)) == REPLICA
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError("x")
    with pytest.raises(KeyError):
        strategy.run(lambda: {}["x"])
    assert state() == OUTSIDE
    assert zv.creator.get() is None


@pytest.mark.parametrize("args", [3, "abc", {1}, None, iter([1]), np.ones(2)])
def test_args_are_a_list_or_a_tuple(strategy, args):
    with pytest.raises(ValueError, match=r"strategy\.run.*args="):
        strategy.run(lambda *a: a, args=args)


@pytest.mark.shows("run(args=, kwargs=)")
def test_args_kwargs_and_results_pass_through_one_replica(strategy):
    marker = object()
    result = strategy.run(lambda a, b, c: (a, b, c), [1, marker], {"c": {"d": None}})
    assert result == (1, marker, {"d": None})
    assert strategy.run(lambda: None) is None


def test_threads_have_their_own_context(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
    assert seen == [OUTSIDE]


async def test_tasks_have_their_own_context(strategy, other):
    entered = asyncio.Barrier(2)

    async def create(own):
        with own.scope():
            await entered.wait()
            assert get_strategy() is own
            return zv.Variable(1.0)

    a, b = await asyncio.gather(create(strategy), create(other))
    assert strategy.extended.variable_created_in_scope(a)
    assert other.extended.variable_created_in_scope(b)
    assert state() == OUTSIDE


@pytest.mark.shows("the default strategy")
def test_the_default_strategy(strategy):
    default = get_strategy()
    assert default.num_replicas_in_sync == 1
    assert default.cluster_resolver is None
    with default.scope() as entered:
        assert entered is default
        assert state() == OUTSIDE
        variable = zv.Variable(1.0)
    assert default.extended.variable_created_in_scope(variable)
    assert default.extended.worker_devices == default.extended.parameter_devices
    with default.extended.colocate_vars_with(variable):
        assert zv.Variable(1.0).spec.ps == zv.LOCAL
    assert default.run(lambda x: (x, state()), args=(2,)) == (2, OUTSIDE)
    assert default.reduce("MEAN", 3.0, axis=None) == 3.0
    context = get_replica_context()
    assert context is get_replica_context()
    assert context.strategy is default
    assert context.all_reduce("mean", 5) == 5
    with strategy.scope(), pytest.raises(RuntimeError, match="ParameterServerStrategy"):
        default.scope().__enter__()
