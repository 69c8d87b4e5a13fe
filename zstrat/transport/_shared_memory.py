"""Sends bodies (the arrays of messages) between processes of one host through memory
that both have mapped.

The sender of a body copies it into its *arena*, an anonymous memory file that the
receiver has mapped read-only, and sends the offset; the receiver uses the body in
place, and reports when its arrays are gone. One copy at memory speed replaces two
through the kernel, and no memory has a name in a file system: when both processes are
dead, however they died, the memory is gone.

Threats: a peer proves that it shares the host and the user by a random text that only
the mapped memory contains; a peer that cannot read ``/proc/PID/fd`` of this process
cannot map the arena, and no body is put there for it. The memory of all arenas of the
process together is bounded, because of peers that never report that they have read. A
peer may change what it has sent while we read it, as it may send anything in the first
place; it cannot touch memory that is not its own arena.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import stat
import threading
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.wire import Offer
from zstrat.wire.connection import aligned, task_name

from ._pool import lend
from ._pump import SHARED
from ._rate_limited_log import RateLimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.config import Settings
    from zstrat.wire import Hello

_LOG: Final = logging.getLogger("zstrat.transport")

_BY_SOCKET: Final = RateLimitedLog(_LOG)

CAPACITY: Final = 2**30
"""Address space of one arena. The kernel provides its pages as they are first used, so
an arena costs at most what was in flight; a body that does not fit travels by
socket."""

_PAGE: Final = 4096
_STEP: Final = 8 * 2**20
"""Bytes that are copied in one step, unless a whole body is copied at once: two
milliseconds, if memory is slow."""
_WORD: Final = 16
_BATCH: Final = 4096
"""Most offsets in one `Released` message: they fit the header by far."""
_RELEASED: Final = 4
"""Most small bodies of the peer's memory that may be read, but not reported yet: a
message for each would cost more than it frees."""
_LARGE: Final = 2**20
"""Bytes above which the end of reading a body is reported at once. Until the report,
the peer takes fresh memory for its next body, which costs far more than a message."""

_PHYSICAL: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of an arena's file. A file that shrinks kills a process that reads its mapping;
a sealed file cannot shrink."""


class Blocks:
    """Allocates blocks of an arena: the lowest free part that fits; adjacent free parts
    are merged.

    This reuses pages that were touched before: the first touch of a page of shared
    memory costs ten times its copy.
    """

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)]
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Returns the offset of a new block, a multiple of a page, or None if no free
        part is large enough."""
        size = -(-nbytes // _PAGE) * _PAGE
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, end)
                self._taken[start] = start + size
                return start
        return None

    def give_back(self, start: int) -> bool:
        """Frees a block. Returns False if there is no such block: the peer invented the
        offset."""
        end = self._taken.pop(start, None)
        if end is None:
            return False
        i = bisect_left(self._free, (start, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))
        return True


class Quota:
    """Number of bytes that all arenas of a process may still take. For any thread."""

    def __init__(self, most: int) -> None:
        self._left, self._lock = most, threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Takes ``nbytes`` bytes of the quota. Returns False, and takes nothing, if
        fewer are left."""
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes


QUOTA: Final = Quota(max(CAPACITY // 4, _PHYSICAL // 4))
"""The quota of the process, a quarter of the machine's memory: a body that does not fit
travels by socket."""


class Arena:
    """Shared memory that this process writes and one peer reads.

    ``memory`` (uint8 [capacity]) begins with the ``word``, by which the peer checks
    that it has mapped the right file, and the ``proof``, which the peer sends back to
    prove that it has.
    """

    def __init__(self, capacity: int = CAPACITY, quota: Quota = QUOTA) -> None:
        """Creates an arena of ``capacity`` bytes.

        Raises:
            OSError: The kernel has no anonymous memory files, or no memory.
        """
        self._quota, self._touched = quota, _PAGE
        self.descriptor = os.memfd_create(
            "zstrat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        self.capacity = capacity
        self.word, self.proof = secrets.token_bytes(_WORD), secrets.token_bytes(_WORD)
        try:
            os.ftruncate(self.descriptor, capacity)
            # After the size is set: the seals forbid growing, too.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = np.frombuffer(mmap.mmap(self.descriptor, capacity), np.uint8)
        except OSError:
            os.close(self.descriptor)
            raise
        self.memory[: 2 * _WORD] = np.frombuffer(self.word + self.proof, np.uint8)
        self._blocks = Blocks(_PAGE, capacity)

    def place(self, raws: Sequence[np.ndarray], nbytes: int) -> int | None:
        """Copies a body (arrays uint8 [n], each aligned after the one before) into the
        arena. Returns the offset of the body, or None if it does not fit now."""
        start = self._reserve(nbytes)
        if start is not None:
            for _ in self._copy(raws, start, nbytes):
                pass
        return start

    def begin(
        self, raws: Sequence[np.ndarray], nbytes: int
    ) -> tuple[int, Iterator[None]] | None:
        """Reserves room for a body. Returns its offset, and an iterator that copies
        `_STEP` bytes with each step, so that a large body does not hold up the loop;
        None if the body does not fit now."""
        start = self._reserve(nbytes)
        return None if start is None else (start, self._copy(raws, start, _STEP))

    def _reserve(self, nbytes: int) -> int | None:
        # A block first: which pages it touches depends on where it is.
        start = self._blocks.take(nbytes)
        if start is None:
            return None
        if not self._may_touch(start + nbytes):
            self._blocks.give_back(start)
            return None
        return start

    def _copy(
        self, raws: Sequence[np.ndarray], position: int, step: int
    ) -> Iterator[None]:
        left, memory = step, self.memory
        for raw in raws:
            position = aligned(position)
            # Small arrays need no slices, which cost as much as their copy.
            if raw.nbytes < left:
                end = position + raw.nbytes
                memory[position:end] = raw
                left -= raw.nbytes
                position = end
                continue
            for at in range(0, raw.nbytes, step):
                part = raw[at : at + step]
                memory[position : position + part.nbytes] = part
                position += part.nbytes
                left -= part.nbytes
                if left <= 0:
                    left = step
                    yield

    def give_back(self, offset: int) -> bool:
        return self._blocks.give_back(offset)

    def close(self) -> None:
        """Closes the file of the arena. Its memory is freed with the last mapping or
        array that uses it."""
        os.close(self.descriptor)
        self._quota.give_back(self._touched - _PAGE)
        self._touched = _PAGE

    def _may_touch(self, end: int) -> bool:
        """Takes the pages up to ``end`` from the quota, or returns False if they exceed
        it. A page that was written once stays in memory, and is not counted again."""
        more = end - self._touched
        if more > 0:
            if not self._quota.take(more):
                return False
            self._touched = end
        return True


class Mapping:
    """The arena of a peer, mapped by this process: ``memory`` is read-only."""

    def __init__(self, pid: int, descriptor: int, capacity: int, word: bytes) -> None:
        """Maps the arena behind a descriptor of the process ``pid``.

        Raises:
            OSError: The file cannot be opened, or is not the arena that the peer
                announced.
        """
        if not _PAGE < capacity <= CAPACITY:
            raise OSError(f"an arena of {capacity} bytes: at most {CAPACITY}")
        # O_NONBLOCK: the peer names the file, and opening a pipe would block the loop.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(f"/proc/{pid}/fd/{descriptor}", flags)
        try:
            _check(file, capacity)
            memory = mmap.mmap(file, capacity, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        # By the content: the number may be of another file if the pid is that of
        # another container.
        if memory[: len(word)] != word or len(word) != _WORD:
            raise OSError("the memory does not hold the word of the peer")
        self.memory = np.frombuffer(memory, np.uint8)
        self.proof = bytes(memory[_WORD : 2 * _WORD])

    def body(
        self, offset: int, nbytes: int, released: Callable[[int], None]
    ) -> memoryview:
        """Returns the body at ``offset``. Calls ``released(offset)``, on any thread,
        when the last array in the body is gone.

        Raises:
            ValueError: The body is not within the arena.
        """
        # The first page has the word and the proof.
        if offset < _PAGE or offset % _PAGE or offset + nbytes > self.memory.size:
            raise ValueError(f"{nbytes} bytes at {offset} are outside of the arena")
        return lend(self.memory[offset : offset + nbytes], released, offset)


def _check(file: int, capacity: int) -> None:
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_size != capacity:
        raise OSError("it is not a file of the size of the arena")
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError("its size is not sealed")


class ShmChannel:
    """The shared memory of one connection: the arena of this process, created when it
    is first needed, and the mapped arena of the peer.

    Implements `zstrat.wire.connection._channel.SharedMemoryChannel`, which documents
    the methods. An arena that cannot be created is not an error: bodies go by socket.
    """

    def __init__(self, me: Hello) -> None:
        self._host = me.host
        self._arena: Arena | None = None
        self._agreed = False
        self._mapping: Mapping | None = None
        # Arrays may die on any thread; appending and taking from the left are atomic.
        self.unread: deque[int] = deque()
        self.most_unread = _RELEASED

    def offer(self, to: Hello) -> Offer | None:
        if to.host != self._host:
            return None
        try:
            self._arena = Arena()
        except (AttributeError, OSError) as error:  # not on this system, or no memory
            text = "bodies for %s go by socket: %s"
            _BY_SOCKET.write(logging.INFO, text, task_name(to), error)
            return None
        return Offer(self._arena.descriptor, self._arena.capacity, self._arena.word)

    def agreed(self, proof: bytes) -> bool:
        if self._arena is None:
            return not proof
        self._agreed = secrets.compare_digest(proof, self._arena.proof)
        # It has mapped nothing, or something else. Nothing was written for it yet.
        if not self._agreed:
            self._close_arena()
        return self._agreed or not proof

    def accept(self, offer: Offer, of: Hello) -> bytes:
        if of.host != self._host:
            return b""
        try:
            self._mapping = Mapping(
                of.pid, offer.descriptor, offer.capacity, offer.word
            )
        except (OSError, ValueError) as error:
            # Another user, another container: the bodies come by socket.
            text = "bodies of %s come by socket: %s"
            _BY_SOCKET.write(logging.INFO, text, task_name(of), error)
            return b""
        return self._mapping.proof

    def place(self, raws: Sequence[np.ndarray], nbytes: int) -> int | None:
        if not self._agreed or self._arena is None:
            return None
        offset = self._arena.place(raws, nbytes)
        if offset is not None:
            SHARED.sent += nbytes
        return offset

    def begin(
        self, raws: Sequence[np.ndarray], nbytes: int
    ) -> tuple[int, Iterator[None]] | None:
        if not self._agreed or self._arena is None:
            return None
        begun = self._arena.begin(raws, nbytes)
        if begun is not None:
            SHARED.sent += nbytes
        return begun

    def body(self, offset: int, nbytes: int) -> memoryview | None:
        if self._mapping is None:
            return None
        try:
            view = self._mapping.body(offset, nbytes, self.unread.append)
        except ValueError:
            return None
        # By the latest body: senders of large ones wait for their memory.
        self.most_unread = 1 if nbytes >= _LARGE else _RELEASED
        SHARED.got += nbytes
        return view

    def released(self, offsets: Sequence[int]) -> None:
        if self._arena is not None:
            for offset in offsets:
                self._arena.give_back(offset)

    def take_unread(self) -> list[int]:
        unread = self.unread
        return [unread.popleft() for _ in range(min(len(unread), _BATCH))]

    def close(self) -> None:
        self._agreed, self._mapping = False, None
        self._close_arena()

    def _close_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def channel_of(settings: Settings, me: Hello) -> ShmChannel | None:
    """Returns the shared memory for a new connection; None: the settings chose sockets,
    or the system does not support it."""
    return ShmChannel(me) if settings.transport in ("auto", "shm") else None
