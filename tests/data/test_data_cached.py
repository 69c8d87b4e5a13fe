"""Caches in memory and in files: what is kept, what is not, and in which order."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import numpy as np
import pytest

from zstrat.data import Dataset


def plain(dataset):
    return [np.asarray(element).tolist() for element in dataset]


class Source:
    """Three numbers, and how often somebody asked for them."""

    def __init__(self):
        self.passes = 0

    def __call__(self):
        self.passes += 1
        yield from (1, 2, 3)


@pytest.mark.shows("tf.data.Dataset.cache")
def test_only_a_whole_pass_is_kept():
    source = Source()
    cached = Dataset.from_generator(source).cache()
    assert plain(cached.take(2)) == plain(cached.take(2)) == [1, 2]
    assert source.passes == 2
    assert plain(cached) == plain(cached) == plain(cached.repeat(1)) == [1, 2, 3]
    assert source.passes == 3
    assert plain(cached.take(2)) == [1, 2]
    assert source.passes == 3


def test_of_two_passes_at_once_the_first_to_end_is_kept():
    source = Source()
    cached = Dataset.from_generator(source).cache()
    one, other = iter(cached), iter(cached)
    assert [next(one), next(other)] == [1, 1]
    assert list(one) == list(other) == [2, 3]
    assert plain(cached) == [1, 2, 3]
    assert source.passes == 2


def test_a_shuffle_before_it_mixes_once_and_behind_it_always():
    before = Dataset.range(20).shuffle(20, seed=1).cache()
    assert plain(before) == plain(before)
    twice = plain(before.repeat(2))
    assert twice[:20] == twice[20:] == plain(before)
    behind = Dataset.range(20).cache().shuffle(20, seed=1)
    assert plain(behind) != plain(behind)
    same = Dataset.range(20).cache().shuffle(20, 1, reshuffle_each_iteration=False)
    assert plain(same) == plain(same)


def test_a_pass_that_was_given_up_changes_no_order():
    """Workers read ahead unlike far: one may have filled its cache, another not."""
    whole = Dataset.range(20).shuffle(20, seed=1).cache()
    first = plain(whole)
    given_up = Dataset.range(20).shuffle(20, seed=1).cache()
    next(iter(given_up))
    assert plain(given_up) == plain(given_up) == first == plain(whole)


def test_nobody_can_write_to_what_is_kept():
    rows = np.zeros((2, 3))
    cached = Dataset.from_tensor_slices(rows).cache()
    for element in cached:
        with pytest.raises(ValueError, match="read-only"):
            element += 1
    rows[:] = 7  # of the user, who may
    assert plain(cached) == [[0, 0, 0]] * 2


def test_a_copy_keeps_nothing_yet():
    cached = Dataset.range(3).map(np.negative).cache()
    assert plain(cached) == plain(pickle.loads(pickle.dumps(cached))) == [0, -1, -2]


# files


def test_a_file_is_found_again(tmp_path):
    path = tmp_path / "kept"
    source = Source()
    elements = Dataset.from_generator(source).cache(path)
    assert plain(elements.take(2)) == [1, 2]
    assert list(tmp_path.iterdir()) == []
    assert plain(elements) == plain(elements) == [1, 2, 3]
    assert plain(Dataset.from_generator(source).cache(str(path))) == [1, 2, 3]
    assert source.passes == 2
    assert list(tmp_path.iterdir()) == [path]


KINDS = {
    "number": np.float32(1.5),
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
    "empty": np.zeros((0, 3)),
    "flags": (np.array([True, False]), np.bool_(True)),
    "record": b"a\0",
    "records": np.array([b"a\0", b"", None], object),
    "texts": np.array(["ä", "b"], object),
    "text": np.array("äöü"),
    "date": np.datetime64("2026-01-01", "ns"),
    "nothing": None,
    "nested": {"a": ({"b": np.int8(3)},)},
}


def test_all_kinds_of_data_come_back_as_they_were(tmp_path):
    dataset = Dataset.from_generator(lambda: [KINDS, KINDS]).cache(tmp_path / "kept")
    first, second = list(dataset), list(dataset)
    np.testing.assert_equal(second, first)
    for leaf, kept in zip(first[0].values(), second[1].values(), strict=True):
        assert type(leaf) is type(kept)
        if isinstance(leaf, np.ndarray):
            assert (leaf.dtype, leaf.shape) == (kept.dtype, kept.shape)


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("element", "words"),
    [
        (Pair(1, 2), "named tuple"),
        ({1: 2}, "keys that are not text"),
        (np.zeros(2, [("x", int)]), "dtype"),
    ],
)
def test_what_has_no_place_in_a_file(tmp_path, element, words):
    dataset = Dataset.from_generator(lambda: [element]).cache(tmp_path / "kept")
    with pytest.raises(TypeError, match=words):
        list(dataset)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "3",
        "[1]",
        '{"record": "x"}',
        '{"record": 1e99}',
        '{"record": 9e18}',
        '{"array": 3}',
        '{"array": ["<f5", [1]]}',
        '{"array": ["<f4", ["x"]]}',
        '{"texts": [[2], 7, []]}',
        '{"dict": []}',
    ],
)
def test_a_line_that_describes_no_element_names_the_file(tmp_path, line):
    path = tmp_path / "kept"
    dataset = Dataset.range(2).cache(path)
    list(dataset)
    head, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(b"\n".join([head, line.encode(), rest]))
    with pytest.raises(ValueError, match="kept is damaged or cut off"):
        list(dataset)


def test_a_file_that_is_cut_off_or_of_somebody_else(tmp_path):
    path = tmp_path / "kept"
    dataset = Dataset.from_tensor_slices(np.arange(40).reshape(4, 10)).cache(path)
    assert len(list(dataset)) == 4
    content = path.read_bytes()
    for stop in (len(content) - 4, len(content) // 2):
        path.write_bytes(content[:stop])
        with pytest.raises(ValueError, match="kept is damaged or cut off"):
            list(dataset)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="`cache`"):
        list(dataset)
