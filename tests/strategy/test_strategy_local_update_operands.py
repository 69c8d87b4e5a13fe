"""Mirrored values that ``extended.update`` is given: one for all, or one each."""

import jax.numpy as jnp
import pytest

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization


@pytest.fixture
def replicas():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


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
    words = rf"a mirrored value of {count} values .* copies to update: 2"
    with pytest.raises(ValueError, match=words):
        added(zs.Mirrored((2.0,) * count), **OWN)


def test_none_at_all_is_refused_for_what_all_share(added):
    with pytest.raises(ValueError, match="a mirrored value of 0 values"):
        added(zs.Mirrored(()), aggregation=A.MEAN)


def test_what_belongs_to_no_variable_takes_any_value(replicas):
    with replicas.scope():
        for count in (1, 2):
            value = zs.Mirrored((3.0,) * count)
            assert replicas.extended.update_non_slot("CPU:0", float, (value,)) == 3.0
