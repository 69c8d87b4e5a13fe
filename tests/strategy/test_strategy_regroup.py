"""Merging what replicas returned, and taking it apart again: TF's rules."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zstrat.variables as zv
from zstrat.program.trace import joined
from zstrat.strategy import DistributedValues, Mirrored, PerReplica, regroup
from zstrat.strategy.replica import local_results, select_replica

Point = collections.namedtuple("Point", ["x", "y"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    left: object
    right: object


TREES = st.recursive(
    st.integers(0, 5),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=8,
)


def changed(tree, by):
    return jax.tree.map(lambda x: (x, by).__repr__(), tree)


@given(TREES)
def test_select_is_the_inverse_of_regroup(tree):
    replicas = [changed(tree, by) for by in range(3)]
    merged = regroup(replicas)
    assert [select_replica(i, merged) for i in range(3)] == replicas
    if jax.tree.leaves(tree):
        assert list(local_results(merged)) == replicas


def test_the_same_object_stays_what_it_is():
    marker = object()
    assert regroup([marker, marker]) is marker
    assert regroup([None, None]) is None
    variable = zv.Variable(1.0)
    assert regroup([variable, variable]) is variable
    wrapped = regroup([marker, marker], always_wrap=True)
    assert wrapped.values == (marker, marker)
    assert regroup([{"a": marker}] * 2) == {"a": marker}


@pytest.mark.shows("tf.distribute.DistributedValues")
@pytest.mark.shows("unwrapping and merging")
def test_containers_are_merged_member_by_member():
    merged = regroup(
        [(1, [2], {"k": Point(3, "same")}), (4, [5], {"k": Point(6, "same")})]
    )
    first, (second,), third = merged
    assert (first.values, second.values) == ((1, 4), (2, 5))
    assert isinstance(third["k"], Point)
    assert third["k"].x.values == (3, 6)
    assert third["k"].y == "same"
    pair = regroup([Pair(1, 2), Pair(3, 2)])
    assert isinstance(pair, Pair)
    assert (pair.left.values, pair.right) == ((1, 3), 2)
    ordered = regroup([{"a": 1, "b": 2}, {"b": 4, "a": 3}])
    assert (ordered["a"].values, ordered["b"].values) == ((1, 3), (2, 4))
    mirrored = regroup([1.0, 2.0], Mirrored)
    assert isinstance(mirrored, Mirrored)
    for merged in (first, mirrored):
        assert isinstance(merged, DistributedValues)


@pytest.mark.parametrize(
    "values", [([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (Point(1, 2), (1, 2))]
)
def test_structures_must_agree(values):
    with pytest.raises(ValueError, match="different structures"):
        regroup(values)


def test_rows_are_one_value():
    rows = [zv.IndexedSlices(np.ones((1, 2)), np.array([i])) for i in range(2)]
    assert regroup(rows).values == tuple(rows)


def test_mirrored_values_show_those_of_all_replicas():
    assert repr(Mirrored((1, 1))) == "Mirrored:{\n  0: 1,\n  1: 1\n}"


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
def test_one_array_for_all_replicas(kind, stacked):
    array = jnp.arange(12.0).reshape(6, 2)
    value = kind.of_whole(array, 6 if stacked else 3, stacked=stacked)
    parts = [array[i] for i in range(6)] if stacked else jnp.split(array, 3)
    for found, part in zip(value.values, parts, strict=True):
        np.testing.assert_array_equal(found, part)
    assert value.whole is array
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert isinstance(doubled, kind)
    np.testing.assert_array_equal(doubled.values[1], parts[1] * 2)
    leaves, treedef = joined.flatten(value)
    assert leaves == [array]
    assert treedef.unflatten([array]).whole is array

    @jax.jit
    def program(value):
        return [part.sum() for part in value.values], value

    sums, back = program(value)
    np.testing.assert_allclose(sums, [part.sum() for part in parts])
    np.testing.assert_array_equal(back.values[0], parts[0])
    assert isinstance(back, kind)
