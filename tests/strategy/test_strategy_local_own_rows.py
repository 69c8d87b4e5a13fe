"""Rows of a variable of which each replica has a copy: those of its own copy, in turns
as in one program; outside of replicas those of what is read there."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

NONE, SUM = zs.VariableAggregation.NONE, zs.VariableAggregation.SUM
ON_READ = zs.VariableSynchronization.ON_READ


def number():
    return zs.get_replica_context().replica_id_in_sync_group


def meet():
    zs.get_replica_context().merge_call(lambda strategy: None)


def values(result):
    return [np.asarray(value).tolist() for value in result.values]


def tables(strategy):
    """A table of each kind; copy i has the rows ``[0, 10, 20] * (i + 1)``."""
    with strategy.scope():
        own = zs.Variable(np.zeros((3, 1), np.float32), name="own", aggregation=NONE)
        read = zs.Variable(
            np.zeros((3, 1), np.float32),
            name="read",
            aggregation=SUM,
            synchronization=ON_READ,
        )

    def fill():
        rows = jnp.arange(3.0).reshape(3, 1) * 10
        own.assign(rows * (number() + 1))
        read.assign(rows * (number() + 1))

    strategy.run(fill)
    return own, read


@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("of", ["sparse_read", "embedding_lookup"])
def test_rows_of_the_own_copy(two, is_step, in_turns, of):
    found = tables(two)

    def rows(table):
        if of == "sparse_read":
            return table.sparse_read(np.array([2, 1, 2]))
        return zs.embedding_lookup(table, jnp.array([2, 1, 2]))

    def replica():
        if in_turns:
            meet()
        return [rows(table)[:, 0] for table in found]

    run = zs.function(two.run) if is_step else two.run
    for result in run(replica):
        assert values(result) == [[20, 10, 20], [40, 20, 40]]


@pytest.mark.parametrize("is_step", [False, True])
def test_rows_after_an_update_of_the_own_copy(two, is_step):
    own, read = tables(two)

    def replica():
        meet()
        own.assign_add(jnp.ones((3, 1)))
        read.assign_add(jnp.ones((3, 1)))
        return own.sparse_read([1])[:, 0], read.sparse_read([1])[:, 0]

    run = zs.function(two.run) if is_step else two.run
    for result in run(replica):
        assert values(result) == [[11], [21]]


@pytest.mark.parametrize("is_step", [False, True])
def test_gradients_of_rows_of_the_own_copy(two, is_step):
    own, _ = tables(two)

    def replica():
        meet()

        def loss(table):
            return (zs.embedding_lookup(table, jnp.array([1])) ** 2).sum()

        value, gradient = zs.value_and_grad(loss)(own)
        return value, gradient.values[:, 0]

    run = zs.function(two.run) if is_step else two.run
    value, gradient = run(replica)
    assert values(value) == [100, 400]
    assert values(gradient) == [[20], [40]]


def test_rows_that_are_not_there_are_named(two):
    own, _ = tables(two)

    def replica():
        meet()
        return own.sparse_read([3])

    with pytest.raises(IndexError, match="3"):
        two.run(replica)


def test_outside_of_replicas_rows_are_of_what_is_read(two):
    """The sum of both copies of the one, the first copy of the other."""
    own, read = tables(two)

    def rows():
        return own.sparse_read([1]), read.sparse_read([1, 2]), read.value()

    for first, summed, whole in (rows(), zs.function(rows)()):
        assert np.asarray(first).tolist() == [[10]]
        assert np.asarray(summed).tolist() == [[30], [60]]
        assert np.asarray(whole).tolist() == [[0], [30], [60]]


def test_in_merge_call_rows_are_of_what_is_read(two):
    own, read = tables(two)

    def replica():
        return zs.get_replica_context().merge_call(
            lambda strategy: (own.sparse_read([1]), read.sparse_read([1]))
        )

    for run in (two.run, zs.function(two.run)):
        first, summed = run(replica)
        assert np.asarray(first).tolist() == [[10]]
        assert np.asarray(summed).tolist() == [[30]]
