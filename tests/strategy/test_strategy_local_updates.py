"""``extended.update`` (TF's rule): called for each copy of a variable of which each
replica has its own, once for what they share; its operands are one for all or each."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization


KINDS = [
    {},  # NONE: an update in a replica is that of its own copy
    {"aggregation": A.SUM, "synchronization": S.ON_READ},
    {"aggregation": A.MEAN, "synchronization": S.ON_READ},
]


@pytest.fixture
def replicas():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(params=KINDS)
def variable(request, replicas):
    """With the copies 0 and 1."""
    with replicas.scope():
        made = zs.Variable(np.float32(0), **request.param)

    def replica():
        number = zs.get_replica_context().replica_id_in_sync_group
        made.assign(jnp.asarray(number, jnp.float32))

    replicas.run(replica)
    return made


def copies(replicas, variable):
    return [float(c.numpy()) for c in replicas.experimental_local_results(variable)]


@pytest.fixture(params=[True, False])
def call(request, replicas):
    """Calls in the strategy's scope, as a step or as it is."""

    def called(fn):
        with replicas.scope():
            return (zs.function(fn) if request.param else fn)()

    return called


def test_each_copy_is_assigned_its_own(replicas, variable, call):
    def update():
        replicas.extended.update(variable, lambda c: c.assign(c.value() + 10.0))

    call(update)
    assert copies(replicas, variable) == [10, 11]


def test_each_is_added_to(replicas, variable, call):
    def update():
        replicas.extended.update(variable, lambda c, x: c.assign_add(x), args=(1.0,))

    call(update)
    assert copies(replicas, variable) == [1, 2]


def test_a_list_has_an_entry_for_each(replicas, variable, call):
    def values():
        return replicas.extended.update(
            variable, lambda c: {"twice": c.value() * 2, "none": None}, group=False
        )

    assert call(values) == {"twice": [0, 2], "none": [None, None]}


def test_together_they_are_a_value_per_replica(replicas, variable, call):
    def values():
        return replicas.extended.update(variable, lambda c: c.value() + 3)

    assert replicas.experimental_local_results(call(values)) == (3, 4)


def test_each_gets_its_own_of_mirrored_values(replicas, variable, call):
    mirrored = replicas.extended.broadcast_to(jnp.float32(5), variable)

    def update():
        replicas.extended.update(
            variable, lambda c, x: c.assign_sub(x), args=(mirrored,)
        )

    call(update)
    assert copies(replicas, variable) == [-5, -4]


def test_from_within_a_replica_function(replicas, variable):
    def replica():
        replicas.extended.update(variable, lambda c: c.assign(c.value() * 4 + 2))

    replicas.run(replica)
    assert copies(replicas, variable) == [2, 6]


def test_what_they_share_is_updated_once(replicas, call):
    with replicas.scope():
        shared = zs.Variable(np.float32(1), aggregation=A.MEAN)

    def values():
        return replicas.extended.update(
            shared, lambda c: c.assign_add(1.0).value(), group=False
        )

    assert call(values) == [2]
    assert copies(replicas, shared) == [2, 2]


@pytest.fixture(params=[True, False], ids=["in a step", "by itself"])
def added(request, replicas):
    """What the copies of a variable have once this was added to each in turn."""

    def added(value, **options):
        with replicas.scope():
            v = zs.Variable(1.0, **options)

            def update():
                replicas.extended.update(
                    v,
                    lambda copy, x, *, y: copy.assign_add(x + y[0]),
                    args=(value,),
                    kwargs={"y": [value]},
                )

            (zs.function(update) if request.param else update)()
        return [float(each.numpy()) for each in replicas.experimental_local_results(v)]

    return added


OWN = {"synchronization": S.ON_READ, "aggregation": A.MEAN}


def test_one_value_is_for_all_copies(added):
    assert added(zs.Mirrored((jnp.float32(2),)), **OWN) == [5.0, 5.0]
    assert added(zs.Mirrored((2.0,)), **OWN) == [5.0, 5.0]


def test_as_many_as_copies_are_one_each(added):
    assert added(zs.Mirrored((2.0, 2.0)), **OWN) == [5.0, 5.0]


@pytest.mark.parametrize("count", [1, 2])
def test_what_all_replicas_share_takes_any(added, count):
    value = zs.Mirrored((2.0,) * count)
    assert added(value, aggregation=A.MEAN) == [5.0, 5.0]


@pytest.mark.parametrize("count", [0, 3])
def test_other_counts_are_refused(added, count):
    with pytest.raises(ValueError, match=rf"\b{count}\b.*\b2\b"):
        added(zs.Mirrored((2.0,) * count), **OWN)


def test_none_at_all_is_refused_for_what_all_share(added):
    with pytest.raises(ValueError, match=r"\b0\b"):
        added(zs.Mirrored(()), aggregation=A.MEAN)


def test_what_belongs_to_no_variable_takes_any_value(replicas):
    with replicas.scope():
        for count in (1, 2):
            value = zs.Mirrored((3.0,) * count)
            assert replicas.extended.update_non_slot("CPU:0", float, (value,)) == 3.0
