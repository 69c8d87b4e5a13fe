"""The copies of a variable, brought together again, are the variable."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

ON_READ = zs.VariableSynchronization.ON_READ
SUM = zs.VariableAggregation.SUM


def number():
    return zs.get_replica_context().replica_id_in_sync_group


def apart(strategy):
    with strategy.scope():
        v = zs.Variable(np.zeros(2, np.float32))
    strategy.run(lambda: v.assign(jnp.full(2, number() + 1.0)))
    return v


def test_update_gives_the_variable_back(two):
    v = apart(two)
    found = two.extended.update(v, lambda copy: copy.assign_add(jnp.ones(2)))
    assert found is v
    copies = two.experimental_local_results(v)
    np.testing.assert_array_equal([c.numpy() for c in copies], [[2, 2], [3, 3]])


def test_update_gives_it_back_inside_of_containers(two):
    v = apart(two)
    found = two.extended.update(v, lambda copy: {"v": [copy, copy.value()]})
    assert found["v"][0] is v
    np.testing.assert_array_equal(found["v"][1].values, [[1, 1], [2, 2]])


def test_update_without_a_group_gives_the_copies(two):
    v = apart(two)
    copies = two.extended.update(v, lambda copy: copy, group=False)
    np.testing.assert_array_equal([c.numpy() for c in copies], [[1, 1], [2, 2]])


def test_update_of_a_variable_that_is_summed_when_read(two):
    with two.scope():
        v = zs.Variable(0.0, aggregation=SUM, synchronization=ON_READ)
    found = two.extended.update(v, lambda copy: copy.assign(2.0))
    assert found is v
    assert v.numpy() == 4


def test_what_replicas_in_turns_return_of_their_copies(two):
    v = apart(two)
    copies = two.experimental_local_results(v)

    def turn(order):
        def replica():
            at = zs.get_replica_context().merge_call(lambda strategy: None)
            assert at is None
            return copies[order[int(number())]]

        return two.run(replica)

    assert turn([0, 1]) is v
    for order in ([1, 0], [0, 0]):
        assert turn(order) is not v


def test_copies_of_different_variables_stay_apart(two):
    v, w = apart(two), apart(two)
    parts = [two.experimental_local_results(x)[n] for n, x in enumerate((v, w))]
    found = two.extended.update(v, lambda copy: parts[copy.storage.number])
    assert isinstance(found, zs.PerReplica)
    assert found.values == tuple(parts)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_function_may_return_a_copy_of_a_variable(two, shape):
    with two.scope():
        v = zs.Variable(np.zeros(shape, np.float32))
        other = zs.Variable(np.ones(shape, np.float32))

    def fn(which):
        copy = two.experimental_local_results((v, other)[which])[1]
        return copy, copy.value()

    for which in (0, 1, 0):
        copy, value = two.run(fn, (which,))
        assert copy.name == "Variable/replica_1"
        np.testing.assert_array_equal(copy.numpy(), np.full(shape, which))
        np.testing.assert_array_equal(value.values[0], np.full(shape, which))
