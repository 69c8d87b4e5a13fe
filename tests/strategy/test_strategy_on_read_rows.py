"""Rows of a variable that is aggregated when it is read are rows of what it is
read as, wherever they are read."""

import asyncio
import copy

import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs
from zstrat import VariableAggregation as Aggregation

ON_READ = zs.VariableSynchronization.ON_READ
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
IDS = np.array([[2, 0], [2, 1]])

# Rank r adds ROWS * (r + 1) to nothing.
EXPECTED = {
    Aggregation.SUM: ROWS * 3,
    Aggregation.MEAN: ROWS * 1.5,
    Aggregation.ONLY_FIRST_REPLICA: ROWS,
}


def counted(strategy, rank, aggregation):
    with strategy.scope():
        v = zs.Variable(
            np.zeros((3, 2), np.float32),
            name="seen",
            aggregation=aggregation,
            synchronization=ON_READ,
        )
    strategy.run(lambda: v.assign_add(jnp.asarray(ROWS * (rank + 1))))
    return v


def merged(strategy, read):
    """As the function of a merge_call reads it."""
    return strategy.run(lambda: zs.get_replica_context().merge_call(lambda _: read()))


def ways(strategy, v):
    return {
        "sparse_read": lambda: v.sparse_read(IDS),
        "async": lambda: asyncio.run(v.sparse_read_async(IDS)),
        "embedding_lookup": lambda: zs.embedding_lookup(v, IDS),
        "step": lambda: zs.function(lambda: v.sparse_read(IDS))(),
        "lookup in a step": lambda: zs.function(lambda: zs.embedding_lookup(v, IDS))(),
        "merge_call": lambda: merged(strategy, lambda: v.sparse_read(IDS)),
        "lookup in merge_call": lambda: merged(
            strategy, lambda: zs.embedding_lookup(v, IDS)
        ),
    }


@pytest.mark.parametrize("aggregation", list(EXPECTED))
def test_rows_over_the_ranks(aggregation):
    def program(strategy, rank):
        v = counted(strategy, rank, aggregation)
        found = {name: np.asarray(read()) for name, read in ways(strategy, v).items()}
        return np.asarray(v.value()), found

    for value, found in ranks(2, program):
        np.testing.assert_array_equal(value, EXPECTED[aggregation])
        for name, rows in found.items():
            expected = EXPECTED[aggregation][IDS]
            np.testing.assert_array_equal(rows, expected, err_msg=name)


def test_each_rank_may_want_other_rows():
    ids = [np.zeros(0, int), np.array([1, 1])]

    def program(strategy, rank):
        v = counted(strategy, rank, Aggregation.SUM)
        return v.sparse_read(ids[rank]), np.asarray(zs.embedding_lookup(v, ids[rank]))

    for rank, found in enumerate(ranks(2, program)):
        for rows in found:
            np.testing.assert_array_equal(rows, (ROWS * 3)[ids[rank]])


def test_a_list_of_variables_of_which_one_is_brought_together():
    ids = [np.array([0, 4, 0]), np.array([5, 1])]

    def program(strategy, rank):
        v = counted(strategy, rank, Aggregation.SUM)
        with strategy.scope():
            w = zs.Variable(ROWS + 100)
        return np.asarray(
            zs.embedding_lookup([v, w], ids[rank], partition_strategy="div")
        )

    table = np.concatenate([ROWS * 3, ROWS + 100])
    for rank, rows in enumerate(ranks(2, program)):
        np.testing.assert_array_equal(rows, table[ids[rank]])


def test_a_replica_has_rows_of_its_own():
    def program(strategy, rank):
        v = counted(strategy, rank, Aggregation.SUM)

        def replica():
            return v.sparse_read(IDS), zs.embedding_lookup(v, IDS)

        return strategy.run(replica)

    for rank, found in enumerate(ranks(2, program)):
        for rows in found:
            np.testing.assert_array_equal(rows, (ROWS * (rank + 1))[IDS])


def test_what_has_no_one_value_has_no_rows():
    def program(strategy, rank):
        v = counted(strategy, rank, Aggregation.NONE)
        for read in ways(strategy, v).values():
            with pytest.raises(ValueError, match="NONE"):
                read()

    ranks(2, program)


READS = {
    "value": lambda v: v.value(),
    "async": lambda v: asyncio.run(v.value_async()),
    "index": lambda v: v[:],
    "step": lambda v: zs.function(lambda: v.value())(),
    "index in a step": lambda v: zs.function(lambda: v[:])(),
    "copy": lambda v: copy.deepcopy(v).value(),
}


@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.MEAN])
def test_a_sharded_variable_is_read_as_its_components(aggregation):
    def program(strategy, rank):
        v = zs.ShardedVariable([counted(strategy, rank, aggregation) for _ in range(2)])
        found = {name: np.asarray(read(v)) for name, read in READS.items()}
        v.assign(np.full(v.shape, 5, np.float32))
        return found, v.numpy(), np.asarray(v.components[0].value())

    for found, whole, first in ranks(2, program):
        for name, rows in found.items():
            expected = np.concatenate([EXPECTED[aggregation]] * 2)
            np.testing.assert_array_equal(rows, expected, err_msg=name)
        np.testing.assert_array_equal(whole, np.full((6, 2), 5))
        np.testing.assert_array_equal(first, whole[:3])


def test_a_sharded_variable_refuses_what_its_components_refuse():
    def program(strategy, rank):
        v = zs.ShardedVariable([counted(strategy, rank, Aggregation.SUM)])
        one = zs.IndexedSlices(np.ones((1, 2), np.float32), [0])
        with pytest.raises(NotImplementedError, match="scatter_add of variable 'seen'"):
            v.scatter_add(one)
        with pytest.raises(ValueError, match="cross-replica context"):
            v.assign_add(np.ones(v.shape, np.float32))

    ranks(2, program)
