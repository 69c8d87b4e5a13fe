"""Files that grow at their end: the same bytes whatever way they take to the disk."""

from __future__ import annotations

import errno
import fcntl
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from zstrat.checkpoint import BLOCK
from zstrat.checkpoint._writer import DIRECT_FROM_BYTES, AppendedFile
from zstrat.errors import AlreadyExistsError, ResourceExhaustedError
from zstrat.memory import aligned
from zstrat.testing import full_disk

portions = st.lists(
    st.tuples(
        st.one_of(
            st.integers(0, 3 * BLOCK),
            st.integers(0, 300).map(lambda blocks: blocks * BLOCK),
            st.integers(DIRECT_FROM_BYTES - 1, DIRECT_FROM_BYTES + BLOCK),
        ),
        st.sampled_from([0, 1, 64, BLOCK - 1]),
    ),
    max_size=8,
)
"""How many bytes are appended, and how far from a multiple of a block they begin."""


def data(size: int, off: int = 0, seed: int = 0) -> np.ndarray:
    memory = aligned((off + size,), np.dtype(np.uint8), BLOCK)
    memory[:] = np.random.default_rng(seed).integers(0, 256, off + size, np.uint8)
    return memory[off:]


def is_direct(path) -> bool:
    """Whether this process has the file open past the cache."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") != str(path):
                continue
        except FileNotFoundError:
            continue
        with open(f"/proc/self/fdinfo/{number}") as about:
            flags = next(line for line in about if line.startswith("flags:"))
        return bool(int(flags.split()[1], 8) & os.O_DIRECT)
    raise AssertionError(f"{path} is not open")


@examples(40)
@given(portions, st.sampled_from([0, DIRECT_FROM_BYTES]))
def test_the_file_is_what_was_appended(tmp_path_factory, portions, size):
    path = tmp_path_factory.mktemp("append") / "file"
    file = AppendedFile(str(path), size)
    want = []
    for number, (count, off) in enumerate(portions):
        part = data(count, off, number)
        want.append(part.tobytes())
        file.append(part)
        part[:] = 0  # it is not looked at any more
    file.finish()
    assert not file.is_open
    assert path.read_bytes() == b"".join(want)


def test_a_large_file_goes_past_the_cache_and_a_small_one_does_not(tmp_path):
    for size, large in ((DIRECT_FROM_BYTES - 1, False), (DIRECT_FROM_BYTES, True)):
        path = tmp_path / f"{size}"
        file = AppendedFile(str(path), size)
        file.append(data(size - 1))
        assert is_direct(path) is large
        file.append(b"1")
        file.finish()
        assert path.stat().st_size == size


def test_a_file_system_that_knows_no_direct_files(tmp_path, monkeypatch):
    real = fcntl.fcntl

    def refuses(descriptor: int, command: int, argument: int = 0) -> int:
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    file = AppendedFile(str(tmp_path / "file"), 9 * DIRECT_FROM_BYTES)
    part = data(9 * DIRECT_FROM_BYTES)
    file.append(part)
    assert not is_direct(tmp_path / "file")
    file.finish()
    assert (tmp_path / "file").read_bytes() == part.tobytes()


@pytest.mark.parametrize("transfers", range(4))
def test_a_file_system_that_refuses_in_the_middle(tmp_path, monkeypatch, transfers):
    """Such as one whose disk has larger blocks, or that ends within one."""
    path, real = tmp_path / "file", os.write
    left = transfers

    def refuses(descriptor: int, view: memoryview) -> int:
        nonlocal left
        if is_direct(path):
            if not left:
                raise OSError(errno.EINVAL, "Invalid argument")
            left -= 1
            return real(descriptor, view[:BLOCK])
        return real(descriptor, view)

    monkeypatch.setattr(os, "write", refuses)
    file = AppendedFile(str(path), DIRECT_FROM_BYTES)
    parts = [
        data(BLOCK),
        data(7, 1, 1),
        data(2 * DIRECT_FROM_BYTES + 5, 1, 2),
        data(BLOCK, 0, 3),
    ]
    for part in parts:
        file.append(part)
    file.finish()
    assert path.read_bytes() == b"".join(part.tobytes() for part in parts)


@pytest.mark.parametrize("room", [BLOCK, 3 * BLOCK + 100, DIRECT_FROM_BYTES + 512])
def test_a_disk_that_is_full_is_an_error_and_leaves_no_file(tmp_path, room):
    path = str(tmp_path / "file")
    with full_disk(room):
        file = AppendedFile(path, 2 * DIRECT_FROM_BYTES)
        file.append(data(BLOCK))
        with pytest.raises(ResourceExhaustedError):
            file.append(data(2 * DIRECT_FROM_BYTES))
    assert not file.is_open
    assert os.listdir(tmp_path) == []


def test_the_end_may_be_what_does_not_fit(tmp_path):
    file = AppendedFile(str(tmp_path / "file"), DIRECT_FROM_BYTES)
    file.append(data(100))
    with full_disk(50), pytest.raises(ResourceExhaustedError):
        file.finish()
    assert os.listdir(tmp_path) == []


def test_who_creates_a_file_is_the_only_one_to_write_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(AlreadyExistsError):
        AppendedFile(str(path), DIRECT_FROM_BYTES)
    assert path.read_bytes() == b"mine"


def test_abort_removes_what_is_not_finished(tmp_path):
    file = AppendedFile(str(tmp_path / "file"), DIRECT_FROM_BYTES)
    file.append(data(3 * BLOCK))
    file.abort()
    file.abort()
    assert os.listdir(tmp_path) == []
    done = AppendedFile(str(tmp_path / "file"), 3)
    done.append(b"123")
    done.finish()
    done.abort()
    assert (tmp_path / "file").read_bytes() == b"123"


def test_a_file_that_cannot_be_begun_is_not_left(tmp_path, monkeypatch):
    def broken(descriptor, command, argument=0):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(fcntl, "fcntl", broken)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="the disk is gone"):
        AppendedFile(str(tmp_path / "f"), DIRECT_FROM_BYTES)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)
