"""Variables and mirrored values of two processes, here threads, of four devices each:
every replica has a value, and counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ranks import Board, Threads, ranks

import zstrat as zs
from zstrat.program.stages import PROCESS, Channel
from zstrat.strategy import Mirrored
from zstrat.strategy.mirrored import MirroredVariables
from zstrat.strategy.mirrored._copies import as_values
from zstrat.strategy.replica import AXIS, Team
from zstrat.variables import creator

HERE, ALL = 4, 8
AGGREGATION = zs.VariableAggregation


def counted(strategy, aggregation):
    """Of which each replica has its own number."""
    with strategy.scope():
        v = zs.Variable(
            np.float32([0]),
            aggregation=aggregation,
            synchronization=zs.VariableSynchronization.ON_READ,
        )

    def number():
        context = zs.get_replica_context()
        v.assign_add(jnp.float32(context.replica_id_in_sync_group)[None])

    strategy.run(number)
    return v


def results(strategy, value, compiled):
    def both():
        return (
            strategy.reduce("sum", value),
            strategy.reduce("mean", value),
            strategy.reduce("mean", value, axis=0),
            strategy.gather(value, 0),
        )

    found = (zs.function(both) if compiled else both)()
    return [np.asarray(each).tolist() for each in found]


@pytest.mark.parametrize("aggregation", [AGGREGATION.SUM, AGGREGATION.MEAN])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_value_of_each_replica_is_reduced_once(aggregation, compiled):
    def program(strategy, rank):
        v = counted(strategy, aggregation)
        copies = [float(x.numpy()[0]) for x in strategy.experimental_local_results(v)]
        return copies, results(strategy, v, compiled)

    numbers = list(range(ALL))
    expected = [[sum(numbers)], [sum(numbers) / ALL], sum(numbers) / ALL, numbers]
    found = ranks(2, program)
    assert found == [
        (numbers[:HERE], expected),
        (numbers[HERE:], expected),
    ]


@pytest.mark.parametrize("compiled", [True, False])
def test_what_replicas_share_counts_for_each_of_them(compiled):
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(np.float32([3]), aggregation=AGGREGATION.MEAN)
        value = Mirrored((jnp.float32([3]),) * HERE)
        return [results(strategy, each, compiled) for each in (v, value)]

    expected = [[3 * ALL], [3], 3, [3] * ALL]
    assert ranks(2, program) == [[expected] * 2] * 2


def test_a_variable_that_xla_shares_between_processes_counts_for_each_replica():
    devices = jax.local_devices()[:HERE]
    mesh = Mesh(np.array([devices]), (PROCESS, AXIS))
    team = Team(HERE, Channel(Threads(Board(1), 0), mesh))
    variables = MirroredVariables(devices, team)
    before = creator.set(variables)
    v = zs.Variable(2.0)
    creator.reset(before)
    value = as_values(v)
    assert isinstance(value, Mirrored)
    assert [float(x) for x in value.values] == [2.0] * HERE
