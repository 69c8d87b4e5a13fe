"""Ids of texts: published values of XXH3, shapes, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from zstrat.ids import hash_ids


def test_ids_of_texts_are_xxh3():
    wanted = np.array([0x2D06800538D394C2, 0x78AF5F94892F3950], np.uint64)
    for texts in (["", "abc"], [b"", b"abc"], np.array(["", "abc"], object)):
        ids = hash_ids(texts)
        assert ids.dtype == np.int64
        np.testing.assert_array_equal(ids.view(np.uint64), wanted)


def test_ids_have_the_shape_of_what_they_are_of():
    texts = np.array([["ü", "b", "c"], ["d", "e", "ü"]])
    ids = hash_ids(texts)
    assert ids.shape == (2, 3)
    assert ids[0, 0] == ids[1, 2] == hash_ids("ü") == hash_ids("ü".encode())
    assert len(np.unique(ids)) == 5
    assert hash_ids([]).shape == (0,)


def test_integers_their_texts_and_other_seeds_have_other_ids():
    numbers = np.array([-1, 0, 2**63 - 1])
    ids = [
        hash_ids(numbers),
        hash_ids([str(n) for n in numbers]),
        hash_ids(numbers, seed=1),
    ]
    assert len(np.unique(np.stack(ids))) == 9
    np.testing.assert_array_equal(hash_ids(numbers.astype(object)), ids[0])
    np.testing.assert_array_equal(hash_ids(np.int8([-1])), ids[0][:1])


def test_lists_have_the_ids_of_their_elements():
    for values in ([b"a\0", b"a"], ["a", "a\0"], ["x", 1], [b"x", "y"]):
        alone = [hash_ids(np.array(value, object)) for value in values]
        np.testing.assert_array_equal(hash_ids(values), alone)
        assert alone[0] != alone[1]


@pytest.mark.parametrize(
    "wrong", [["x", 2.5], 1.5, [True], [None], np.array([2**64], object)]
)
def test_what_is_neither_text_nor_integer_is_refused(wrong):
    with pytest.raises(TypeError, match="hash_ids"):
        hash_ids(wrong)
