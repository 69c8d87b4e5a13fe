"""Where a checkpoint or an export may be: paths that are something else are named."""

from __future__ import annotations

import os
from pathlib import Path

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
    named = f"{file} is a file, expected a folder"
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
        with pytest.raises(AlreadyExistsError):
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


@pytest.mark.parametrize(
    "address", ["gs://bucket/x", Path("s3://a/b/"), "x-1+y.z://c", "file://host/y"]
)
def test_an_address_is_no_path(checkpoint, tmp_path, monkeypatch, address):
    """It became folders that are called "gs:", here."""
    monkeypatch.chdir(tmp_path)
    tries = [
        lambda: checkpoint.save(address),
        lambda: checkpoint.write(address),
        lambda: checkpoint.restore(address),
        lambda: latest_checkpoint(address),
        lambda: CheckpointManager(checkpoint, address, max_to_keep=2),
        lambda: export_safetensors(checkpoint, address),
        lambda: export_safetensors(address, tmp_path / "values"),
    ]
    for attempt in tries:
        with pytest.raises(ValueError, match="expected a path, got an address"):
            attempt()
    assert os.listdir(tmp_path) == []


def test_an_address_of_a_file_is_its_path(checkpoint, tmp_path):
    path = checkpoint.save(f"file://{tmp_path}/ckpt")
    assert path == str(tmp_path / "ckpt-1") == latest_checkpoint(f"file://{tmp_path}")
    file = tmp_path / "values"
    assert export_safetensors(f"file://{path}", f"file://{file}") == str(file)
    checkpoint.restore(f"file://{path}").assert_consumed()
    checkpoint.restore(Path(f"file://{path}")).assert_consumed()


@pytest.mark.parametrize(
    ("prefix", "saved"),
    [("", "-1"), ("x/", "x/-1"), (".", ".-1"), ("x/..", "x/..-1"), ("x", "x-1")],
)
def test_what_is_behind_the_last_slash_begins_the_name(
    checkpoint, tmp_path, monkeypatch, prefix, saved
):
    """As in TensorFlow, in the folder that was named and not in the one above."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = checkpoint.save(prefix)
    assert path == f"{folder}/{saved}" == latest_checkpoint(os.path.dirname(path))
    assert os.listdir(tmp_path) == ["here"]


def test_an_empty_text_is_no_folder(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="file_prefix"):
        checkpoint.write("")
    assert os.listdir(tmp_path) == []


def test_a_null_is_in_no_path(checkpoint):
    for attempt in (checkpoint.save, checkpoint.restore, latest_checkpoint):
        with pytest.raises(ValueError, match=r"'a.x00b': expected a path"):
            attempt("a\0b")
