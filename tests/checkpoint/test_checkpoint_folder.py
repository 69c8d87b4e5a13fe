"""Folders of checkpoints: manifests, one writer at a time, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.checkpoint import (
    MANIFEST,
    CheckpointFolder,
    FolderLock,
    Manifest,
    StoredPiece,
    StoredTensor,
    TensorInfo,
    TensorWriter,
    digest_of,
    remove,
    sweep,
    verify,
)
from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    DataLossError,
    NotFoundError,
    ResourceExhaustedError,
)
from zstrat.testing import full_disk


def fill(folder: CheckpointFolder, data: bytes) -> Manifest:
    file = folder.part("local-0")
    with TensorWriter(
        folder.path_of(file), [TensorInfo("a", "uint8", (len(data),))]
    ) as writer:
        writer.write(data)
        (digest,) = writer.finish()
    piece = StoredPiece(file, "a", 0, len(data), digest)
    tensor = StoredTensor("uint8", (len(data),), (piece,))
    return Manifest({"a": tensor}, {file: writer.size}, {}, {"n": 1})


def save(path, data: bytes) -> Manifest:
    with CheckpointFolder(str(path)) as folder:
        manifest = fill(folder, data)
        folder.commit(manifest)
    return manifest


@st.composite
def stored(draw):
    cuts = sorted(draw(st.sets(st.integers(1, 50), min_size=1, max_size=5)))
    starts = [0, *cuts[:-1]]
    pieces = tuple(
        StoredPiece("f", f"n{n}", start, stop, "d" * 32)
        for n, (start, stop) in enumerate(zip(starts, cuts, strict=True))
    )
    return StoredTensor("float32", (cuts[-1], 3), pieces)


@given(stored(), st.data())
def test_rows_are_found_in_their_pieces(tensor, data):
    rows = tensor.shape[0]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    got = [
        piece.start + row
        for piece, first, last in tensor.within(start, stop)
        for row in range(first, last)
    ]
    assert got == list(range(start, stop))
    assert tensor.is_whole


@given(stored())
def test_a_manifest_survives(tensor):
    manifest = Manifest({"t": tensor}, {"f": 12}, {"o": [1]}, {"m": "ü"})
    assert Manifest.decode(manifest.encode(), "x") == manifest


def test_a_changed_manifest_is_refused():
    data = Manifest({}, {"f": 12}).encode()
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 4
        with pytest.raises(DataLossError):
            Manifest.decode(bytes(bad), "x")
        with pytest.raises(DataLossError):
            Manifest.decode(data[:at], "x")


def signed(body: dict) -> bytes:
    text = json.dumps(body).encode()
    return b'{"digest":"%s","manifest":%s}\n' % (digest_of([text]).encode(), text)


GOOD = {
    "format": "zstrat.checkpoint",
    "version": 1,
    "metadata": {},
    "objects": {},
    "files": {"f": 1},
    "tensors": {},
}


def one(**changes):
    tensor = {
        "dtype": "int8",
        "shape": [2],
        "by_rows": True,
        "pieces": [["f", "a", 0, 2, "d"]],
    }
    return {**GOOD, "tensors": {"a": {**tensor, **changes}}}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "not the manifest"),
        ({**GOOD, "version": 2}, r"\b2\b"),
        ({**GOOD, "files": {"../../etc/passwd": 1}}, "names the file"),
        ({**GOOD, "files": {"f": -1}}, "names the file"),
        (one(dtype="object"), "by_rows"),
        (one(pieces=[]), "by_rows"),
        (one(shape=[-1]), "by_rows"),
        (one(pieces=[["g", "a", 0, 2, "d"]]), "damaged piece"),
        (one(pieces=[["f", "a", 0, 3, "d"]]), "are not"),
        (one(pieces=[["f", "a", 0, 2, "d"], ["f", "b", 1, 2, "d"]]), "are not"),
        (one(pieces=[["f", "a", 2, 0, "d"]]), "damaged piece"),
    ],
)
def test_hostile_manifests(body, says):
    with pytest.raises(DataLossError, match=says):
        Manifest.decode(signed(body), "x")
    assert Manifest.decode(signed(one()), "x").tensors["a"].is_whole


def test_a_folder_is_a_checkpoint_from_its_commit_on(tmp_path):
    path = tmp_path / "ckpt-1"
    with CheckpointFolder(str(path)) as folder:
        manifest = fill(folder, b"123")
        with pytest.raises(NotFoundError, match="ckpt-1"):
            Manifest.of(str(path))
        folder.commit(manifest)
        assert Manifest.of(str(path)) == manifest
    assert sorted(p.name for p in path.iterdir()) == sorted([MANIFEST, *manifest.files])
    verify(str(path), manifest)


def test_what_is_not_committed_is_removed(tmp_path):
    with CheckpointFolder(str(tmp_path / "ckpt-1")) as folder:
        fill(folder, b"123")
        folder.show()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFoundError):
        CheckpointFolder(str(tmp_path / "none" / "ckpt-1"))


def test_a_checkpoint_is_replaced_when_the_next_is_complete(tmp_path):
    path = tmp_path / "ckpt-1"
    old = save(path, b"old")
    with CheckpointFolder(str(path)) as folder:
        fill(folder, b"new, but not committed")
    assert Manifest.of(str(path)) == old
    verify(str(path), old)
    new = save(path, b"new")
    assert Manifest.of(str(path)) == new
    assert len(list(path.iterdir())) == 2


def test_the_name_of_a_folder_lasts_whoever_made_it(tmp_path, monkeypatch):
    # As a writer leaves it that was killed.
    (tmp_path / "c").mkdir()
    synced, fsync = [], os.fsync

    def note(descriptor):
        before = (tmp_path / "c" / MANIFEST).exists()
        synced.append((os.fstat(descriptor).st_ino, before))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path / "c", b"abc")
    # Before there is a manifest: a checkpoint is never without its name.
    assert (tmp_path.stat().st_ino, False) in synced


def test_the_folder_above_may_be_closed(tmp_path):
    (tmp_path / "c").mkdir()
    tmp_path.chmod(0o111)
    try:
        manifest = save(tmp_path / "c", b"abc")
        assert Manifest.of(str(tmp_path / "c")) == manifest
    finally:
        tmp_path.chmod(0o755)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "ckpt-1"
    old = save(path, b"old")
    with CheckpointFolder(str(path)) as folder:
        with full_disk(10_000), pytest.raises(ResourceExhaustedError):
            fill(folder, bytes(20_000))
        manifest = fill(folder, bytes(2000))
        with full_disk(100), pytest.raises(ResourceExhaustedError):
            folder.commit(manifest)
    assert Manifest.of(str(path)) == old
    assert len(list(path.iterdir())) == 2


def test_files_that_are_gone_or_cut_are_named(tmp_path):
    path = tmp_path / "ckpt-1"
    manifest = save(path, b"12345")
    (file,) = manifest.files
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:-1])
    with pytest.raises(DataLossError, match=f"{file}: cut short"):
        Manifest.of(str(path))
    (path / file).write_bytes(data[:-1] + b"x")
    with pytest.raises(DataLossError, match=f"{file}: tensor 'a': its bytes changed"):
        verify(str(path), Manifest.of(str(path)))
    (path / file).unlink()
    with pytest.raises(DataLossError, match="ckpt-1"):
        Manifest.of(str(path))


def test_removal_touches_only_what_a_writer_made(tmp_path):
    path = tmp_path / "ckpt-1"
    save(path, b"1")
    assert not sweep(str(path))  # a checkpoint is no garbage
    (path / "notes.txt").write_text("mine")
    assert not remove(str(path))
    assert [p.name for p in path.iterdir()] == ["notes.txt"]
    (path / "notes.txt").unlink()
    assert sweep(str(path))
    assert not sweep(str(path))


def test_a_manifest_of_another_program_is_not_replaced(tmp_path):
    folder = tmp_path / "web"
    folder.mkdir()
    manifest = folder / MANIFEST
    manifest.write_text('{"name": "a web page"}')
    with pytest.raises(AlreadyExistsError):
        CheckpointFolder(str(folder))
    assert not remove(str(folder))
    assert [each.name for each in folder.iterdir()] == [MANIFEST]
    assert manifest.read_text() == '{"name": "a web page"}'
    manifest.write_text("")  # of a system that lost power
    written = save(folder, b"new")
    assert Manifest.of(str(folder)).files == written.files


def test_the_second_writer_hears_who_is_first(tmp_path):
    with CheckpointFolder(str(tmp_path / "c")):
        with pytest.raises(BusyError):
            CheckpointFolder(str(tmp_path / "c"))
        assert not sweep(str(tmp_path / "c"))
        assert not remove(str(tmp_path / "c"))
    CheckpointFolder(str(tmp_path / "c")).close()


def test_a_lock_that_is_dropped_is_free(tmp_path):
    path = str(tmp_path / "lock")
    lock = FolderLock(path)
    assert lock.path == path
    del lock
    FolderLock(path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with FolderLock(str(tmp_path / "lock")):
        assert "has no locks" in caplog.text


def test_kill_in_the_middle_leaves_nothing_that_counts(tmp_path):
    """A process that is killed keeps no lock, and what it wrote is swept."""
    path = tmp_path / "ckpt-1"
    old = save(path, b"old")
    program = """
        import sys
        from zstrat.checkpoint import *
        folder = CheckpointFolder(sys.argv[1])
        info = TensorInfo("a", "uint8", (1000,))
        writer = TensorWriter(folder.path_of(folder.part("local-0")), [info])
        writer.write(bytes(500))
        print("half", flush=True)
        sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "half\n"
        with pytest.raises(BusyError, match=f"process {child.pid} on "):
            CheckpointFolder(str(path))
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    assert len(list(path.iterdir())) == 4  # and no reader looks at the garbage
    assert Manifest.of(str(path)) == old
    verify(str(path), old)
    new = save(path, b"new")
    assert sorted(p.name for p in path.iterdir()) == sorted([MANIFEST, *new.files])
