"""How a rank waits for another one on its host: it looks again, or sleeps on a futex.

*Sleep.* A futex is Linux's sleep until another process has changed a word of shared
memory. The word is the low half of a 64-bit counter that only its owner writes; whoever
has it mapped, read-only too, may sleep on it and may wake all who do. No descriptor, no
name, nothing to clean up when a process is killed.

Order of memory: x86 keeps stores in order and loads in order, and CPython calls between
any two of them what no compiler looks through. Machines that order weakly (aarch64)
need a barrier between the data and the counter that announces them, on both sides:
`fence`. It asks the kernel to wake nobody, which begins with a full barrier
(``smp_mb`` before it looks for who sleeps, kernel/futex/waitwake.c since Linux 3.14).

*Look.* Looking is right while the other rank runs on another core and is about to
arrive: a sleep and a wake-up cost more than what is left to wait. It is wrong when both
take turns on one core, or when something else wants the cores: then every look is taken
from whom is waited for. Nobody can know; a rank goes by what its last waits have shown.

The same 64 MB of 2 ranks on 2 cores take 5.5 ms with looks, 10 with sleeps; beside a
process that keeps one core busy, 11 ms with sleeps and 40 with looks (100 if looks also
yield the core); going by the last waits 5.5 and 11. (`benchmarks.raw_shared`)
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import Final

import numpy as np

_MACHINE: Final = platform.machine().lower()
_NUMBERS: Final = {"x86_64": 202, "amd64": 202, "aarch64": 98, "riscv64": 98}
"""futex in the kernel's tables of system calls, for machines of 64 bits that are
little-endian, so that the low half of a counter is at its address."""

IS_AVAILABLE: Final = sys.platform == "linux" and _MACHINE in _NUMBERS

_NUMBER: Final = _NUMBERS.get(_MACHINE, -1)
_ORDERS_STORES: Final = _MACHINE in ("x86_64", "amd64")

_WAKE: Final = 1
_WAIT_BITSET: Final = 9  # the wait whose end is a point in time, not a duration
_ALL: Final = 2**31 - 1
_ANY_BIT: Final = 2**32 - 1
_EXPECTED: Final = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

_FOREVER: Final = 2.0**31
"""The longest that is asked for: the kernel refuses an infinite time."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _syscall() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,  # the word
        ctypes.c_int,
        ctypes.c_uint32,  # what it holds, or how many to wake
        ctypes.c_void_p,  # the end
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    return call


_futex: Final = _syscall() if IS_AVAILABLE else None
_NOBODYS: Final = np.zeros(1, np.uint64)
_NOBODYS_ADDRESS: Final = _NOBODYS.ctypes.data


def sleep_while(address: int, value: int, deadline: float) -> None:
    """Sleeps while the counter at ``address`` is ``value``, until somebody wakes it, a
    signal comes, or `time.monotonic` is ``deadline``. May wake up for nothing.

    The caller has to have the memory mapped; other Python threads run meanwhile.

    Raises:
        OSError: The kernel has no futex on such memory.
    """
    assert _futex is not None
    seconds, fraction = divmod(min(max(deadline, 0.0), _FOREVER), 1)
    until = _Timespec(int(seconds), int(fraction * 1e9))
    low = value & 0xFFFFFFFF
    end = ctypes.addressof(until)
    if _futex(_NUMBER, address, _WAIT_BITSET, low, end, None, _ANY_BIT) == -1:
        number = ctypes.get_errno()
        if number not in _EXPECTED:
            raise OSError(number, f"futex: {os.strerror(number)}")


def wake(address: int) -> None:
    """Wakes all processes and threads that sleep on the counter at ``address``."""
    assert _futex is not None
    _futex(_NUMBER, address, _WAKE, _ALL, None, None, 0)


def fence() -> None:
    """Stores and loads before it stay before those after it; see the module."""
    if not _ORDERS_STORES:
        wake(_NOBODYS_ADDRESS)


LOOKS: Final = 2000
"""60 µs: what a chunk of 1 MiB takes, and twice a sleep and a wake-up."""

YIELDS: Final = 20
"""Where ranks outnumber cores each look yields the core, to run who is waited for."""

SLOW: Final = 0.0005
"""Seconds of looking after which it was not the other rank that ran meanwhile."""

MISSES: Final = 4
"""Waits in a row that looks did not end, until there is a rest from looking."""

REST: Final = 64
"""Waits without looks: then one is tried again, at the cost of 1 µs for each."""


class SpinPolicy:
    """The looks of one rank. ``is_crowded``: there are more ranks than cores."""

    def __init__(self, is_crowded: bool) -> None:
        self.yields = is_crowded
        self._looks = YIELDS if is_crowded else LOOKS
        self._misses = self._rest = 0

    def looks(self) -> int:
        """How many to take in the wait that begins now."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._looks

    def ended(self, arrived: bool, took: float) -> None:
        """The looks of a wait are over, after ``took`` seconds."""
        if arrived and took <= SLOW:
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= MISSES:
            # The try after the rest is enough to rest again.
            self._rest, self._misses = REST, MISSES - 1
