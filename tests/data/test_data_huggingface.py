"""Datasets of HuggingFace, whose columns are Python lists."""

from __future__ import annotations

import numpy as np
import pytest

from zstrat.data import Worker, allotted, as_dataset, is_huggingface

datasets = pytest.importorskip("datasets", reason="HuggingFace datasets are absent")

COLUMNS = {
    "x": [[1, 2], [3, 4], [5, 6], [7, 8]],
    "y": [0, 1, 2, 3],
    "text": ["a", "bc", "", "d"],
}


@pytest.fixture(params=["in memory", "iterable", "numpy"])
def theirs(request):
    made = datasets.Dataset.from_dict(COLUMNS)
    if request.param == "iterable":
        return made.to_iterable_dataset()
    return made.with_format("numpy") if request.param == "numpy" else made


def test_a_list_is_an_array_and_no_structure(theirs):
    assert is_huggingface(theirs)
    for batches, size in ((theirs, 1), (theirs.batch(2), 2)):
        for first in list(as_dataset(batches).recipe.elements())[:1]:
            leading = () if size == 1 else (size,)
            assert isinstance(first["x"], np.ndarray)
            assert first["x"].shape == (*leading, 2)
            assert np.shape(first["y"]) == leading
            assert np.shape(first["text"]) == leading


def test_workers_share_it(theirs):
    parts = [allotted(theirs.batch(4), Worker(2, index)) for index in range(2)]
    for part in parts:
        assert [b["y"].tolist() for b in part.elements()] == [[0, 1, 2, 3]]


def test_lists_of_different_lengths_say_what_to_do():
    made = datasets.Dataset.from_dict({"x": [[1], [1, 2]]})
    with pytest.raises(ValueError, match=r"\['x'\] cannot be converted") as caught:
        list(as_dataset(made.batch(2)).recipe.elements())
    assert "padded_batch" in caught.value.__notes__[0]
    rows = [row["x"].tolist() for row in as_dataset(made).recipe.elements()]
    assert rows == [[1], [1, 2]]
