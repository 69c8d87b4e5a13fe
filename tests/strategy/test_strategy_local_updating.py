"""``extended.update`` of a variable of which each replica has its own copy: called for
each of them, in a step as outside (TF's rule)."""

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
