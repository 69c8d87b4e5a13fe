"""Writes files that are complete or absent after a crash, and digests of their bytes.
Errors name the file, and what to do.

Law of the package: a file gets its final name only when its bytes are on the disk, or
nothing refers to it yet (a part file, until a manifest is committed).

Digests are xxh3 of 128 bits, in hex. They protect against damage, not against an
attacker, who could write the manifest, too. They are computed at the speed of memory,
so that nobody has a reason to leave them out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from zstrat.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError
from zstrat.paths import file_above

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zstrat.wire import Buffer


_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADDRESS: Final = re.compile(
    "[A-Za-z][A-Za-z0-9+.-]*://|(abfss?|az|file|gs|hdfs|https?|s3):/"
)
"""Matches an address that is not a path of this machine, as ``gs://bucket``; also with
one slash, which `pathlib.Path` leaves of two."""
_NEW: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


@contextlib.contextmanager
def blamed(path: str, what: str) -> Iterator[None]:
    """Converts errors of the system that the body raises about ``path`` to errors that
    say what to do; ``what`` is what the body does: "writing".

    Raises:
        ResourceExhaustedError: The disk or a quota is full.
        AlreadyExistsError: The path exists.
        NotFoundError: The path does not exist, or a part of it is a file instead of a
            folder.
        OSError: Any other error, unchanged.
    """
    try:
        yield
    except FileExistsError:
        raise AlreadyExistsError(
            f"{what} {path}: it exists already, so another program writes the same "
            "checkpoint: give each its own folder"
        ) from None
    except FileNotFoundError:
        raise NotFoundError(f"{what} {path}: no such file or folder") from None
    except NotADirectoryError:
        raise NotFoundError(
            f"{what} {path}: {file_above(path)} is a file, expected a folder: "
            "choose another path, or move that file"
        ) from None
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceExhaustedError(
                f"{what} {path}: {os.strerror(error.errno)}; free some space and save "
                "again: checkpoints that were complete are as they were"
            ) from None
        raise


def local_path(path: str | bytes | os.PathLike[str]) -> str:
    """Returns the path of a file or a folder of this machine, as text.

    Raises:
        ValueError: ``path`` is an address of other storage, or contains a null
            character.
    """
    text = os.fsdecode(path)
    if _ADDRESS.match(text):
        scheme, _, rest = text.partition(":")
        if scheme != "file" or re.match("//[^/]", rest):
            raise ValueError(
                f"{text!r:.300}: expected a path, got an address: checkpoints are in "
                "folders of the machine; mount that one, and give its path here"
            )
        text = f"/{rest.lstrip('/')}"  # file:/x and file:///x, as by TF
    if "\0" in text:
        raise ValueError(f"{text!r:.300}: expected a path, which has no null in it")
    return text


def absolute(path: str | bytes | os.PathLike[str]) -> str:
    """Returns a path that other processes can use, perhaps on other machines: absolute,
    and without a dependence on the working directory.

    Raises: As `local_path`.
    """
    return os.path.abspath(local_path(path))


def make_folder(path: str) -> None:
    """Makes a folder and its missing parents.

    Raises:
        NotFoundError: A file has the name of the folder or of a parent, or no folder
            can be made there.
        ResourceExhaustedError: The disk is full.
        OSError: Any other error of the system.
    """
    with blamed(os.path.join(path, ""), "creating"):
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError as error:  # a file; a folder would have done
            raise NotADirectoryError(*error.args) from None


def create(path: str) -> int:
    """Creates a file and returns its descriptor. Raises FileExistsError if the file
    exists."""
    return os.open(path, _NEW, 0o666)


def write_all(descriptor: int, data: Buffer) -> None:
    """Writes all bytes of a contiguous buffer to a file. One write of the system may
    take only a part of them."""
    view = bytes_of(data)
    while view:
        view = view[os.write(descriptor, view) :]


def send_off(descriptor: int, start: int, stop: int) -> None:
    """Makes the system begin to write bytes ``[start, stop)`` of a file to the disk,
    without waiting until they are there."""
    # DONTNEED starts the write of dirty pages, and frees those that are written.
    with contextlib.suppress(OSError):  # a hint, and some file systems take none
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


def bytes_of(data: Buffer) -> memoryview:
    """Returns contiguous data as a memoryview of bytes."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    # A view of no bytes cannot be cast: its shape has a zero.
    return view.cast("B") if view.nbytes else memoryview(b"")


def sync_folder(path: str) -> None:
    """Flushes a folder to the disk, so that names of files made in it survive a
    crash."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: str, data: bytes, *, mark: str) -> None:
    """Replaces the content of ``path`` by ``data``, whole or not at all even if the
    system crashes.

    Args:
        mark: Distinguishes the temporary file from other writers' files.
    """
    temporary = f"{path}.{mark}.tmp"
    with blamed(path, "writing"):
        descriptor = create(temporary)
        try:
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            # After the fsync: a file system may write the name before the bytes, and a
            # crash would leave an empty file in the place of the old one.
            os.replace(temporary, path)
        except BaseException:  # to the writer; no half file is left behind
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        # Without it the rename itself may be lost in a crash.
        sync_folder(os.path.dirname(path))


def digest_of(parts: Iterable[Buffer]) -> str:
    """Returns the digest of the concatenated parts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(bytes_of(part))
    return digest.hexdigest()
