"""A barrier in the memory that ranks of one host share: all ranks take each step of a
call together.

Every rank counts its steps in a word of its own memory that the other ranks can read.
For a step a rank writes data into its own slot, a buffer in its memory
(`_shm_collectives`). Then it *posts* the step (stores its number in the word), waits
until all other ranks have posted it, and reads their slots. Each rank has two slots,
which it uses alternately. One law makes every collective operation here safe, whatever
was called before:

    the slot of step s is read by others only before they post step s + 1.

So a rank that has seen all ranks post s + 1 may write the slot of step s + 2, which is
that of step s. All ranks make the same calls of the same sizes, hence the same steps;
the ranks compare digests of their calls at the first step of each call.

A rank that waits first polls the word of the other rank for a moment, as that rank
mostly is just as far (`SpinPolicy`), and then sleeps until the word changes. A rank
that dies wakes no other rank: messages report its death, and the other ranks call
`abort`.

*Order of memory.* A rank that sees a step posted has to see the slot that was written
before it. x86 keeps stores in order, and loads in order, and between any two of them
CPython makes calls that no compiler optimizes across. Processors that order memory
weakly (aarch64) need a memory barrier on both sides, between the slot and the word that
announces it: `fence`.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.collectives._engine import Differs, Overdue
from zstrat.errors import ClosedError
from zstrat.threads import Latch

if TYPE_CHECKING:
    from collections.abc import Sequence

_MACHINE: Final = platform.machine().lower()
_NUMBERS: Final = {"x86_64": 202, "amd64": 202, "aarch64": 98, "riscv64": 98}
"""Number of the futex system call by machine, for machines of 64 bits that are
little-endian, so that the low half of a counter is at the counter's address."""

IS_AVAILABLE: Final = sys.platform == "linux" and _MACHINE in _NUMBERS

_NUMBER: Final = _NUMBERS.get(_MACHINE, -1)
_ORDERS_STORES: Final = _MACHINE in ("x86_64", "amd64")

_WAKE: Final = 1
_WAIT_BITSET: Final = 9  # the wait whose end is a point in time, not a duration
_ALL: Final = 2**31 - 1
_ANY_BIT: Final = 2**32 - 1
_EXPECTED: Final = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

_FOREVER: Final = 2.0**31
"""Most seconds of a sleep: the kernel refuses an infinite time."""


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
_PRIVATE_WORD: Final = np.zeros(1, np.uint64)
_PRIVATE_ADDRESS: Final = _PRIVATE_WORD.ctypes.data
"""Address of a word on which no thread sleeps."""


def sleep_while(address: int, value: int, deadline: float) -> None:
    """Sleeps while the counter at ``address`` is ``value``, until a thread wakes it, a
    signal comes, or `time.monotonic` is ``deadline``. May wake up for nothing.

    The caller has to have the memory mapped; other Python threads run meanwhile.

    Raises:
        OSError: The kernel has no futex on such memory.
    """
    assert _futex is not None
    seconds, fraction = divmod(min(max(deadline, 0.0), _FOREVER), 1)
    until = _Timespec(int(seconds), int(fraction * 1e9))
    # A futex is 32 bits: the low half of the counter, which is enough to see a change.
    low = value & 0xFFFFFFFF
    end = ctypes.addressof(until)
    if _futex(_NUMBER, address, _WAIT_BITSET, low, end, None, _ANY_BIT) == -1:
        number = ctypes.get_errno()
        if number not in _EXPECTED:
            raise OSError(number, f"futex: {os.strerror(number)}")


def wake(address: int) -> None:
    """Wakes all threads of all processes that sleep on the counter at ``address``."""
    assert _futex is not None
    _futex(_NUMBER, address, _WAKE, _ALL, None, None, 0)


def fence() -> None:
    """Keeps loads and stores that come before the call before those that come after it,
    as a full memory barrier."""
    if not _ORDERS_STORES:
        # To wake nobody begins with a full barrier: smp_mb, before the kernel looks for
        # sleepers (kernel/futex/waitwake.c, since Linux 3.14).
        wake(_PRIVATE_ADDRESS)


LOOKS: Final = 2000
"""Number of polls before a sleep. They take 60 µs, as long as a chunk of 1 MiB takes,
and twice as long as a sleep and a wake-up."""

YIELDS: Final = 20
"""Number of polls before a sleep if ranks outnumber cores: each poll yields the core to
the ranks that are waited for."""

SLOW: Final = 0.0005
"""Seconds of polling above which the polls took the core that the other rank needed."""

MISSES: Final = 4
"""Number of waits in a row that polling did not end, after which a rank stops
polling."""

REST: Final = 64
"""Number of waits without polling until a rank tries polling again: the 60 µs of the
try are then 1 µs per wait."""


class SpinPolicy:
    """Decides how often a rank polls before it sleeps, by whether polling ended its
    last waits. ``is_crowded``: there are more ranks than cores."""

    def __init__(self, is_crowded: bool) -> None:
        self.yields = is_crowded
        self._looks = YIELDS if is_crowded else LOOKS
        self._misses = self._rest = 0

    def looks(self) -> int:
        """Returns how often to poll in the wait that begins now."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._looks

    def ended(self, arrived: bool, took: float) -> None:
        """Notes whether the polling of a wait, which took ``took`` seconds, ended the
        wait."""
        # A slow success is a miss: the looks took the core that the other rank needed.
        if arrived and took <= SLOW:
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= MISSES:
            # The try after the rest is enough to rest again.
            self._rest, self._misses = REST, MISSES - 1


_NAP: Final = 1.0
"""Most seconds of one sleep. A Ctrl-C just before the system call does not end the
sleep, as Python runs signal handlers between its own instructions only: it is handled
after the sleep."""

_RING_AGAIN: Final = 0.001
"""Seconds until `_ring` wakes a thread again: some hundred times what a thread needs
from its last look at the error to its sleep."""


class ControlWords(NamedTuple):
    """The control words of a rank, at ``address``: ``words[0]`` is the last step that
    the rank has posted, ``words[1]`` and ``words[2]`` are digests of its calls, used
    alternately."""

    rank: int
    words: memoryview
    address: int


class ShmBarrier:
    """Takes the steps of one rank, on one thread; `abort` and `waits` are for any
    thread."""

    def __init__(
        self, own: ControlWords, others: Sequence[ControlWords], cores: int
    ) -> None:
        self._own, self._others = own, tuple(others)
        self._spin = SpinPolicy(is_crowded=len(others) >= cores)
        self.step = 0
        """The last step that this rank has posted; its parity selects the slot."""
        self._calls, self._about, self._is_checked = 0, 0, True
        self._deadline = math.inf
        self._error: Exception | None = None
        self._asleep: ControlWords | None = None
        self._is_answered = Latch()
        """Opened when a call that slept has noticed the error of `abort`."""
        self.waited: Final = dict.fromkeys([other.rank for other in others], 0.0)
        """Seconds of waits so far, by the rank that was waited for. From any thread."""

    def begin(self, about: int, deadline: float) -> None:
        """Begins a call, of which ``about`` is a digest. If the call is interrupted,
        call `cut_off`.

        Raises:
            Exception: The error that ended the barrier before.
        """
        if self._error is not None:
            raise self._error
        # In turn: a rank that is ahead by a call must not change what others compare.
        # It cannot be ahead by two, as every call has a step.
        self._calls += 1
        self._own.words[1 + self._calls % 2] = about
        self._about, self._is_checked, self._deadline = about, False, deadline

    def cut_off(self, error: BaseException) -> None:
        """Ends the barrier for good after a call was interrupted by ``error``, because
        the ranks are no longer at the same step."""
        if isinstance(error, Exception):
            self._error = self._error or error
        else:  # Ctrl-C in a blocking call
            self._error = ClosedError(
                f"a call was interrupted by {type(error).__name__}"
            )

    def post(self) -> None:
        """Posts the next step, which announces that this rank's slot is written. The
        other slot may be written after `wait`."""
        self.step += 1
        fence()
        # After the fence: a rank that sees the step has to see the slot, too.
        self._own.words[0] = self.step
        wake(self._own.address)

    def wait(self) -> None:
        """Waits until all other ranks have posted this step.

        Raises:
            Overdue: Some have not posted it by the deadline of the call.
            Differs: A rank makes a different call.
            Exception: The error that `abort` was given.
        """
        for other in self._others:
            if other.words[0] < self.step:
                self._wait_for(other)
        # Its word was seen, so what it wrote before is seen from here on.
        fence()
        # Once a call: its later steps belong to what was compared.
        if not self._is_checked:
            self._check()

    def meet(self) -> None:
        """Posts a step, and waits until all other ranks have posted it."""
        self.post()
        self.wait()

    def waits(self) -> tuple[int, ...]:
        """Returns the ranks that have not posted the present step of this rank. From
        any thread."""
        posted = self._own.words[0]
        return tuple(other.rank for other in self._others if other.words[0] < posted)

    def abort(self, error: Exception) -> None:
        """Makes the present call and later calls raise ``error``, or an earlier error.
        From any thread."""
        # The first reason stays: later ones follow from it.
        self._error = self._error or error
        other = self._asleep
        if other is not None:
            # On a separate thread: it rings until it is answered, and `abort` must
            # not wait.
            ring = threading.Thread(
                target=self._ring, args=(other,), name="zstrat-ring", daemon=True
            )
            ring.start()

    def _ring(self, other: ControlWords) -> None:
        """Wakes the thread of this rank that sleeps on the word of ``other``, again and
        again until it reacts.

        A wake-up between that thread's last look at the error and its sleep would be
        lost: only a change of the word would keep the thread awake, and the word
        belongs to another rank.
        """
        while self._asleep is other:
            wake(other.address)
            self._is_answered.wait(_RING_AGAIN)

    def _wait_for(self, other: ControlWords) -> None:
        began, looks = time.monotonic(), self._spin.looks()
        try:
            if not looks or not self._look(other, looks, began):
                self._sleep_on(other)
        finally:
            self.waited[other.rank] += time.monotonic() - began

    def _sleep_on(self, other: ControlWords) -> None:
        words, step = other.words, self.step
        try:
            while (posted := words[0]) < step:
                self._asleep = other  # before the look at the error: see `abort`
                if self._error is not None:
                    self._is_answered.open()
                    raise self._error
                now = time.monotonic()
                if now >= self._deadline:
                    raise Overdue(self.waits())
                until = min(self._deadline, now + _NAP)
                sleep_while(other.address, posted, until)
        finally:
            self._asleep = None

    def _look(self, other: ControlWords, looks: int, began: float) -> bool:
        words, step, yields = other.words, self.step, self._spin.yields
        arrived = False
        for _ in range(looks):
            if words[0] >= step:
                arrived = True
                break
            if yields:
                os.sched_yield()
        self._spin.ended(arrived, time.monotonic() - began)
        return arrived

    def _check(self) -> None:
        self._is_checked = True
        for other in self._others:
            about = other.words[1 + self._calls % 2]
            if about != self._about:
                raise Differs(other.rank, about)
