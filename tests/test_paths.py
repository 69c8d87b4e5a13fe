"""A path that cannot be used is named, with what is in its way and what to do."""

from __future__ import annotations

import re

import pytest

import zstrat as zs

IN_THE_WAY = "is a file, expected a folder: choose another path, or move that file"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").touch()
    return tmp_path / "file"


def tensorboard(path):
    pytest.importorskip("tensorboardX")
    return zs.TensorBoardEvents(path)


@pytest.mark.parametrize(
    "make", [lambda path: zs.LocalCluster(1, 0, directory=path), tensorboard]
)
@pytest.mark.parametrize("below", ["", "below/it"])
def test_a_file_in_the_place_of_a_folder(file, make, below):
    with pytest.raises(OSError, match=f"{re.escape(str(file))} {IN_THE_WAY}") as raised:
        make(file / below)
    assert str(file / below) in str(raised.value)
    assert isinstance(raised.value, FileExistsError | NotADirectoryError)


@pytest.mark.parametrize("kind", ["a device", "a broken link"])
def test_what_is_no_plain_file_in_the_place_of_a_folder(kind, tmp_path):
    """The folder above it was said to be the file."""
    link = tmp_path / "link"
    link.symlink_to("/dev/null" if kind == "a device" else tmp_path / "nowhere")
    with pytest.raises(OSError, match=f"{re.escape(str(link))} {IN_THE_WAY}"):
        zs.LocalCluster(1, 0, directory=link)


def test_a_file_of_lines_in_a_place_for_none(file, tmp_path):
    with pytest.raises(IsADirectoryError, match="JsonLines"):
        zs.JsonLines(tmp_path)
    with pytest.raises(
        NotADirectoryError, match=f"{re.escape(str(file))} {IN_THE_WAY}"
    ):
        zs.JsonLines(file / "lines")
    new = tmp_path / "new"
    with pytest.raises(FileNotFoundError, match=f"no such folder {new}: create it, or"):
        zs.JsonLines(new / "lines")
    with pytest.raises(OSError, match="JsonLines"):
        zs.JsonLines("/proc/lines")
    assert list(tmp_path.iterdir()) == [file]
