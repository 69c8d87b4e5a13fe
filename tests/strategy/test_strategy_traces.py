"""A step function is traced for the strategy that it is called in."""

import gc
import weakref

import numpy as np
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


def test_a_worker_traces_once_for_variables_on_several_ps(cluster):
    runs = []
    with cluster.strategy.scope():
        variables = [zs.Variable(np.full(2, n, np.float32)) for n in range(4)]
        mine = zs.Variable(np.float32(10.0))
    assert {v.spec.ps for v in variables} == {0, 1}

    @zs.function
    def step(v, w):
        runs.append(None)
        v.assign_add(w * 1 + mine)
        return v.value()

    plans = [step.plan((v, variables[0])) for v in variables[1:]]
    assert len(runs) == 1
    assert [[spec.key for spec in plan.reads] for plan in plans] == [
        [variables[0].spec.key, mine.spec.key, v.spec.key] for v in variables[1:]
    ]
    there = cluster.ship(step)
    for v in variables[1:]:
        cluster.run(there, v, variables[0])
    assert there.trace_count == 1
    assert [float(v.numpy()[0]) for v in variables] == [0, 11, 12, 13]
