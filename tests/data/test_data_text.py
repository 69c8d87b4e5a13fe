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
        (("a", b"a"), r"\b1\b"),
        ((np.array([b"x"]), np.array(["y"])), r"\b1\b"),
        ((np.array([b"\xff"]), np.array(["y"])), r"\b1\b"),
        ((1, None), r"\b1\b"),
        ((1, {"a": 1}), r"\b1\b.*\['a'\]"),
        ((np.array([b"x"], object), np.array([3])), r"\b1\b"),
        ((np.datetime64("2020-01-01"), 1), r"\b1\b"),
        (
            (np.datetime64("2020-01-01"), np.timedelta64(3, "D")),
            r"\b1\b",
        ),
    ],
)
def test_what_is_no_text_is_no_batch_with_text(elements, told):
    with pytest.raises(ValueError, match=told):
        list(of(*elements).batch(3))


def test_the_component_is_named():
    mixed = of({"x": 1, "y": (0, "a")}, {"x": 2, "y": (0, 7)}).batch(2)
    with pytest.raises(ValueError, match=r"\['y'\]\[1\]"):
        list(mixed)


def test_text_of_any_length_is_a_batch():
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


def test_numbers_of_several_dtypes_still_find_one():
    (batch,) = of(1, 2.5, True).batch(3)
    assert batch.tolist() == [1, 2.5, 1]


@pytest.fixture
def files(tmp_path):
    """Writes an array to a file of its own each, and names them."""

    def write(*arrays):
        paths = [tmp_path / f"{number}.npy" for number in range(len(arrays))]
        for path, array in zip(paths, arrays, strict=True):
            np.save(path, array)
        return paths

    return write


def test_files_of_text_and_of_numbers_are_no_batch(files):
    dataset = Dataset.from_npy(files(np.arange(2), np.array(["x", "yz"])))
    assert [batch.tolist() for batch in dataset.batch(2)] == [[0, 1], ["x", "yz"]]
    with pytest.raises(ValueError, match=r"1\.npy, which has rows \[\] of text, with"):
        list(dataset.batch(3))


def test_files_of_text_and_of_bytes_are_no_batch(files):
    dataset = Dataset.from_npy(files(np.array(["x"]), np.array([b"y"])))
    with pytest.raises(ValueError, match=r"rows \[\] of text of bytes, with those of"):
        list(dataset.batch(2))


def test_files_of_several_dtypes_still_find_one(files):
    numbers = Dataset.from_npy(files(np.arange(2), np.array([2.5, 3]))).batch(3)
    assert [batch.tolist() for batch in numbers] == [[0, 1, 2.5], [3]]
    text = Dataset.from_npy(files(np.array(["a"]), np.array(["bcd"]))).batch(2)
    assert [batch.tolist() for batch in text] == [["a", "bcd"]]


def test_archives_of_text_and_of_numbers_are_no_batch(tmp_path):
    np.savez(tmp_path / "0.npz", x=np.zeros((1, 2)), y=np.array(["a"]))
    np.savez(tmp_path / "1.npz", x=np.zeros((1, 2)), y=np.array([1]))
    dataset = Dataset.from_npz([tmp_path / "0.npz", tmp_path / "1.npz"]).batch(2)
    with pytest.raises(ValueError, match=r"x \[2\], y \[\], with .* y \[\] of text"):
        list(dataset)
