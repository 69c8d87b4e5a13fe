"""The copies that replicas have of a variable, one by one: in a step as outside."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization


@pytest.fixture
def replicas():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def created(replicas, value=0.0, **how):
    with replicas.scope():
        return zs.Variable(np.asarray(value, np.float32), **how)


def own(replicas, variable):
    """Each replica assigns its number, to all elements."""

    def replica():
        number = zs.get_replica_context().replica_id_in_sync_group
        variable.assign(jnp.full(variable.shape, number, jnp.float32))

    replicas.run(replica)


def copies(replicas, variable):
    return [c.numpy().tolist() for c in replicas.experimental_local_results(variable)]


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_step_reads_them(replicas, is_apart):
    variable = created(replicas, 7.0)
    if is_apart:
        own(replicas, variable)

    @zs.function
    def step():
        return [c.value() * 1 for c in replicas.experimental_local_results(variable)]

    for _ in range(2):
        assert step() == ([0, 1] if is_apart else [7, 7])
    assert step.trace_count == 1


def test_a_read_sees_what_the_step_has_written(replicas):
    variable = created(replicas)
    own(replicas, variable)

    @zs.function
    def step():
        first, second = replicas.experimental_local_results(variable)
        before = first.value(), second.value()
        variable.assign_add(100.0)  # outside of the replicas: to each copy
        second.assign_add(5.0)
        between = first.value(), second.value()
        first.assign(second.value() * 2)
        return before, between, (first.value(), second.value(), variable.value())

    assert step() == ((0, 1), (100, 106), (212, 106, 212))
    assert copies(replicas, variable) == [212, 106]
    assert step() == ((212, 106), (312, 211), (422, 211, 422))
    assert copies(replicas, variable) == [422, 211]


def test_a_replica_s_update_is_seen_too(replicas):
    variable = created(replicas)
    own(replicas, variable)

    def adding():
        variable.assign_add(jnp.float32(10))

    @zs.function
    def step():
        replicas.run(adding)
        values = replicas.experimental_local_results({"v": variable})
        each = replicas.experimental_local_results(variable)
        return [c.value() for c in each], [one["v"] for one in values]

    assert step() == ([10, 11], [10, 11])


def test_the_first_write_parts_them(replicas):
    variable = created(replicas, 3.0)

    @zs.function
    def step():
        replicas.experimental_local_results(variable)[1].assign(9.0)

    step()
    assert copies(replicas, variable) == [3, 9]


def test_rows_of_one(replicas):
    variable = created(replicas, np.zeros((3, 2)))
    own(replicas, variable)

    @zs.function
    def step(ids):
        _, second = replicas.experimental_local_results(variable)
        rows = jnp.full((2, 2), 4.0)
        second.scatter_add(zs.IndexedSlices(rows, ids, (3, 2)))
        return second.sparse_read(jnp.array([0, 2])), variable.sparse_read(ids)

    mine, first = step(np.array([2, 1]))
    np.testing.assert_array_equal(mine, [[1, 1], [5, 5]])
    np.testing.assert_array_equal(first, np.zeros((2, 2)))
    np.testing.assert_array_equal(
        np.array(copies(replicas, variable)[1]), [[1, 1], [5, 5], [5, 5]]
    )


def test_those_that_are_read_together(replicas):
    variable = created(replicas, aggregation=A.SUM, synchronization=S.ON_READ)
    own(replicas, variable)

    @zs.function
    def step():
        first, second = replicas.experimental_local_results(variable)
        first.assign_add(second.value() + 1.0)
        return first.value(), second.value(), variable.value()

    assert step() == (2, 1, 3)
    assert variable.numpy() == 3


def test_an_optimizer_moves_all_or_none(replicas):
    variable = created(replicas)
    with replicas.scope():
        optimizer = zs.Optimizer(optax.sgd(1.0))

    @zs.function
    def step():
        copy = replicas.experimental_local_results(variable)[1]
        optimizer.apply_gradients([jnp.float32(1)], [copy])

    with pytest.raises(NotImplementedError, match="apply_gradients"):
        step()
