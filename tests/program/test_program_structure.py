"""Every result rebuilds from its plain structure, also after msgpack."""

from __future__ import annotations

import dataclasses
import subprocess  # noqa: F401  # a module that is here
from collections import OrderedDict, defaultdict, namedtuple

import jax
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.program import rebuild
from zstrat.program.trace import is_described, split

Point = namedtuple("Point", "x y")

arrays = st.integers(0, 9).map(lambda n: np.full((2,), n, np.float32))
static = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
)


def _containers(inner):
    keys = st.text(max_size=2) | st.binary(max_size=2)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.integers(0, 5), inner, max_size=3)
        | st.dictionaries(
            keys.filter(lambda k: isinstance(k, bytes)), inner, max_size=2
        )
    )


plain_trees = st.recursive(arrays | static, _containers, max_leaves=12)
any_trees = st.recursive(
    arrays | static,
    lambda inner: (
        _containers(inner)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=12,
)


def _same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        assert np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y


def _refuse(variable):
    raise AssertionError(variable)


@given(plain_trees)
def test_plain_results_need_nothing_but_the_structure(tree):
    structure, leaves = split(tree, _refuse)
    carried = msgpack.unpackb(msgpack.packb(structure.plain), strict_map_key=False)
    _same(rebuild(carried, leaves), tree)


@given(any_trees)
def test_other_pytrees_rebuild_with_the_treedef_of_the_trace(tree):
    structure, leaves = split(tree, _refuse)
    carried = msgpack.unpackb(msgpack.packb(structure.plain), strict_map_key=False)
    _same(rebuild(carried, leaves, structure.treedef), tree)
    _same(structure.unflatten(leaves), tree)


@pytest.mark.parametrize(
    "broken",
    [True, 5, -1, "text", [], ["?"], ["="], ["{", 1], ["{", [None, 0]], {"a": 0}, 1.5],
    ids=repr,
)
def test_malformed_structures_are_refused(broken):
    with pytest.raises(ValueError, match="malformed"):
        rebuild(broken, [np.zeros(1)])


@given(any_trees)
def test_other_pytrees_rebuild_without_a_trace_where_their_classes_are(tree):
    structure, leaves = split(tree, _refuse)
    assert is_described(structure.plain)
    carried = msgpack.unpackb(msgpack.packb(structure.plain), strict_map_key=False)
    _same(rebuild(carried, leaves), tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Labelled:
    x: object
    label: object = dataclasses.field(metadata={"static": True})


@pytest.mark.parametrize(
    "label", [None, 1, "a", (1, "a", (2.5, b"c")), Labelled], ids=repr
)
def test_auxiliary_data_of_a_class_are_rebuilt(label):
    tree = {"one": [Labelled(np.ones(2), label)], "two": defaultdict(list, a=2)}
    structure, leaves = split(tree, _refuse)
    carried = msgpack.unpackb(msgpack.packb(structure.plain), strict_map_key=False)
    _same(rebuild(carried, leaves), tree)


def test_a_structure_of_another_pytree_is_refused():
    structure, leaves = split(Labelled(np.zeros(1), len), _refuse)
    assert not is_described(structure.plain)
    _same(rebuild(structure.plain, leaves, structure.treedef), Labelled(leaves[0], len))
    with pytest.raises(ValueError, match="plain form"):
        rebuild(structure.plain, leaves)
    with pytest.raises(ValueError, match="PyTreeDef"):
        rebuild(structure.plain, leaves, jax.tree.structure([1, 2, 3]))


@pytest.mark.parametrize(
    "named",
    [["", __name__, "Absent"], ["", "no.such.module", "Point"], ["", "os", "path"]],
    ids=repr,
)
def test_a_class_that_is_not_here_is_named(named):
    with pytest.raises(TypeError, match=named[2]):
        rebuild(["*", ["#", named, None, 0], 0], [np.zeros(1)])


def test_only_classes_that_jax_knows_are_made():
    with pytest.raises(TypeError, match="Popen"):
        rebuild(["*", ["#", ["", "subprocess", "Popen"], None, 0], 0], [np.zeros(1)])
