"""A pool of memory for received bodies, results of collectives and batches for devices,
which is reused once its arrays are garbage-collected.

Touching fresh pages halves the speed of a copy, so the memory of the last pull (reading
of variables) is used for the next one. Memory is never returned explicitly: all arrays
of a body are views of one lease, which ends when the last array is collected.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.wire.connection import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT: Final = 256 * 2**20
"""Most idle bytes that the pool keeps: two alternating bodies of 64 MB, with room for a
second size."""

SPARE: Final = 30.0
"""Seconds without use after which idle memory is freed: longer than a checkpoint
takes."""

STALE: Final = 1.0
"""Seconds without use until memory of one size makes room for another size. Callers
that come so rarely lose little by touching fresh pages. For more frequent callers the
idle memory stays; otherwise alternating sizes would always replace each other."""

_STEP: Final = 64 * 1024  # sizes are rounded up to it, so that similar bodies share

_WORTH: Final = 64 * 1024
"""Bytes of an array below which to lend memory of the pool costs more than it saves."""


class _LeasedMemory(np.ndarray):
    """The type of the array below a lease; see `lend`."""


class _Lease(np.ndarray):
    """The array that all arrays of a body are views of; its finalizer ends the loan."""


def lend(memory: np.ndarray, ended: Callable[..., object], what: object) -> memoryview:
    """Lends ``memory`` (uint8 [n]) until the last array or view made of it is
    collected.

    Then ``ended(what)`` is called, on any thread.
    """
    # numpy makes the base of a view the base of its base, so long as that has the type
    # of the view: two types of our own keep an array from skipping its lease.
    lease = memory.view(_LeasedMemory).view(_Lease)
    # At exit the memory goes with the process; a callback could only hold it up.
    weakref.finalize(lease, ended, what).atexit = False
    return lease.data


def trim() -> None:
    """Returns unused memory of the process to the system: glibc itself keeps the top of
    its heap, and never returns holes in it. Takes milliseconds, and the kernel has to
    provide pages again when they are used."""
    with suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True)
class _IdleMemory:
    """Idle memory of one size, and when that size was last used."""

    memories: list[np.ndarray] = field(default_factory=list)
    is_used: bool = True
    used_at: float = 0.0


class Pool:
    """Lends aligned memory, and keeps returned memory by size to lend it again. Leases
    may end on any thread."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._idle_bytes, self._leases = kept, 0, 0
        self._idle: dict[int, _IdleMemory] = {}
        self._now, self._full_at = 0.0, -1.0
        # Re-entrant: a collection that starts inside the lock may end a lease.
        self._lock = threading.RLock()

    def allocate(self, nbytes: int) -> memoryview:
        """Returns writable memory of ``nbytes`` bytes, aligned to 64 bytes.

        Raises:
            MemoryError: There is not enough memory.
        """
        size = -(-nbytes // _STEP) * _STEP
        memory = self._take(size)
        # The whole block comes back, whatever part of it the body took.
        return lend(memory[:nbytes], self._give_back, memory)

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an uninitialized array, as `np.empty` does. The memory of a small
        array does not come from the pool.

        Raises:
            MemoryError: There is not enough memory.
        """
        nbytes = math.prod((shape,) if isinstance(shape, int) else shape)
        nbytes *= dtype.itemsize
        if nbytes < _WORTH:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, self.allocate(nbytes))

    def age(self, now: float) -> None:
        """Frees idle memory of sizes that were not used for `SPARE` seconds. Call it at
        every tick."""
        self._now = now
        if not self._idle:
            return
        with self._lock:
            for size, idle in list(self._idle.items()):
                # `allocate` sets a flag alone, as it has no clock: the time of use is
                # that of the next tick.
                if idle.is_used:
                    idle.is_used, idle.used_at = False, now
                elif now - idle.used_at > SPARE:
                    self._drop(size)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"leases": self._leases, "idle_bytes": self._idle_bytes}

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            self._leases += 1
            idle = self._idle.get(size)
            # Marked even if none of this size is idle: the caller returns one soon.
            if idle is not None:
                idle.is_used = True
                if idle.memories:
                    self._idle_bytes -= size
                    return idle.memories.pop()
        fresh = np.empty(size + ALIGNMENT, np.uint8)
        start = -fresh.ctypes.data % ALIGNMENT
        return fresh[start : start + size]

    def _give_back(self, memory: np.ndarray) -> None:
        size = memory.nbytes
        with self._lock:
            self._leases -= 1
            # Not kept: the memory is freed with its last reference, here.
            if self._idle_bytes + size > self._kept and not self._make_room(size):
                return
            idle = self._idle.get(size)
            if idle is None:
                idle = self._idle[size] = _IdleMemory()
            idle.memories.append(memory)
            self._idle_bytes += size

    def _make_room(self, size: int) -> bool:
        """Frees idle memory of sizes that were not used for `STALE` seconds, least
        recently used first, until ``size`` bytes fit. Returns whether they fit."""
        if self._full_at == self._now:
            return False  # stale sizes were dropped at this time already
        stale = [
            (idle.used_at, other)
            for other, idle in self._idle.items()
            if not idle.is_used and self._now - idle.used_at > STALE
        ]
        for _, other in sorted(stale):
            self._drop(other)
            if self._idle_bytes + size <= self._kept:
                return True
        self._full_at = self._now
        return False

    def _drop(self, size: int) -> None:
        self._idle_bytes -= size * len(self._idle.pop(size).memories)


POOL: Final = Pool()
"""The pool of the process, which links and endpoints share."""
