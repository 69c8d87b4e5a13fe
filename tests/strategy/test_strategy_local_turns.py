"""Replicas in turns: merge_call, functions that look at values, and that both ways of
running a function give the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_replicas import number

import zstrat as zs
from zstrat.strategy import PerReplica

SUM = zs.VariableAggregation.SUM


@pytest.mark.shows("ReplicaContext.merge_call")
def test_tensorflows_example_of_merge_call(two):
    """3 plus the number of the replica; all get the sum and add their own."""

    def merge_fn(strategy, three_plus_id):
        assert zs.in_cross_replica_context()
        return sum(strategy.experimental_local_results(three_plus_id))

    def fn(three):
        v = three + number()
        s = zs.get_replica_context().merge_call(merge_fn, args=(v,))
        return s + v

    with two.scope():
        results = two.experimental_local_results(two.run(fn, args=(3,)))
    assert results == (10, 11)
    in_a_step = zs.function(lambda: two.run(fn, args=(3,)))()
    assert [int(x) for x in in_a_step.values] == [10, 11]
    one = zs.OneDeviceStrategy("CPU:0")
    assert one.run(fn, args=(3,)) == 6


def test_a_function_may_look_at_values(two):
    def fn(x):
        if number() == 0:
            return x
        return np.asarray(x) * 10

    assert two.run(lambda: "zero" if number() == 0 else "one").values == (
        "zero",
        "one",
    )
    x = two._mesh.layout.place_batch(np.arange(2, dtype=np.float32))
    assert [x.tolist() for x in two.run(fn, (x,)).values] == [[0], [10]]
    with two.scope():
        v = zs.Variable(2.0)
    assert two.run(lambda: float(v.numpy()) + number()).values == (2.0, 3.0)


def test_what_is_computed_in_turns_is_on_the_replicas_devices(two):
    def fn(x):
        int(number())
        return x * 2, x.sum()

    x = two._mesh.layout.place_batch(np.arange(4, dtype=np.float32))
    rows, total = two.run(fn, (x,))
    assert rows.whole.sharding.is_equivalent_to(x.whole.sharding, 1)
    assert [t.devices() for t in total.values] == [{d} for d in jax.devices()[:2]]
    assert two.reduce("sum", total, None) == 6.0


def test_replicas_run_in_order_and_meet(two):
    seen = []

    def merge_fn(strategy, x, *, named):
        seen.append(("merge", x.values, named.values))
        return PerReplica((named.values[1], named.values[0]))

    @zs.function(eager=True)
    def fn():
        own = number()
        context = zs.get_replica_context()
        for turn in range(2):
            seen.append((turn, own))
            other = context.merge_call(merge_fn, (own,), {"named": f"from {own}"})
            assert other == f"from {1 - own}"
        assert context is zs.get_replica_context()
        return own

    assert two.run(fn).values == (0, 1)
    merge = ("merge", (0, 1), ("from 0", "from 1"))
    assert seen == [(0, 0), (0, 1), merge, (1, 0), (1, 1), merge]


def test_replicas_that_do_different_things_are_told(two):
    def number_of_calls():
        if number() == 0:
            zs.get_replica_context().merge_call(lambda strategy: None)

    with pytest.raises(RuntimeError, match="merge_call"):
        two.run(number_of_calls)

    def what():
        context = zs.get_replica_context()
        if number() == 0:
            context.merge_call(lambda strategy: None)
        else:
            context.all_reduce("sum", 1.0)

    with pytest.raises(RuntimeError, match=r"\b0\b.*merge_call"):
        two.run(what)


def test_an_error_in_one_replica_ends_the_others(two):
    ended = []

    @zs.function(eager=True)
    def fn():
        own = number()
        try:
            zs.get_replica_context().merge_call(lambda strategy: None)
            if int(own) == 1:
                raise KeyError("mine")
            zs.get_replica_context().merge_call(lambda strategy: None)
        finally:
            ended.append(own)

    with pytest.raises(KeyError, match="mine"):
        two.run(fn)
    assert sorted(ended) == [0, 1]
    assert not zs.has_strategy()

    def merge_fn(strategy):
        raise KeyError("in the merge")

    with pytest.raises(KeyError, match="in the merge"):
        two.run(lambda: zs.get_replica_context().merge_call(merge_fn))


def test_after_an_error_of_the_first_replica_no_other_one_begins(two):
    begun = []

    @zs.function(eager=True)
    def fn():
        begun.append(number())
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        two.run(fn)
    assert begun == [0]


@pytest.mark.parametrize("peek", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_an_update_of_a_copy_under_a_transformation_is_refused(two, peek, inside):
    with two.scope():
        v = zs.Variable(1.0, name="v")

    def fn():
        if peek:
            int(number())
        return jax.grad(lambda x: v.assign(x * 2).value() * x)(1.0)

    step = zs.function(lambda: two.run(fn)) if inside else lambda: two.run(fn)
    with pytest.raises(RuntimeError, match="'v'"):
        step()


def test_variables_are_created_once_for_all(two):
    made = []

    def fn():
        v = zs.Variable(1.0, name="v", aggregation=SUM)
        made.append(v)
        zs.get_replica_context().merge_call(lambda strategy: None)
        w = zs.Variable(2.0, name="w")
        return v + w + number()

    assert [float(x) for x in two.run(fn).values] == [3.0, 4.0]
    assert made[0] is made[1]
    assert two.extended.variable_created_in_scope(made[0])
    with pytest.raises(RuntimeError, match="mismatching name"):
        two.run(lambda: zs.Variable(1.0, name=f"v{int(number())}"))
    with pytest.raises(RuntimeError, match="replica 0 has not created"):
        two.run(lambda: zs.Variable(1.0) if int(number()) else None)


def test_eager_functions_run_each_time(two):
    calls = []
    with two.scope():
        v = zs.Variable(0.0, aggregation=SUM)

    @zs.function(eager=True)
    def fn(x):
        calls.append(float(x))
        v.assign_add(jnp.asarray(x))
        return x

    for _ in range(2):
        two.run(fn, (np.float32(1.5),))
    assert calls == [1.5] * 4
    assert v.numpy() == 6.0

    @zs.function(eager=True)
    def step(x):
        return two.reduce("sum", two.run(lambda x: x * number(), (x,)), None)

    assert step(np.float32(2.0)) == 2.0


def test_what_is_compiled_for_some_replicas_is_not_for_others(two):
    """The count of replicas is the strategy's."""
    one, three = (
        zs.MirroredStrategy([f"CPU:{n}" for n in range(count)]) for count in (1, 3)
    )

    @jax.jit
    def count(x):
        return x * zs.get_replica_context().num_replicas_in_sync

    def replica():
        zs.get_replica_context().merge_call(lambda strategy: None)
        return count(jnp.ones(1))

    for strategy, replicas in ((two, 2), (three, 3), (one, 1)):
        found = strategy.experimental_local_results(strategy.run(replica))
        assert [x.tolist() for x in found] == [[replicas]] * replicas
