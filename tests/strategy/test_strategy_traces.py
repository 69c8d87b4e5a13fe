"""A step function is traced for the strategy that it is called in."""

import gc
import weakref

import pytest

import zstrat as zs
from zstrat.program import RetraceWarning
from zstrat.strategy import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)


def test_a_step_is_told_the_strategy_of_its_call(make_cluster):
    one = zs.OneDeviceStrategy("CPU:0")
    other = make_cluster().strategy
    seen = []

    @zs.function
    def step(x):
        seen.append((get_strategy(), in_cross_replica_context()))
        return x

    for strategy in (one, other):
        with strategy.scope():
            step(1.0)
        assert set(seen) == {(strategy, True)}
        seen.clear()
    step(1.0)
    assert {is_cross for _, is_cross in seen} == {False}
    assert all(strategy.is_default for strategy, _ in seen)
    seen.clear()
    for _ in range(2):  # each is known by now
        with one.scope():
            step(2.0)
        step(2.0)
    assert not seen
    assert step.trace_count == 3


def test_a_step_without_arguments_is_told_too():
    with zs.OneDeviceStrategy("CPU:0").scope() as strategy:
        name = zs.function(lambda: seen.append(get_strategy()) or 1)
        seen = []
        name()
    assert seen[-1] is strategy
    name()
    assert seen[-1].is_default


def test_a_strategy_that_is_current_without_a_scope_counts():
    strategy, seen = zs.OneDeviceStrategy("CPU:0"), []
    step = zs.function(lambda x: seen.append(get_strategy()) or x)
    step(1)
    assert seen[-1].is_default
    experimental_set_strategy(strategy)
    try:
        step(1)
        assert seen[-1] is strategy
    finally:
        experimental_set_strategy(None)


def test_the_side_of_the_strategy_counts(make_cluster):
    strategy, seen = make_cluster().strategy, []

    @zs.function
    def step(x):
        context = get_replica_context()
        seen.append(None if context is None else context.replica_id_in_sync_group)
        return x

    with strategy.scope():
        step(1)
        assert seen[-1] is None
        strategy.run(step, args=(1,))
        assert seen[-1] == 0


def test_a_strategy_is_not_kept_by_the_programs_of_its_scope():
    @zs.function
    def step(x):
        return x + 1

    strategy = zs.OneDeviceStrategy("CPU:0")
    kept = weakref.ref(strategy)
    with strategy.scope():
        step(1)
    del strategy
    gc.collect()
    assert kept() is None
    assert step(1) == 2


def test_a_step_of_many_strategies_says_so():
    @zs.function
    def step(x):
        return x

    def call():
        for _ in range(5):
            with zs.OneDeviceStrategy("CPU:0").scope():
                step(1)

    with pytest.warns(RetraceWarning, match="called in another strategy's scope"):
        call()
