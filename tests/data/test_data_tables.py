"""A batch that reaches over files of arrays: of one kind, and of several."""

from __future__ import annotations

import re

import numpy as np
import pytest

from zstrat.data import Dataset

FULL = {"x": np.arange(3), "y": np.arange(3.0)}
UNLIKE = {
    "a column less": {"x": np.arange(3)},
    "a column more": {**FULL, "z": np.arange(3)},
    "another column": {"x": np.arange(3), "w": np.arange(3.0)},
    "another shape": {"x": np.zeros((3, 2), int), "y": np.arange(3.0)},
}


@pytest.fixture
def files(tmp_path):
    """Writes what each file is to hold, a dict as an archive, and names them."""

    def write(*contents):
        paths = []
        for name, content in zip("ab", contents, strict=True):
            archive = isinstance(content, dict)
            paths.append(tmp_path / f"{name}.{'npz' if archive else 'npy'}")
            np.savez(paths[-1], **content) if archive else np.save(paths[-1], content)
        return paths

    return write


def read(paths):
    archives = paths[0].suffix == ".npz"
    return Dataset.from_npz(paths) if archives else Dataset.from_npy(paths)


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("step", [1, -1])
def test_both_files_are_named(files, unlike, step):
    first, second = order = files(FULL, UNLIKE[unlike])[::step]
    words = f"{re.escape(str(second))}.*{re.escape(str(first))}"
    with pytest.raises(ValueError, match=words):
        list(read(order).batch(4))
    with pytest.raises(ValueError, match="`batch`"):
        list(read(order).shuffle(6, seed=1).batch(6))


@pytest.mark.parametrize("unlike", UNLIKE)
def test_files_that_no_batch_brings_together_may_differ(files, unlike):
    dataset = read(files(FULL, UNLIKE[unlike]))
    assert [len(batch["x"]) for batch in dataset.batch(3)] == [3, 3]
    assert len(list(dataset)) == 6


NUMBERS, TEXT, BYTES = np.arange(2), np.array(["x", "yz"]), np.array([b"y", b"z"])
X = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"x": X}, {"x": X, "y": NUMBERS}, r"b\.npz.* x \[3\], y \[\].*a\.npz.* x \[3"),
        (X, np.zeros((2, 4)), r"b\.npy.*\[4\].*a\.npy.*\[3\]"),
        (NUMBERS, TEXT, r"b\.npy, which has rows \[\] of text, with"),
        (TEXT, BYTES, r"rows \[\] of text of bytes, with those of"),
        ({"x": X, "y": TEXT}, {"x": X, "y": NUMBERS}, r"\], with .* y \[\] of text"),
    ],
)
def test_what_their_rows_are_is_told(files, first, second, words):
    dataset = read(files(first, second))
    assert len(list(dataset.batch(2))) == 2
    with pytest.raises(ValueError, match=words):
        list(dataset.batch(3))


def test_columns_in_another_order_are_the_same_columns(files):
    other = {"y": np.arange(2, 4) * 10, "x": np.arange(2, 4)}
    (batch,) = read(files({"x": NUMBERS, "y": NUMBERS * 10}, other)).batch(4)
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert batch["y"].tolist() == [0, 10, 20, 30]


def test_files_of_several_dtypes_still_find_one(files):
    numbers = read(files(NUMBERS, np.array([2.5, 3]))).batch(3)
    assert [batch.tolist() for batch in numbers] == [[0, 1, 2.5], [3]]
    text = read(files(np.array(["a"]), np.array(["bcd"]))).batch(2)
    assert [batch.tolist() for batch in text] == [["a", "bcd"]]
