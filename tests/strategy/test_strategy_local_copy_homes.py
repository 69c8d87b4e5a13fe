"""The copies that replicas have of a variable, one by one, in a step as outside: each
is a variable, the same one for all who ask, and together they are the variable."""

import gc
import warnings
import weakref

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


def variable(strategy):
    with strategy.scope():
        return zs.Variable(np.zeros(2, np.float32), name="own")


def number():
    return zs.get_replica_context().replica_id_in_sync_group


def test_a_step_is_traced_once_for_each_copy(two):
    v = variable(two)
    two.run(lambda: v.assign(jnp.full(2, number() + 1.0)))

    @zs.function
    def step(copy):
        return copy.value() + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            seen = [step(c) for c in two.experimental_local_results(v)]
            np.testing.assert_array_equal(seen, [[2, 2], [3, 3]])
    assert step.trace_count == 2


def test_copies_of_two_variables_are_different_ones(two):
    v, w = variable(two), variable(two)
    copies = [*two.experimental_local_results(v), *two.experimental_local_results(w)]
    keys = {x.spec.key for x in [v, w, *copies]}
    assert len(keys) == 6


def test_a_step_of_an_older_handle_finds_what_a_newer_one_wrote(two):
    v = variable(two)
    step = zs.function(lambda copy: copy.value())
    step(two.experimental_local_results(v)[1])
    two.experimental_local_results(v)[1].assign([7, 7])
    np.testing.assert_array_equal(step(two.experimental_local_results(v)[1]), [7, 7])


def test_the_variable_goes_with_its_last_handle(two):
    v = variable(two)
    storage = weakref.ref(v.storage)
    gc.disable()
    try:
        two.experimental_local_results(v)
        del v
        assert storage() is None
    finally:
        gc.enable()


ON_READ = zs.VariableSynchronization.ON_READ


SUM = zs.VariableAggregation.SUM


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
