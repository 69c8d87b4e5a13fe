"""A variable of which each replica has a copy, and whose value is gone: who needs it is
told so, wherever it is; who assigns one has it again."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.errors import DataLossError

ON_READ = zs.VariableSynchronization.ON_READ


def number():
    return zs.get_replica_context().replica_id_in_sync_group


def meet():
    zs.get_replica_context().merge_call(lambda strategy: None)


@pytest.fixture(params=["apart", "shared", "on_read"])
def lost(request, two):
    """What a step leaves behind that was given the value and failed."""
    options = {}
    if request.param == "on_read":
        options = {
            "synchronization": ON_READ,
            "aggregation": zs.VariableAggregation.SUM,
        }
    with two.scope():
        v = zs.Variable(np.float32([2, 2]), name="gone", **options)
    if request.param == "apart":
        two.run(lambda: v.assign(jnp.full(2, number(), v.dtype)))
    v.storage.value().delete()
    return v


def reads(v):
    return {
        "in turns": lambda: (meet(), v.value())[1],
        "rows in turns": lambda: (meet(), v.sparse_read(np.array([1])))[1],
        "added in turns": lambda: (meet(), v.assign_add(jnp.ones(2)))[0],
    }


@pytest.mark.parametrize("how", list(reads(None)))
def test_who_needs_it_is_told(two, lost, how):
    with pytest.raises(DataLossError, match="'gone'"):
        two.run(reads(lost)[how])


def test_its_copies_are_told(two, lost):
    for copy in two.experimental_local_results(lost):
        with pytest.raises(DataLossError, match="'gone'"):
            copy.numpy()


def test_an_assignment_in_turns_repairs_it(two, lost):
    two.run(lambda: (meet(), lost.assign(jnp.full(2, number() + 1.0)))[0])
    copies = two.experimental_local_results(lost)
    np.testing.assert_array_equal([c.numpy() for c in copies], [[1, 1], [2, 2]])


def test_assignments_to_the_copies_repair_it(two, lost):
    for n, copy in enumerate(two.experimental_local_results(lost)):
        copy.assign([n + 1, n + 1])
    copies = two.experimental_local_results(lost)
    np.testing.assert_array_equal([c.numpy() for c in copies], [[1, 1], [2, 2]])


def test_an_assignment_outside_repairs_it(two, lost):
    lost.assign([3, 3])
    np.testing.assert_array_equal(lost.numpy(), [3, 3])


def test_an_assignment_to_one_copy_repairs_that_one_alone(two, lost):
    first, second = two.experimental_local_results(lost)
    first.assign([9, 9])
    np.testing.assert_array_equal(first.numpy(), [9, 9])
    first.assign_add([1, 1])
    np.testing.assert_array_equal(first.numpy(), [10, 10])
    step = zs.function(lambda: two.run(lost.value))
    for use in (second.numpy, lambda: second.assign_add([1, 1]), lost.numpy, step):
        with pytest.raises(DataLossError, match="'gone'"):
            use()
    second.assign([3, 4])
    copies = [10, 10], [3, 4]
    np.testing.assert_array_equal([first.numpy(), second.numpy()], copies)
    on_read = lost.synchronization is ON_READ
    np.testing.assert_array_equal(lost.numpy(), [13, 14] if on_read else [10, 10])
    results = two.experimental_local_results(step())
    np.testing.assert_array_equal(results, copies)


def test_a_replica_reads_its_own_copy_when_it_has_assigned_it(two, lost):
    def replica():
        meet()
        if number() == 0 or is_last:
            lost.assign(jnp.full(2, number() + 1.0))
        return lost.value() if number() == 0 or is_last else jnp.zeros(2)

    is_last = False
    results = two.experimental_local_results(two.run(replica))
    np.testing.assert_array_equal(results[0], [1, 1])
    for copy in two.experimental_local_results(lost)[1:]:
        with pytest.raises(DataLossError, match="'gone'"):
            copy.numpy()
    is_last = True
    results = two.experimental_local_results(two.run(replica))
    np.testing.assert_array_equal(results, [[1, 1], [2, 2]])
