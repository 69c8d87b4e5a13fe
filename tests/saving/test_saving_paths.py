"""Where a checkpoint or an export may be: paths that are something else are named."""

from __future__ import annotations

import os

import numpy as np
import pytest

from zstrat.errors import AlreadyExistsError, NotFoundError
from zstrat.saving import (
    Checkpoint,
    CheckpointManager,
    export_safetensors,
    latest_checkpoint,
)
from zstrat.variables import Variable


@pytest.fixture
def checkpoint():
    return Checkpoint(w=Variable(np.ones(3, "f4")))


@pytest.mark.parametrize("below", ["", "run", "run/1"])
def test_a_file_in_the_place_of_a_folder_is_named(checkpoint, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    folder = file / below
    named = f"{file} is a file, and has to be a folder"
    manager = CheckpointManager(checkpoint, folder, max_to_keep=2)
    tries = [
        lambda: checkpoint.save(folder / "ckpt"),
        lambda: checkpoint.write(folder),
        lambda: latest_checkpoint(folder),
        lambda: manager.latest_checkpoint,
        manager.restore_or_initialize,
        manager.save,
        lambda: export_safetensors(checkpoint, folder / "values"),
    ]
    for attempt in tries:
        with pytest.raises(NotFoundError, match=named):
            attempt()
    assert int(checkpoint.save_counter.numpy()) == 0
    assert file.read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


def test_an_export_does_not_replace_a_folder(checkpoint, tmp_path):
    for path in (tmp_path, f"{tmp_path}/"):
        with pytest.raises(AlreadyExistsError, match="it is a folder: give the path"):
            export_safetensors(checkpoint, path)
    assert os.listdir(tmp_path) == []


def test_paths_may_be_bytes(checkpoint, tmp_path):
    path = checkpoint.save(os.fsencode(tmp_path / "ckpt"))
    assert path == str(tmp_path / "ckpt-1")
    assert latest_checkpoint(os.fsencode(tmp_path)) == path
    checkpoint.w.assign(np.zeros(3, "f4"))
    checkpoint.restore(os.fsencode(path)).assert_consumed()
    assert checkpoint.w.numpy().tolist() == [1.0] * 3
    file = os.fsencode(tmp_path / "values")
    assert export_safetensors(checkpoint, file) == str(tmp_path / "values")
