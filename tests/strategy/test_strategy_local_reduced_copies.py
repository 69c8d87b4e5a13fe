"""Variables of which each replica has its own value, reduced and put elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

OWN = np.float32([8, 11, 56, 17])


@pytest.fixture
def strategy():
    return zs.MirroredStrategy([f"CPU:{n}" for n in range(4)])


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        v = zs.Variable(np.float32(0), aggregation=zs.VariableAggregation.NONE)
    mine = zs.PerReplica(list(OWN))
    strategy.run(lambda x: v.assign(x), (mine,))
    return v


def programs(fn):
    """What is asked, at once and as a step."""
    return fn, zs.function(fn)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_it_is_what_strategy_reduce_makes_of_it(strategy, variable, op):
    expected = {"sum": OWN.sum(), "mean": OWN.mean()}[op]
    for reduced in programs(lambda: strategy.reduce(op, variable)):
        assert float(reduced()) == expected
    for reduced in programs(
        lambda: strategy.extended.reduce_to(op, {"v": variable}, "CPU:0")["v"]
    ):
        found = reduced()
        assert not isinstance(found, zs.Variable)
        assert float(found) == expected
    found = strategy.extended.batch_reduce_to(op, [(variable, variable)] * 2)
    assert [[float(x) for x in each.values] for each in found] == [[expected] * 4] * 2


@pytest.mark.parametrize(("op", "expected"), [("sum", 12.0), ("mean", 3.0)])
def test_a_value_that_replicas_share_counts_for_each_of_them(strategy, op, expected):
    with strategy.scope():
        v = zs.Variable(3.0, aggregation=zs.VariableAggregation.MEAN)
    for reduced in programs(lambda: strategy.extended.reduce_to(op, v, "CPU:1")):
        found = reduced()
        assert isinstance(found, jax.Array | np.ndarray | np.generic)
        assert float(found) == expected


def test_the_mean_of_what_is_equal_is_that_number():
    # In float32 0.1 + 0.1 + 0.1 is not 3 * 0.1.
    three = zs.MirroredStrategy([f"CPU:{n}" for n in range(3)])
    same = zs.strategy.Mirrored((jnp.float32(0.1),) * 3)
    assert three.extended.reduce_to("mean", same, "CPU:0") == np.float32(0.1)
    assert three.reduce("mean", same) == np.float32(0.1)
