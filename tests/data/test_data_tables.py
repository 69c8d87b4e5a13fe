"""A batch that reaches over files of arrays that are not alike."""

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


@pytest.fixture(params=UNLIKE)
def paths(tmp_path, request):
    found = [tmp_path / "full.npz", tmp_path / "unlike.npz"]
    for path, arrays in zip(found, (FULL, UNLIKE[request.param]), strict=True):
        np.savez(path, **arrays)
    return found


@pytest.mark.parametrize("step", [1, -1])
def test_both_files_are_named(paths, step):
    first, second = order = paths[::step]
    words = f"{re.escape(str(second))}.*{re.escape(str(first))}"
    with pytest.raises(ValueError, match=words):
        list(Dataset.from_npz(order).batch(4))
    with pytest.raises(ValueError, match="`batch`"):
        list(Dataset.from_npz(order).shuffle(6, seed=1).batch(6))


def test_files_that_no_batch_brings_together_may_differ(paths):
    dataset = Dataset.from_npz(paths)
    assert [len(batch["x"]) for batch in dataset.batch(3)] == [3, 3]
    assert len(list(dataset)) == 6


def test_the_columns_are_told(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)))
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 2)), y=np.zeros(3))
    dataset = Dataset.from_npz([tmp_path / "a.npz", tmp_path / "b.npz"]).batch(4)
    with pytest.raises(ValueError, match=r"b\.npz.* x \[2\], y \[\].*a\.npz.* x \[2\]"):
        list(dataset)


def test_columns_in_another_order_are_the_same_columns(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(2), y=np.arange(2) * 10)
    np.savez(tmp_path / "b.npz", y=np.arange(2, 4) * 10, x=np.arange(2, 4))
    dataset = Dataset.from_npz([tmp_path / "a.npz", tmp_path / "b.npz"])
    (batch,) = dataset.batch(4)
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert batch["y"].tolist() == [0, 10, 20, 30]


def test_arrays_of_unlike_rows(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    np.save(tmp_path / "b.npy", np.zeros((2, 4)))
    dataset = Dataset.from_npy([tmp_path / "a.npy", tmp_path / "b.npy"]).batch(4)
    with pytest.raises(ValueError, match=r"b\.npy.*\[4\].*a\.npy.*\[3\]"):
        list(dataset)
