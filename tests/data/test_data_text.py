"""Text, bytes, dates in batches: nothing becomes one because there is one beside it."""

import numpy as np
import pytest

from zstrat.data import Dataset


def of(*elements):
    return Dataset.from_generator(lambda: iter(elements))


@pytest.mark.parametrize(
    ("elements", "told"),
    [
        ((1, "a", 2.5), r"\b1\b"),
        (("a", "b", True), r"\b2\b"),
        ((np.ones(2), np.array(["a", "b"])), r"\b1\b"),
        ((np.array([b"x"]), np.array([1])), r"\b1\b"),
        (("a", b"a\0"), r"Cannot batch.*bytes"),
        ((b"a\0", 1.0), r"Cannot batch.*bytes"),
        ((1.0, b"a\0"), r"Cannot batch.*bytes"),
        ((b"a", np.zeros(2)), r"Cannot batch.*bytes"),
        ((np.array([b"x"]), np.array(["y"])), r"\b1\b"),
        ((np.array([b"\xff"]), np.array(["y"])), r"\b1\b"),
        ((1, None), r"\b1\b"),
        ((1, {"a": 1}), r"\b1\b.*\['a'\]"),
        ((np.array([b"x"], object), np.array([3])), r"\b1\b"),
        ((np.datetime64("2020-01-01"), 1), r"\b1\b"),
        ((np.datetime64("2020-01-01"), np.timedelta64(3, "D")), r"\b1\b"),
        (({"x": 1, "y": (0, "a")}, {"x": 2, "y": (0, 7)}), r"\['y'\]\[1\]"),
    ],
)
def test_what_is_no_text_is_no_batch_with_text(elements, told):
    with pytest.raises(ValueError, match=told):
        list(of(*elements).batch(3))


def test_text_of_any_length_is_a_batch_as_are_numbers_of_any_dtype():
    (batch,) = of(1, 2.5, True).batch(3)
    assert batch.tolist() == [1, 2.5, 1]
    (batch,) = of("a", "bcd").batch(2)
    assert batch.tolist() == ["a", "bcd"]
    (batch,) = of(np.array(["a", "b"]), np.array(["cd", ""])).batch(2)
    assert batch.tolist() == [["a", "b"], ["cd", ""]]


def test_text_that_is_missing_is_a_batch_with_text():
    rows = np.array(["a", "b"]), np.array(["c", None], object)
    (batch,) = of(*rows).batch(2)
    assert batch.tolist() == [["a", "b"], ["c", None]]
    rows = np.array([b"a"]), np.array([None], object), np.array([b"c"], object)
    (batch,) = of(*rows).batch(3)
    assert batch.tolist() == [[b"a"], [None], [b"c"]]
