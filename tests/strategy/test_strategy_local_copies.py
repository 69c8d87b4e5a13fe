"""The copies that replicas have of a variable, one by one, in a step as outside: each
is a variable, the same one for all who ask, and together they are the variable; and
``extended.update`` (TF's rule): called for each copy if each replica has its own, and
once for what they share."""

import gc
import warnings
import weakref

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from in_replicas import copies, meet, number
from lockstep import A, S

import zstrat as zs

SUMMED = {"aggregation": A.SUM, "synchronization": S.ON_READ}
MEANED = {"aggregation": A.MEAN, "synchronization": S.ON_READ}


def created(strategy, value=0.0, **how):
    with strategy.scope():
        return zs.Variable(np.asarray(value, np.float32), name="own", **how)


def apart(strategy, value=0.0, **how):
    """A variable of which each replica has its number, in all elements."""
    variable = created(strategy, value, **how)

    def replica():
        variable.assign(jnp.full(variable.shape, number(), jnp.float32))

    strategy.run(replica)
    return variable


def copies_of(strategy, variable):
    return strategy.experimental_local_results(variable)


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_step_reads_them(two, is_apart):
    variable = (apart if is_apart else created)(two, 7.0)

    @zs.function
    def step():
        return [c.value() * 1 for c in copies_of(two, variable)]

    for _ in range(2):
        assert step() == ([0, 1] if is_apart else [7, 7])
    assert step.trace_count == 1


def test_a_read_sees_what_the_step_has_written(two):
    variable = apart(two)

    @zs.function
    def step():
        first, second = copies_of(two, variable)
        before = first.value(), second.value()
        variable.assign_add(100.0)  # outside of the replicas: to each copy
        second.assign_add(5.0)
        between = first.value(), second.value()
        first.assign(second.value() * 2)
        return before, between, (first.value(), second.value(), variable.value())

    assert step() == ((0, 1), (100, 106), (212, 106, 212))
    assert copies(two, variable) == [212, 106]
    assert step() == ((212, 106), (312, 211), (422, 211, 422))
    assert copies(two, variable) == [422, 211]


def test_a_replica_s_update_is_seen_too(two):
    variable = apart(two)

    @zs.function
    def step():
        two.run(lambda: [variable.assign_add(jnp.float32(10))][1:])
        values = copies_of(two, {"v": variable})
        return [c.value() for c in copies_of(two, variable)], [x["v"] for x in values]

    assert step() == ([10, 11], [10, 11])


def test_the_first_write_parts_them(two):
    variable = created(two, 3.0)
    zs.function(lambda: [copies_of(two, variable)[1].assign(9.0)][1:])()
    assert copies(two, variable) == [3, 9]


def test_rows_of_one(two):
    variable = apart(two, np.zeros((3, 2)))

    @zs.function
    def step(ids):
        _, second = copies_of(two, variable)
        second.scatter_add(zs.IndexedSlices(jnp.full((2, 2), 4.0), ids, (3, 2)))
        return second.sparse_read(jnp.array([0, 2])), variable.sparse_read(ids)

    mine, first = step(np.array([2, 1]))
    np.testing.assert_array_equal(mine, [[1, 1], [5, 5]])
    np.testing.assert_array_equal(first, np.zeros((2, 2)))
    assert copies(two, variable)[1] == [[1, 1], [5, 5], [5, 5]]


def test_those_that_are_read_together(two):
    variable = apart(two, **SUMMED)

    @zs.function
    def step():
        first, second = copies_of(two, variable)
        first.assign_add(second.value() + 1.0)
        return first.value(), second.value(), variable.value()

    assert step() == (2, 1, 3)
    assert variable.numpy() == 3


def test_an_optimizer_moves_all_or_none(two):
    variable = created(two)
    with two.scope():
        optimizer = zs.Optimizer(optax.sgd(1.0))

    @zs.function
    def step():
        optimizer.apply_gradients([jnp.float32(1)], [copies_of(two, variable)[1]])

    with pytest.raises(NotImplementedError, match="apply_gradients"):
        step()


def test_a_step_is_traced_once_for_each_copy(two):
    v = apart(two)
    step = zs.function(lambda copy: copy.value() + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert [step(copy) for copy in copies_of(two, v)] == [1, 2]
    assert step.trace_count == 2
    # A step of an older handle finds what a newer one wrote.
    copies_of(two, v)[1].assign(7.0)
    assert step(copies_of(two, v)[1]) == 8


def test_they_are_variables(two):
    v = created(two, [1.0, 2.0])
    first, second = copies_of(two, v)
    assert (first.name, second.name) == ("own", "own/replica_1")
    assert two.extended.value_container(second) is v
    assert two.extended.value_container(v) is v
    second.assign_add([1.0, 1.0])
    assert copies(two, v) == [[1, 2], [2, 3]]
    assert v.numpy().tolist() == [1, 2]
    rows = zs.IndexedSlices(np.ones(1, np.float32), [1])
    assert second.scatter_sub(rows).numpy().tolist() == [2, 2]
    plain = zs.Variable(1.0)
    assert copies_of(two, plain) == (plain,)


def test_copies_of_two_variables_are_different_ones(two):
    v, w = created(two), created(two)
    keys = {x.spec.key for x in [v, w, *copies_of(two, v), *copies_of(two, w)]}
    assert len(keys) == 6


def test_the_variable_goes_with_its_last_handle(two):
    v = created(two)
    storage = weakref.ref(v.storage)
    gc.disable()
    try:
        copies_of(two, v)
        del v
        assert storage() is None
    finally:
        gc.enable()


def test_what_replicas_in_turns_return_of_their_copies(two):
    v = apart(two)

    def turn(order):
        def replica():
            meet()
            return copies_of(two, v)[order[int(number())]]

        return two.run(replica)

    assert turn([0, 1]) is v
    for order in ([1, 0], [0, 0]):
        assert turn(order) is not v


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_function_may_return_a_copy_of_a_variable(two, shape):
    both = [created(two, np.full(shape, n)) for n in range(2)]

    def fn(which):
        copy = copies_of(two, both[which])[1]
        return copy, copy.value()

    for which in (0, 1, 0):
        copy, value = two.run(fn, (which,))
        assert copy.name == "own/replica_1"
        np.testing.assert_array_equal(copy.numpy(), np.full(shape, which))
        np.testing.assert_array_equal(value.values[0], np.full(shape, which))


# extended.update


@pytest.fixture(params=[{}, SUMMED, MEANED])  # none: each replica updates its own copy
def variable(request, two):
    return apart(two, **request.param)


@pytest.fixture(params=[True, False], ids=["in a step", "by itself"])
def call(request, two):
    """Calls in the strategy's scope, as a step or as it is."""

    def called(fn):
        with two.scope():
            return (zs.function(fn) if request.param else fn)()

    return called


UPDATES = {
    "assign": (lambda c: c.assign(c.value() + 10.0), (), [10, 11]),
    "add": (lambda c, x: c.assign_add(x), (1.0,), [1, 2]),
    "mirrored": (lambda c, x: c.assign_sub(x), (zs.Mirrored((5.0, 6.0)),), [-5, -5]),
}


@pytest.mark.parametrize("name", UPDATES)
def test_each_copy_gets_its_own_update(two, variable, call, name):
    fn, args, expected = UPDATES[name]
    call(lambda: [two.extended.update(variable, fn, args=args)][1:])
    assert copies(two, variable) == expected


def test_what_an_update_returns(two, variable, call):
    """A list with an entry for each, or together a value per replica, in which copies
    are the variable."""
    update = two.extended.update
    lists = call(
        lambda: update(variable, lambda c: {"x": c.value() * 2, "n": None}, group=False)
    )
    assert lists == {"x": [0, 2], "n": [None, None]}
    value = call(lambda: update(variable, lambda c: c.value() + 3))
    assert copies_of(two, value) == (3, 4)
    found = update(variable, lambda c: {"v": [c, c.value()]})
    assert found["v"][0] is variable
    assert found["v"][1].values == (0, 1)
    assert update(variable, lambda c: c.assign_add(1.0)) is variable
    each = update(variable, lambda c: c, group=False)
    assert [c.numpy() for c in each] == [1, 2]


def test_copies_of_different_variables_stay_apart(two):
    v, w = apart(two), apart(two)
    parts = [copies_of(two, x)[n] for n, x in enumerate((v, w))]
    found = two.extended.update(v, lambda copy: parts[copy.storage.number])
    assert isinstance(found, zs.PerReplica)
    assert found.values == tuple(parts)


def test_from_within_a_replica_function(two, variable):
    def replica():
        two.extended.update(variable, lambda c: c.assign(c.value() * 4 + 2))

    two.run(replica)
    assert copies(two, variable) == [2, 6]


def test_what_they_share_is_updated_once(two, call):
    shared = created(two, 1.0, aggregation=A.MEAN)

    def values():
        return two.extended.update(
            shared, lambda c: c.assign_add(1.0).value(), group=False
        )

    assert call(values) == [2]
    assert copies(two, shared) == [2, 2]


@pytest.fixture
def added(two, call):
    """What the copies of a variable have once this was added to each in turn."""

    def added(value, **options):
        v = created(two, 1.0, **options)

        def update():
            two.extended.update(
                v,
                lambda copy, x, *, y: copy.assign_add(x + y[0]),
                args=(value,),
                kwargs={"y": [value]},
            )

        call(update)
        return copies(two, v)

    return added


def test_one_value_is_for_all_copies_or_one_is_for_each(added):
    for values in ((jnp.float32(2),), (2.0,), (2.0, 2.0)):
        assert added(zs.Mirrored(values), **MEANED) == [5.0, 5.0]
        assert added(zs.Mirrored(values), aggregation=A.MEAN) == [5.0, 5.0]


def test_other_counts_are_refused(added, two):
    for count in (0, 3):
        with pytest.raises(ValueError, match=rf"\b{count}\b.*\b2\b"):
            added(zs.Mirrored((2.0,) * count), **MEANED)
    with pytest.raises(ValueError, match=r"\b0\b"):
        added(zs.Mirrored(()), aggregation=A.MEAN)
    with two.scope():  # what belongs to no variable takes any
        for count in (1, 2):
            value = zs.Mirrored((3.0,) * count)
            assert two.extended.update_non_slot("CPU:0", float, (value,)) == 3.0
