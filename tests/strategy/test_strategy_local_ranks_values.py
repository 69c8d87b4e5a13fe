"""Variables, values and training of two processes, here threads, of several devices
each, against one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ranks import Board, Threads, ranks
from tiers import combined

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

    zs.function(lambda: strategy.run(number))()
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


@pytest.mark.parametrize(
    ("aggregation", "compiled"),
    combined([AGGREGATION.SUM, AGGREGATION.MEAN], [True, False]),
)
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


TWO = 2
"""Devices of each rank."""


X = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)


Y = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)


def test_batches_lie_on_the_devices_of_their_replicas():
    def program(strategy, rank):
        data = zs.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        x, y = next(iter(strategy.experimental_distribute_dataset(data)))
        for whole, rows in ((x, X), (y, Y)):
            parts = strategy.experimental_local_results(whole)
            places = jax.local_devices()[rank * 4 :][:TWO]
            assert [part.devices() for part in parts] == [{each} for each in places]
            pieces = np.split(rows, 4)[rank::2]  # shared out by DATA: in turn
            np.testing.assert_array_equal(parts, pieces)

    ranks(2, program, TWO)


def test_many_replicas_outside_of_a_step_are_told_of_their_pace(caplog):
    def program(strategy, rank):
        del rank

        def replica(x):
            return zs.get_replica_context().all_reduce("sum", x)

        for x in (1.0, 2.0):
            sums = strategy.run(replica, args=(jnp.float32(x),))
            found = strategy.experimental_local_results(sums)
            assert [float(each) for each in found] == [4 * x] * TWO

    ranks(2, program, TWO)
    warned = [each for each in caplog.records if each.levelname == "WARNING"]
    assert all("zs.function" in each.getMessage() for each in warned)
    assert len(warned) == 2  # one of each rank
