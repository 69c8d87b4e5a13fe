"""Virtual time: the event loops of all simulated processes, run by one queue of events.

Time stands still while a process computes and jumps to the next event when none does.
The law of the file: what happens, and in which order, follows from the seed alone. So
events have one order, futures and tasks are hashed by their number instead of their
address, and whatever is random is drawn from `World.random`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import deque
from contextvars import Context, copy_context
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, cast, final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

START: Final = 1000.0
"""Seconds: not 0, where differences to "never" could be mistaken."""

TURN: Final = 2e-5
"""Seconds that a loop takes for what is ready at once."""

SPINNING: Final = 200_000
"""Events without time passing, after which a process is said to spin."""

_numbers = itertools.count()


class SpinningError(AssertionError):
    """Time does not pass: some process goes round and round."""


class StuckError(AssertionError):
    """Nothing will ever happen any more, and somebody waits."""


@final
class Call:
    """A handle of `VirtualLoop`: what `asyncio.Handle` is elsewhere."""

    __slots__ = ("_args", "_callback", "_context", "_loop", "_when")

    def __init__(
        self,
        callback: Callable[..., object] | None,
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context | None,
        when: float,
    ) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._when = when

    def cancel(self) -> None:
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        return self._callback is None

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        callback = self._callback
        if callback is None:
            return
        try:
            self._context.run(callback, *self._args)
        except Exception as error:  # to the process, as a defect
            words = f"an exception in {callback!r}"
            self._loop.call_exception_handler({"message": words, "exception": error})


class VirtualFuture(asyncio.Future[Any]):
    """A future whose place in a set does not depend on its address."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._number = next(_numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualTask(asyncio.Task[Any]):
    """A task of a virtual loop, hashed by its number, too."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        loop: asyncio.AbstractEventLoop,
        name: str | None,
        context: Context | None,
    ) -> None:
        self._number = next(_numbers)  # asyncio hashes it at once
        super().__init__(coroutine, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number


@final
class Meter:
    """What each process computes, in seconds of the processor: of the parts that are
    real."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By the name of the process."""
        self.events: dict[str, int] = {}

    def measure(self, loop: VirtualLoop, call: Call | None) -> None:
        """Lets a process do what is due."""
        began = time.thread_time()
        loop.step(call)
        spent = time.thread_time() - began
        self.seconds[loop.name] = self.seconds.get(loop.name, 0.0) + spent
        self.events[loop.name] = self.events.get(loop.name, 0) + 1


@final
class World:
    """Time, chance, and what will happen."""

    def __init__(self, seed: int) -> None:
        self.now = START
        self.random: Final = random.Random(seed)
        self._events: list[tuple[float, int, VirtualLoop | None, Any]] = []
        self._order = itertools.count()
        self.events = 0
        """So many have happened."""
        self.meter: Meter | None = None
        """Of what processes compute, if somebody wants to know."""
        self.loops: Final[list[VirtualLoop]] = []
        """Of all processes that ever were: nothing of them is collected while it runs,
        as the collector's hour is no matter of the seed."""

    def at(self, when: float, happens: Callable[[], object]) -> None:
        """Has something happen to the world itself."""
        heapq.heappush(self._events, (when, next(self._order), None, happens))

    def put(self, when: float, loop: VirtualLoop, call: Call | None) -> None:
        """Has a process do something; None: what is ready there."""
        heapq.heappush(self._events, (when, next(self._order), loop, call))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Lets time pass until that moment, or until it is over.

        Raises:
            SpinningError, StuckError: Time does not pass, or nothing happens any more.
        """
        events, spins = self._events, 0
        while not is_over():
            if not events:
                raise StuckError("nothing will ever happen again")
            if events[0][0] > until:
                return
            when, _, loop, call = heapq.heappop(events)
            spins = 0 if when > self.now else spins + 1
            if spins > SPINNING:
                raise SpinningError(f"at {self.now - START:.6f} s: {loop} {call}")
            self.now = max(self.now, when)
            if loop is None:
                self.events += 1
                call()
            elif call is None or not call.cancelled():
                self.events += 1
                if self.meter is None:
                    loop.step(call)
                else:
                    self.meter.measure(loop, call)


@final
class VirtualLoop:
    """The loop of one process: what asyncio and zstrat call of one.

    Args:
        blame: Told of what nobody has handled.
    """

    def __init__(
        self, world: World, name: str, blame: Callable[[dict[str, Any]], None]
    ) -> None:
        self.validate: Callable[[], None] = _nothing
        """Called after each event; raises AssertionError if something cannot be."""
        self.world, self.name = world, name
        self._blame = blame
        self._as_loop = cast("asyncio.AbstractEventLoop", self)
        self._ready: deque[Call] = deque()
        self._is_due = False
        """What is ready will be run."""
        self._is_frozen = self._is_over = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._late: list[Call | None] = []
        """What was to happen while it was frozen."""
        world.loops.append(self)

    def __repr__(self) -> str:
        return f"<loop of {self.name}>"

    def step(self, call: Call | None) -> None:
        """One event, and what was ready before it."""
        if self._is_over:
            return
        if self._is_frozen:
            self._late.append(call)
            return
        asyncio._set_running_loop(self._as_loop)
        try:
            if call is not None:
                call.run()
            else:
                self._is_due = False
                ready = self._ready
                for _ in range(len(ready)):
                    ready.popleft().run()
        finally:
            asyncio._set_running_loop(None)
        self._see()
        try:
            self.validate()
        except AssertionError as error:
            self._blame({"message": "state after an event", "exception": error})

    def freeze(self) -> None:
        """SIGSTOP: nothing runs; what happens meanwhile waits."""
        self._is_frozen = True

    def thaw(self) -> None:
        """SIGCONT: all that has waited happens now, timers or messages first."""
        if not self._is_frozen or self._is_over:
            return
        self._is_frozen = False
        late, self._late = self._late, []
        if self.world.random.random() < 0.5:
            first = self.world.random.random() < 0.5
            late.sort(key=lambda call: (call is not None, _is_timer(call) != first))
        for call in late:
            self.world.put(self.world.now, self, call)

    def end(self) -> None:
        """SIGKILL: nothing of it ever runs again."""
        self._is_over = True

    def arrive(self, when: float, happens: Callable[..., object], *args: Any) -> None:
        """Something comes from outside, at that time."""
        self.world.put(when, self, Call(happens, args, self, None, 0.0))

    def _see(self) -> None:
        if self._ready and not self._is_due:
            self._is_due = True
            self.world.put(self.world.now + TURN, self, None)

    def time(self) -> float:
        return self.world.now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Call:
        call = Call(callback, args, self, context, self.world.now)
        self._ready.append(call)
        if not self._is_due:
            self._see()
        return call

    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Call:
        call = Call(callback, args, self, context, when)
        self.world.put(max(when, self.world.now), self, call)
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Call:
        return self.call_at(self.world.now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return VirtualFuture(self._as_loop)

    def waits(self) -> list[str]:
        """Where the tasks of the process wait, in words."""
        found = []
        for task in self._tasks:
            where, inner = [], cast("Any", task.get_coro())
            while isinstance(inner, CoroutineType) and inner.cr_frame is not None:
                where.append(f"{inner.__qualname__}:{inner.cr_frame.f_lineno}")
                inner = inner.cr_await
            found.append(f"{task.get_name()} in {' > '.join(where)}")
        return found

    def create_task(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        if self._is_over:  # what dies may wish for anything, and gets nothing
            coroutine.close()
            return cast("asyncio.Task[Any]", VirtualFuture(self._as_loop))
        task = VirtualTask(coroutine, self._as_loop, name, context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self._as_loop

    def is_closed(self) -> bool:
        return self._is_over

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_over:
            self._blame(context)


def _nothing() -> None:
    """Checks nothing."""


def _is_timer(call: Call | None) -> bool:
    return call is not None and call.when() > 0.0
