"""`copy.deepcopy` of variables of parameter servers, and of several processes."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs
from zstrat import VariableAggregation as A
from zstrat.variables import LOCAL


def test_a_copy_is_on_the_servers(make_cluster):
    fake = make_cluster(ps=2)
    with fake.strategy.scope():
        w = zs.Variable([1.0, 2.0], name="w", trainable=False, aggregation=A.SUM)
    twin = copy.deepcopy(w)
    w.assign([0.0, 0.0])
    np.testing.assert_array_equal(twin.numpy(), [1.0, 2.0])
    assert (w.spec.ps, twin.spec.ps) == (0, 1)
    assert (twin.name, twin.trainable, twin.aggregation) == ("w", False, A.SUM)
    assert fake.strategy.extended.variable_created_in_scope(twin)
    other = make_cluster()
    with (
        other.strategy.scope(),
        pytest.raises(RuntimeError, match="'w'"),
    ):
        copy.deepcopy(w)


def test_what_a_partitioner_left_whole_stays_whole(make_cluster):
    given = iter([[1], [2]])
    fake = make_cluster(ps=2, variable_partitioner=lambda shape, dtype: next(given))
    with fake.strategy.scope():
        w = zs.Variable([1.0, 2.0])
    assert isinstance(copy.deepcopy(w), zs.Variable)


def test_parts_that_a_program_joined_stay_where_they_belong(make_cluster):
    fake = make_cluster(ps=2)
    with fake.strategy.scope():
        first = zs.Variable([1.0, 2.0])
    whole = zs.ShardedVariable([first, zs.Variable([3.0])], "w")
    twin = copy.deepcopy(whole)
    first.assign([0.0, 0.0])
    np.testing.assert_array_equal(twin.numpy(), [1.0, 2.0, 3.0])
    assert [part.spec.ps for part in twin] == [1, LOCAL]


@pytest.mark.parametrize(
    ("aggregation", "merged"),
    [(A.SUM, [3.0, 3.0]), (A.MEAN, [1.5, 1.5]), (A.ONLY_FIRST_REPLICA, [1.0, 1.0])],
)
def test_every_process_has_its_own_value_of_the_copy(aggregation, merged):
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(
                0.0,
                synchronization=zs.VariableSynchronization.ON_READ,
                aggregation=aggregation,
            )
        strategy.run(lambda: v.assign(jnp.float32(rank + 1)))
        twin = copy.deepcopy(v)
        strategy.run(lambda: v.assign(jnp.float32(9)))
        return float(twin.local_value), float(twin.numpy())

    assert ranks(2, program) == [(1.0, merged[0]), (2.0, merged[1])]


def test_processes_copy_a_mirrored_variable_together():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable([1.0 + rank], aggregation=A.MEAN)
        twin = copy.deepcopy(v)
        v.assign([7.0])
        return twin.numpy().tolist(), strategy.extended.variable_created_in_scope(twin)

    assert ranks(2, program) == [([1.0], True)] * 2
