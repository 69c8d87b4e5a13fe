"""What lives in this process and can say how it is: tasks, sessions, programs.

Each lives on the loop of its own thread; who asks sits on another one, which turns
although that one is frozen, and can say so. A loop is asked by a call that it has to
come round to: at most one for each question is on its way to it, however many ask. What
takes long is put together where it was asked for, if its owner says that it may be.

Whom a task serves hears of it without asking (`TelemetryNotices`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar, final

from zstrat.errors import BusyError, PeerLostError
from zstrat.telemetry import RECENT, log_file, resident_bytes
from zstrat.transport._pump import moved_bytes, transports
from zstrat.wire import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.wire import Message, PlainTree


T = TypeVar("T")


class Reporting(Protocol):
    """Something of this process that can say how it is. It is asked on its own loop,
    unless it was registered as one that may be asked from ``anywhere``."""

    def readiness(self) -> str:
        """Why it could not be used now; "" if it can be."""
        ...

    def statistics(self) -> dict[str, PlainTree]:
        """What `zstrat status --json` shows of it."""
        ...


class SharedAnswer(Generic[T]):
    """The answer of one loop to one question, shared by all who ask meanwhile."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, answer: Callable[[], T]
    ) -> None:
        self._loop, self._answer = loop, answer
        self._coming: Future[T] | None = None

    async def ask(self, timeout: float) -> T:
        """The answer, from a call that the loop comes round to within ``timeout``
        seconds. Whoever asks meanwhile shares that call.

        Raises:
            TimeoutError: The loop has not come round to it in so many seconds.
            RuntimeError: The loop is closed.

        Cancellation: the others who ask get their answer all the same.
        """
        if self._coming is None or self._coming.done():
            coming: Future[T] = Future()
            self._loop.call_soon_threadsafe(self._fill, coming)
            self._coming = coming
        wait = asyncio.wrap_future(self._coming)
        async with asyncio.timeout(timeout):
            # Shielded: the others who ask wait for the same future.
            return await asyncio.shield(wait)

    def _fill(self, coming: Future[T]) -> None:
        try:
            coming.set_result(self._answer())
        except Exception as error:  # raised again where it was asked for
            coming.set_exception(error)


class RegisterEntry:
    """Something that can say how it is, with the way to ask it. Does not keep it
    alive."""

    def __init__(
        self,
        owner: Reporting,
        name: str,
        loop: asyncio.AbstractEventLoop,
        anywhere: bool,
    ) -> None:
        self.name, self.loop = name, loop
        self._owner = weakref.ref(owner)
        self._anywhere = anywhere
        self.readiness = SharedAnswer(loop, self._readiness)
        self._on_loop = SharedAnswer(loop, self._statistics)

    @property
    def is_over(self) -> bool:
        return self.loop.is_closed() or self._owner() is None

    def is_of(self, owner: Reporting) -> bool:
        return self._owner() is owner

    async def statistics(self, timeout: float) -> dict[str, PlainTree]:
        """What it tells of itself, if its loop turns.

        Raises:
            TimeoutError, RuntimeError: As `SharedAnswer.ask`.
        """
        if not self._anywhere:
            return await self._on_loop.ask(timeout)
        await self.readiness.ask(timeout)
        return self._statistics()

    def _readiness(self) -> str:
        owner = self._owner()
        return "it has ended" if owner is None else owner.readiness()

    def _statistics(self) -> dict[str, PlainTree]:
        owner = self._owner()
        return {} if owner is None else owner.statistics()


class Register:
    """All that is registered in this process. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[RegisterEntry] = []

    def add(self, entry: RegisterEntry) -> None:
        # Those that are over go here, too, each with its loop: in most processes nobody
        # ever asks, and a program may make a session in each cell of a notebook.
        with self._lock:
            self._all = [each for each in self._all if not each.is_over]
            self._all.append(entry)

    def remove(self, owner: Reporting) -> None:
        with self._lock:
            self._all = [each for each in self._all if not each.is_of(owner)]

    def present(self) -> list[RegisterEntry]:
        """The entries whose loop is not closed and whose owner still lives."""
        with self._lock:
            self._all = [each for each in self._all if not each.is_over]
            return list(self._all)

    def forget(self) -> None:
        """After a fork: the loops are those of the parent."""
        self._lock, self._all = threading.Lock(), []


REGISTER: Final = Register()
os.register_at_fork(after_in_child=REGISTER.forget)


def register(
    owner: Reporting,
    name: str,
    loop: asyncio.AbstractEventLoop,
    *,
    anywhere: bool = False,
) -> None:
    """From now on ``owner``, which lives on ``loop``, is asked how it is, if somebody
    asks this process; under ``name``, as in "ps:0".

    Args:
        anywhere: Its ``statistics`` are called on the thread that asks, when its loop
            has come round: for what is told from any thread, and takes long.
    """
    REGISTER.add(RegisterEntry(owner, name, loop, anywhere))


def unregister(owner: Reporting) -> None:
    """Forgets an owner that has ended. Owners that are collected, or whose loop is
    closed, are forgotten by themselves."""
    REGISTER.remove(owner)


EVERY: Final = 1.0


@final
class TelemetryNotices:
    """Tells one peer how a task is, about once a second, for as long as that changes.
    Of one session, on the loop.

    It rests when nothing has happened for as long as a window is, and rates are zero,
    and no step is under way: by then everybody knows. A peer that does not read misses
    what it would have been told.

    Args:
        values: What is told.
        notify: Sends it, or raises as `Link.notify`.
    """

    def __init__(
        self,
        values: Callable[[], Mapping[str, PlainTree]],
        notify: Callable[[Message], None],
    ) -> None:
        self._values, self._notify = values, notify
        self._loop: Final = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0
        """How often it is told before this rests, if nothing happens."""
        self._is_closed = False

    def touch(self) -> None:
        """Something has happened."""
        self._left = RECENT + 1
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(EVERY, self._tell)

    def close(self) -> None:
        """Nothing is told any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        self._timer = None
        values = dict(self._values())
        with suppress(BusyError, PeerLostError):  # nobody waits for it
            self._notify(Telemetry(values))
        self._left = max(0, self._left - 1)
        if (self._left or _goes_on(values)) and not self._is_closed:
            self._timer = self._loop.call_later(EVERY, self._tell)


def _goes_on(values: Mapping[str, PlainTree]) -> bool:
    """Bytes do not count: this sends some itself."""
    rates = values.get("rates")
    counted = ("steps_per_s", "pulls_per_s", "pushes_per_s")
    goes_on = isinstance(rates, dict) and any(map(rates.get, counted))
    return goes_on or bool(values.get("now"))


def process_report() -> dict[str, PlainTree]:
    """What a task reports of its process: ``process``, ``transports`` and ``log``."""
    memory, seconds = resident_bytes(), time.process_time()
    return {
        "process": {"memory": memory, "cpu_seconds": seconds},
        "transports": {
            name: dict(transport) for name, transport in transports().items()
        },
        "log": log_file(),
    }


def process_totals() -> dict[str, float]:
    """The totals of this process whose rates a task reports."""
    got, sent = moved_bytes()
    cores = time.process_time()
    return {"bytes_in_per_s": got, "bytes_out_per_s": sent, "cores": cores}
