"""Allocates arrays at the alignments of XLA and of the kernel, and arrays that grow in
place. Needs only numpy, as it is used where jax is not loaded.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BYTE: Final = np.dtype(np.uint8)

ALIGNMENT: Final = 64
"""Alignment in bytes at which XLA shares host memory instead of copying it; also the
size of a cache line."""


def aligned(shape: tuple[int, ...], dtype: np.dtype, to: int = ALIGNMENT) -> np.ndarray:
    """Returns an uninitialised C-order array whose memory starts at a multiple of
    ``to``."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    # numpy itself promises 16 bytes.
    memory = np.empty(size + to, np.uint8)
    start = -memory.ctypes.data % to
    return memory[start : start + size].view(dtype).reshape(shape)


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory, at most 16 MiB, and reuse it for later
    arrays of up to 8 MiB."""
    # glibc begins to when it has freed an array of that size. Until then each array
    # above 128 KiB may get pages that are new, and to touch these costs as much as an
    # update by an optimizer. So this frees one, of which no page was touched.
    np.empty(2**23, _BYTE)


HUGE_PAGE: Final = 2 * 2**20
"""Bytes of a page that Linux uses for large allocations. Random rows of a table are
read a third faster from such pages, as each row is on another page."""


def lasting(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialised C-order array, like `aligned`, for long-lived data that
    is read at random. An array of two huge pages or more starts at the beginning of a
    huge page and is padded to whole huge pages, so it may take 2 MiB more; otherwise
    its ends would be on small pages.

    numpy requests huge pages for allocations of 4 MiB and more.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size < 2 * HUGE_PAGE:
        return aligned(shape, dtype)
    whole = aligned((-(-size // HUGE_PAGE) * HUGE_PAGE,), _BYTE, to=HUGE_PAGE)
    return whole[:size].view(dtype).reshape(shape)


_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0)
_HUGE_PAGES: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)

_RESERVED: Final = 2**36
"""Bytes of address space that a `Reserve` reserves: 64 GiB of the 128 TiB that a
process may have. If the system refuses, a quarter is requested, repeatedly. An array
that needs more is copied to a reservation of twice its size."""

_AT_ONCE: Final = 8
"""Maximum number of huge pages that one call of `Reserve.populate` adds."""

_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux 5.14, a constant that Python does not define."""


def _populate(
    memory: mmap.mmap, address: int, pages: Sequence[int], turn: threading.Lock
) -> None:
    """Makes the kernel allocate huge pages of a mapping, without changing its content,
    then releases the lock ``turn``.

    Args:
        address: Where the mapping starts; ``pages`` are numbers of huge pages from
            there.
    """
    try:
        # Not mmap.madvise, which holds the interpreter's lock for as long as it takes.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for page in pages:  # a kernel that cannot, or a lack of memory, changes nothing
            madvise(address + page * HUGE_PAGE, HUGE_PAGE, _POPULATE_WRITE)
        del memory  # which has kept them mapped
    finally:
        turn.release()


@final
class Reserve:
    """An array that grows in place: it reserves address space, to which the kernel adds
    pages of zeros when they are first written. ``array`` is the part in use.

    Args:
        size: Number of elements in use at first.
        folder: Keeps the array in an unnamed file in this folder, whose pages the
            kernel reads and writes as it needs memory. None: the array stays in memory.

    Raises:
        MemoryError: The machine, or the disk, has too little room.
        OSError: The file cannot be created in the folder.
    """

    def __init__(self, size: int, dtype: np.dtype, folder: Path | None = None) -> None:
        self._dtype = dtype
        self._file: _Unnamed | None = None if folder is None else _Unnamed(folder)
        self._memory = self._reserved(_RESERVED, size * dtype.itemsize)
        self._whole = np.frombuffer(self._memory, np.uint8)
        self._allocate(size * dtype.itemsize)
        self.array = self._whole[: size * dtype.itemsize].view(dtype)
        self._populated: set[int] = set()
        self.populating = threading.Lock()
        """Held by the thread of `populate`, which ends when it has added its pages."""

    def grow(self, size: int) -> None:
        """Extends ``array`` to ``size`` elements, if it has fewer.

        Raises:
            MemoryError: The machine has too little memory; the array has not changed.
        """
        nbytes = size * self._dtype.itemsize
        self._allocate(nbytes)  # some of it may have been released
        if nbytes <= self.array.nbytes:
            return
        if nbytes > len(self._whole):  # a machine that counts address space
            if self._file is not None:
                raise MemoryError(f"{nbytes} bytes of address space of a file")
            self._memory = self._reserved(2 * nbytes, nbytes)
            whole = np.frombuffer(self._memory, np.uint8)
            whole[: self.array.nbytes] = self.array.view(np.uint8)
            self._whole = whole
            self._populated.clear()
        self.array = self._whole[:nbytes].view(self._dtype)

    def populate(self, pages: Iterable[int]) -> None:
        """Makes the kernel allocate huge pages, also beyond the end of ``array``,
        before they are written. This runs on a thread, as a page that the machine has
        not used before takes 5 ms. The call does nothing while an earlier one still
        runs, nor for an array in a file.

        Args:
            pages: Numbers of huge pages: page n has the bytes from n * `HUGE_PAGE`.
        """
        last = len(self._whole) // HUGE_PAGE
        new = [x for x in pages if x < last and x not in self._populated][:_AT_ONCE]
        if not new or self._file or not self.populating.acquire(blocking=False):
            return
        args = self._memory, self._whole.ctypes.data, new, self.populating
        try:
            # Without the wait for its first instruction that `threading` adds.
            _thread.start_new_thread(_populate, args)
        except RuntimeError:  # no more threads, or the process ends
            self.populating.release()
        # Also if there is no thread: the kernel adds them when they are written.
        self._populated.update(new)

    def release(self, start: int, size: int) -> None:
        """Returns memory pages to the system that lie completely within ``size``
        elements from ``start``, all of which are zero."""
        page = mmap.PAGESIZE
        # Inwards: a page that other elements share stays.
        first = -(-start * self._dtype.itemsize // page) * page
        last = (start + size) * self._dtype.itemsize // page * page
        if last > first:
            gone = mmap.MADV_DONTNEED
            # MADV_DONTNEED gives back only the cache of a file; this gives back its
            # blocks, which are allocated again before they are written.
            if self._file is not None:
                gone = mmap.MADV_REMOVE
                self._file.allocated = min(self._file.allocated, first)
            self._memory.madvise(gone, first, last - first)
            pages = range(first // HUGE_PAGE, -(-last // HUGE_PAGE))
            self._populated.difference_update(pages)

    def _allocate(self, nbytes: int) -> None:
        if self._file is not None:
            self._file.allocate(nbytes)

    def _reserved(self, wanted: int, least: int) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        wanted = -(-max(wanted, least) // HUGE_PAGE) * HUGE_PAGE
        while True:
            try:
                if self._file is not None:
                    # Sparse: nothing is allocated yet.
                    os.ftruncate(self._file.descriptor, wanted)
                    return mmap.mmap(self._file.descriptor, wanted)
                memory = mmap.mmap(-1, wanted, flags=flags)
            except OSError as error:
                if wanted <= least + HUGE_PAGE:
                    what = f"{least} bytes of address space: {error}"
                    raise MemoryError(what) from None
                wanted = -(-max(wanted // 4, least) // HUGE_PAGE) * HUGE_PAGE
                continue
            if _HUGE_PAGES is not None:
                with contextlib.suppress(OSError):  # a kernel without them
                    memory.madvise(_HUGE_PAGES)
            return memory


_ALLOCATED: Final = 16 * 2**20
"""Bytes by which the allocated part of a file is extended, before these bytes are
written: a write to a page for which the disk has no room would kill the process."""


class _Unnamed:
    """A file without a name, which the kernel removes when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = -1  # until there is one
        self.descriptor, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
        self.allocated = 0
        """Number of bytes from the beginning of the file that have room on the disk."""

    def allocate(self, nbytes: int) -> None:
        """Allocates room on the disk for the first ``nbytes`` of the file.

        Raises:
            MemoryError: The disk is full.
        """
        if nbytes <= self.allocated:
            return
        end = -(-nbytes // _ALLOCATED) * _ALLOCATED
        try:
            more = end - self.allocated
            os.posix_fallocate(self.descriptor, self.allocated, more)
        except OSError as error:
            raise MemoryError(f"{nbytes} bytes in a file: {error}") from None
        self.allocated = end

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


_FACTS: Final = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Returns the bytes of memory that can be allocated without swapping; None if
    unknown."""
    try:
        for line in _FACTS.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
