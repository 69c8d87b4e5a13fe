"""Objects are no data: they are refused where they enter, with their place and type."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import pathlib
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset, as_dataset, dense

SLICES = zs.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, 5]), (8, 3))


class Thing:
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: object
    right: object


Named = collections.namedtuple("Named", "left right")

OBJECTS = [
    (SLICES, "IndexedSlices"),
    (Thing(), "Thing"),
    (decimal.Decimal(1), "Decimal"),
    (pathlib.Path("x"), "Path"),
    ({1, 2}, "set"),
    ((n for n in range(3)), "generator"),
    (np.array([Thing(), None], object), r"an array of objects \(NoneType, Thing\)"),
    (np.array([1, 2.5], object), r"an array of objects \(float, int\)"),
]
IDS = [told for _, told in OBJECTS]


def generated(element):
    return Dataset.from_generator(lambda: iter([element]))


def mapped(element):
    return Dataset.range(1).map(lambda number: element)


def read(element, path):
    return Dataset.from_files([path], lambda name: iter([element]))


@pytest.mark.parametrize("make", [generated, mapped, read])
@pytest.mark.parametrize(("given", "told"), OBJECTS, ids=IDS)
def test_they_are_no_elements(make, given, told, tmp_path):
    path = tmp_path / "file"
    path.touch()
    element = {"x": (np.ones(2), given)}
    dataset = read(element, path) if make is read else make(element)
    with pytest.raises(TypeError, match=rf"component \['x'\]\[1\] is .*{told}"):
        next(iter(dataset))


@pytest.mark.parametrize(("given", "told"), OBJECTS, ids=IDS)
def test_they_are_no_rows(given, told):
    for make in (Dataset.from_tensor_slices, as_dataset):
        with pytest.raises(TypeError, match=rf"component \['y'\] is .*{told}"):
            make({"x": np.ones(2), "y": given})


@pytest.mark.parametrize(("given", "told"), OBJECTS, ids=IDS)
def test_they_are_no_elements_of_others(given, told):
    if isinstance(given, zs.IndexedSlices):
        given = zs.IndexedSlices(Thing(), np.zeros(1, np.int32))
        told = "Thing"
    for source in ([{"x": [given]}], iter([{"x": [given]}])):
        with pytest.raises(TypeError, match=rf"component \['x'\]\[0\].*{told}"):
            list(as_dataset(source))


def test_within_classes_their_place_is_told():
    for element, place in [
        (Pair(1, Thing()), r"\.right"),
        (Named(Thing(), 1), r"\.left"),
        ((Named(1, Pair(2, {"x": Thing()})),), r"\[0\]\.right\.right\['x'\]"),
    ]:
        with pytest.raises(TypeError, match=f"component {place} is of type Thing"):
            list(as_dataset([element]))


def test_without_jax_named_tuples_alone_are_opened(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax")
    (element,) = as_dataset([Named(np.ones(2), {"x": "a"})])
    assert element.right == {"x": "a"}
    for element, place in [(Named(1, [Thing()]), r"\[1\]\[0\]"), ([Thing()], r"\[0\]")]:
        with pytest.raises(TypeError, match=f"component {place} is of type Thing"):
            list(as_dataset([element]))


def test_the_words_say_what_to_do():
    with pytest.raises(TypeError, match=r"to_dense\(\)"):
        next(iter(generated(SLICES)))
    with pytest.raises(TypeError, match="fields as arrays, in a dict or a tuple"):
        next(iter(generated(Thing())))
    ragged = np.array([np.ones(2), np.ones(3)], object)
    with pytest.raises(TypeError, match="pad rows of different lengths"):
        next(iter(generated(ragged)))
    with pytest.raises(TypeError, match=r"a list of objects \(dict\).*a list is one"):
        Dataset.from_tensor_slices([{"x": 1}, {"x": 2}])


def test_a_number_of_too_many_bits():
    with pytest.raises(TypeError, match="an int of more than 64 bits"):
        next(iter(generated(2**64)))


def test_keys_are_told_by_their_place():
    with pytest.raises(TypeError, match=r"\['key'\].*key_data"):
        next(iter(generated({"key": jax.random.key(0)})))


TEXTS = [
    "a",
    b"a\0",
    np.array(["a", "bb"]),
    np.array([b"a", b"bb"]),
    np.array(["a", "bb"], object),
    np.array([b"a", b"bb\0"], object),
    np.array(["a", None], object),
]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_text_is_data(text):
    for dataset in (generated((text, None)), mapped((text, None))):
        ((found, absent),) = dataset
        assert absent is None
        assert np.asarray(found).tolist() == np.asarray(text).tolist()
    (element,) = as_dataset([{"x": text, "y": None}])
    assert element["x"] is text
    assert element["y"] is None
    if isinstance(text, np.ndarray):
        assert list(as_dataset((text,))) == [(each,) for each in text]


@pytest.mark.parametrize(
    "leaf",
    [
        True,
        3,
        2.5,
        1j,
        np.int8(3),
        np.ones(2, jax.numpy.bfloat16),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "i4"), ("b", "f4")]),
        jax.numpy.ones(2),
        bytearray(b"ab"),
        memoryview(b"ab"),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_numbers_are_data(leaf):
    (found,) = generated(leaf)
    np.testing.assert_array_equal(found, np.asarray(leaf))
    for element in ([leaf], {"x": leaf}, Pair(leaf, None), Named(leaf, 1)):
        (passed,) = as_dataset([element])
        assert passed is element


def test_keys_and_slices_pass_from_others():
    for element in (jax.random.key(0), SLICES, Pair(SLICES, 1)):
        (passed,) = as_dataset([element])
        assert passed is element


def bcoo():
    """Made by its test, as all processes of tests collect it: jax compiles for it."""
    from jax.experimental.sparse import BCOO

    return BCOO.fromdense(np.eye(2, dtype=np.float32))


SPARSE = [
    SLICES,
    collections.namedtuple("SparseTensorValue", "indices values dense_shape")(
        np.zeros((2, 2), np.int64), np.ones(2), np.array([3, 3])
    ),
    SimpleNamespace(values=np.ones(3), row_splits=np.array([0, 1, 3])),
    bcoo,
]


@pytest.mark.parametrize("one", SPARSE, ids=lambda each: type(each).__name__)
def test_sparse_components_are_found(one):
    one = one() if one is bcoo else one
    kind = type(one).__name__
    for element, place in [
        (one, "of the dataset"),
        ({"x": (1, one)}, r"\['x'\]\[1\]"),
        (Pair(1, [one]), r"\.right\[0\]"),
    ]:
        found = dense(iter([np.ones(2), element]), "pad it")
        next(found)
        with pytest.raises(ValueError, match=rf"{place} is .*{kind}\): pad it"):
            next(found)


def test_dense_ones_pass():
    Ids = collections.namedtuple("Ids", "values indices")
    elements = [
        (1, "a", None, Ids(np.ones(2), np.zeros(2))),
        collections.namedtuple("Rows", "values row_splits")(1.0, 2.0),
        Pair(jax.numpy.ones(1), 2),
    ]
    assert list(dense(iter(elements), "")) == elements


def test_dense_ends_its_source():
    ended = []

    def source():
        try:
            yield 1
            yield 2
        finally:
            ended.append(True)

    found = dense(source(), "")
    assert next(found) == 1
    found.close()
    assert ended == [True]


def test_masked_arrays_do_not_lose_their_masks():
    """jax takes none, either."""
    missing = np.ma.array([1.0, 2.0], mask=[False, True])
    mapped = Dataset.range(2).map(lambda _: {"x": missing}).batch(2)
    for read in (
        lambda: Dataset.from_tensor_slices({"x": missing}),
        lambda: Dataset.from_tensors({"x": missing}),
        lambda: next(iter(mapped)),
    ):
        with pytest.raises(ValueError, match=r"\['x'\]"):
            read()
