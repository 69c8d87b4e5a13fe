"""Writes a safetensors file as the bytes of its tensors become available; large files
are written past the page cache.

The header is known before the first element, so no whole tensor is ever held in memory:
a table of 100 GB goes through a buffer of the caller. Any thread may use a writer, one
thread at a time.

Nobody reads a checkpoint soon after it was written, and the page cache costs other
threads time: a core copies every byte once more, into pages that have to be found
first, in stretches of tens of milliseconds during which some kernels let no other
thread run. A transfer from our memory (``O_DIRECT``) takes a tenth of the processor
time, and the disk decides how fast it is.

Direct transfers take whole blocks, from addresses in memory and to offsets in the file
that are multiples of a block. Law of `AppendedFile`: as long as the file is written
directly, it has a whole number of blocks, and bytes after them wait in a buffer, the
*stage*. Aligned data goes to the disk from where it is; all other data through the
stage. The page cache takes the rest: small files, the end of a file, and files on a
file system that refuses direct transfers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from zstrat.memory import aligned

from ._disk import blamed, bytes_of, create, send_off, sync_folder, write_all
from ._header import encode_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.wire import Buffer

    from ._header import TensorInfo


BLOCK: Final = 4096
"""The unit of direct transfers, in bytes: the size of a page, and of the largest blocks
of disks."""

DIRECT_FROM_BYTES: Final = 4 * 2**20
"""Size in bytes from which on a file is written directly. Also the size of the stage:
one transfer of so many bytes takes so long that the time between two transfers does not
matter."""

AHEAD: Final = 32 * 2**20
"""Bytes written through the page cache after which the system is asked to begin writing
them to the disk, while the next bytes are written. Otherwise the system gathers
gigabytes, and then makes the writer wait for them."""


class AppendedFile:
    """Creates the file ``path``, which will have ``size`` bytes, and appends to it. For
    any thread, one at a time.

    Raises, all methods: As `zstrat.checkpoint._disk.blamed`; the file is removed.
        AlreadyExistsError: The file exists: only the writer that creates a file writes
            it.
    """

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        with blamed(path, "writing"):
            self._file = create(path)
        with self._removed_if_it_fails():
            self._is_direct = size >= DIRECT_FROM_BYTES and _set_direct(
                self._file, True
            )
            self._stage = aligned(
                (DIRECT_FROM_BYTES if self._is_direct else 0,), _BYTE, BLOCK
            )
        self._held = 0
        """Bytes that wait in the stage (the buffer of direct transfers)."""
        self._written = self._sent = 0

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def append(self, data: Buffer) -> None:
        """Appends contiguous bytes. Their memory may be reused when this returns."""
        view = bytes_of(data)
        with self._removed_if_it_fails():
            while view and self._is_direct:
                whole = _whole_blocks(view)
                # From where it is, without a copy, if the stage can be emptied first:
                # that takes whole blocks, too.
                if whole and self._held % BLOCK == 0:
                    self._flush()
                    self._write(view[:whole])
                    view = view[whole:]
                else:
                    view = view[self._put_on_stage(view) :]
            self._write(view)

    def finish(self) -> None:
        """Flushes all bytes to the disk, and closes the file."""
        with self._removed_if_it_fails():
            # The end of the file rarely fills a block, so it goes through the cache.
            if self._is_direct:
                self._become_plain()
            self._flush()
            os.fsync(self._file)
            descriptor, self._file = self._file, -1
            os.close(descriptor)

    def abort(self) -> None:
        """Closes and removes the file, unless it was finished; may be called again."""
        if self._file < 0:
            return
        # Forgotten before it is closed: another file may get the number at once.
        descriptor, self._file = self._file, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    @contextlib.contextmanager
    def _removed_if_it_fails(self) -> Iterator[None]:
        with blamed(self._path, "writing"):
            try:
                yield
            except BaseException:  # half a file is of no use
                self.abort()
                raise

    def _put_on_stage(self, view: memoryview) -> int:
        """Copies as many bytes as fit from the beginning of ``view`` to the stage;
        returns how many."""
        part = np.frombuffer(view[: DIRECT_FROM_BYTES - self._held], _BYTE)
        self._stage[self._held : self._held + len(part)] = part
        self._held += len(part)
        # Full, it is a whole number of blocks: another direct transfer.
        if self._held == DIRECT_FROM_BYTES:
            self._flush()
        return len(part)

    def _flush(self) -> None:
        held, self._held = self._stage[: self._held], 0
        self._write(held.data)

    def _write(self, view: memoryview) -> None:
        if self._is_direct:
            view = self._transfer(view)
        # What is left, or all of it, goes through the cache.
        write_all(self._file, view)
        self._written += view.nbytes
        if self._written - self._sent >= AHEAD:
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            send_off(self._file, end - (self._written - self._sent), end)
            self._sent = self._written

    def _transfer(self, view: memoryview) -> memoryview:
        """Writes whole blocks past the page cache. Returns the bytes that the system
        refuses to take directly, which may begin anywhere where a disk or a quota
        ends."""
        while view:
            try:
                view = view[os.write(self._file, view) :]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._become_plain()
                break
        return view

    def _become_plain(self) -> None:
        self._is_direct = False
        _set_direct(self._file, False)


_BYTE: Final = np.dtype(np.uint8)


def _whole_blocks(view: memoryview) -> int:
    """Returns how many bytes from the beginning of ``view`` can be written directly,
    without a copy."""
    if np.frombuffer(view, _BYTE).ctypes.data % BLOCK:
        return 0
    return view.nbytes // BLOCK * BLOCK


def _set_direct(descriptor: int, on: bool) -> bool:
    """Switches direct transfers of an open file on or off; returns False if the file
    system refuses. Not done when the file is created: an open that is refused because
    of the flag leaves the new file behind."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


class TensorWriter:
    """Creates a safetensors file with the given tensors; `write` appends their elements
    in the order of the tensors.

    Leaving its context removes the file, unless it was finished.

    Args:
        path: The file to create; it must not exist, because only its creator writes a
            file.

    Raises:
        ValueError: A name occurs twice, or a dtype is unknown; no file is created.
        AlreadyExistsError: The file exists.
        NotFoundError: The folder does not exist.
        ResourceExhaustedError: The disk is full; also in `write` and `finish`, and the
            file is removed.
        OSError: Any other error of the system; the file is removed.
    """

    def __init__(self, path: str, tensors: Sequence[TensorInfo]) -> None:
        header, self.size = encode_header(tensors)
        self.path = path
        self._sizes = [info.nbytes for info in tensors]
        self._missing = sum(self._sizes)
        self._digests: list[str] = []
        self._digest = xxhash.xxh3_128()
        self._left = 0
        """Bytes that the tensor being written still lacks."""
        self._file = AppendedFile(path, self.size)
        self._begin()
        # The header is a multiple of a block, so the tensors begin at one.
        self._put(header)

    def write(self, data: Buffer) -> None:
        """Writes the next elements, in C order and little endian: bytes, or a
        contiguous array or memoryview of bytes. The data may end one tensor and begin
        the next.

        Raises:
            ValueError: The data has more bytes than the tensors still lack.
        """
        view = bytes_of(data)
        if view.nbytes > self._missing:
            raise ValueError(
                f"{self.path}: {view.nbytes} bytes are given, and only "
                f"{self._missing} are missing"
            )
        self._put(view)
        self._missing -= view.nbytes
        # One call may end several tensors; each has its own digest.
        while view:
            part = view[: self._left]
            self._digest.update(part)
            self._left -= part.nbytes
            view = view[part.nbytes :]
            if not self._left:
                self._end()

    def finish(self) -> list[str]:
        """Flushes the file to the disk and closes it; returns the digest of each
        tensor, in order.

        Raises:
            ValueError: Elements of a tensor were not written yet.
        """
        if self._missing or not self._file.is_open:
            raise ValueError(f"{self.path}: {self._missing} bytes are missing")
        self._file.finish()
        with blamed(self.path, "writing"):
            sync_folder(os.path.dirname(self.path))
        return list(self._digests)

    def abort(self) -> None:
        """Removes the file, unless it was finished; may be called again."""
        self._file.abort()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _put(self, data: Buffer) -> None:
        if not self._file.is_open:
            raise ValueError(f"{self.path}: finished or aborted already")
        self._file.append(data)

    def _begin(self) -> None:
        """Begins the next tensor that has elements; records the digests of empty
        tensors before it."""
        for size in self._sizes[len(self._digests) :]:
            self._left = size
            if size:
                return
            self._digests.append(self._digest.hexdigest())

    def _end(self) -> None:
        self._digests.append(self._digest.hexdigest())
        self._digest = xxhash.xxh3_128()
        self._begin()
