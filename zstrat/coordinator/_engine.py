"""Where the user's threads and the loop thread meet: one lock around the queue.

The law of this file: the queue is touched, and values are settled, with `lock` held, by
whichever thread has something to say; nothing is done under it that can block or run
foreign code. A user's call is a short *attempt* under the lock that either succeeds,
raises, or says what to wait for; `_block` and `_await` repeat it, so the blocking and
the asynchronous coordinator share every decision.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from zstrat.errors import ClosedError, DeadlineExceededError, ZstratError
from zstrat.transport import Bell, LoopBell, ThreadBell

from ._queue import Closure, Effect, Ended, Phase, Queue
from ._values import AsyncRemoteValue, Kept, RemoteValue, RemoteValueStatus

if TYPE_CHECKING:
    import numpy as np

    from ._calls import ScheduledCall

T = TypeVar("T")
Ready = Callable[[], bool]
"""A quick look, under the lock, whether an attempt is worth repeating."""
Attempt = Callable[[], Ready | None]
"""Done if it returns None; else what to wait for before the next attempt."""

_NOT_READY = RemoteValueStatus.NOT_READY


class ClosureEngine:
    """The queue with its lock, and all who wait for it.

    Args:
        wake: Tells the loop that closures wait; returns at once, called seldom.
        cancel: Tells the loop to cancel what the workers have not begun.
        fence: Tells the loop to have the parameter servers end all steps below a
            number, and to ask which of some have been applied; it calls `fenced`.
        bring: Fetches a kept result, blocking; ``bring_async`` from any event loop.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        wake: Callable[[], object],
        cancel: Callable[[], object],
        fence: Callable[[int, list[int]], object],
        bring: Callable[[Kept], list[np.ndarray]],
        bring_async: Callable[[Kept], Awaitable[list[np.ndarray]]],
    ) -> None:
        self.lock = threading.Lock()
        self.queue = queue
        self.broken: ZstratError | None = None
        """Why nothing can be scheduled, for as long as that is so (a lost ps)."""
        self.deserted: ZstratError | None = None
        """Why work waits in vain: no worker was there for long."""
        self.hungry = True
        """The loop has taken all that waited: the next `put` must wake it."""
        self.bring, self.bring_async = bring, bring_async
        self._wake, self._cancel, self._fence = wake, cancel, fence
        self._wanted = 0
        self._over = 0
        """At the end: all steps below this one ended by themselves."""
        self._watchers: dict[Bell, Ready] = {}

    # ---- calls of the user -----------------------------------------------------------

    def put(self, call: ScheduledCall) -> RemoteValue:
        """Queues the call; blocks while the queue is full or an error is drained."""
        value = RemoteValue(self, call.result)
        closure = Closure(call, value, call.result.name, call.claims())
        if not self.put_nowait(closure):
            self._block(partial(self._try_put, closure), None, "schedule")
        return value

    async def put_async(self, call: ScheduledCall) -> AsyncRemoteValue:
        value = AsyncRemoteValue(self, call.result)
        closure = Closure(call, value, call.result.name, call.claims())
        if not self.put_nowait(closure):
            await self._await(partial(self._try_put, closure))
        return value

    def put_nowait(self, closure: Closure) -> bool:
        """Queues the closure if nothing is in the way."""
        with self.lock:
            if self.broken is not None or not self.queue.accepts:
                return False
            self._enqueue(closure)
        return True

    def join(self, timeout: float | None) -> None:
        """Waits for all that is scheduled so far."""
        with self.lock:
            mark = self.queue.steps.next
        self._block(partial(self._try_join, mark), timeout, "join")

    async def join_async(self) -> None:
        with self.lock:
            mark = self.queue.steps.next
        await self._await(partial(self._try_join, mark))

    def done(self) -> bool:
        """Whether nothing waits or runs; raises the pending error."""
        self._block(self._try_done, None, "done")
        return self.queue.is_idle

    async def done_async(self) -> bool:
        await self._await(self._try_done)
        return self.queue.is_idle

    def wait_value(self, value: RemoteValue, timeout: float | None) -> None:
        """Waits until the value is settled."""
        if value.state is not _NOT_READY:
            return
        with self.lock:
            if value.state is not _NOT_READY:
                return
            bell = ThreadBell()
            value._listen(bell)
        rang = False
        try:
            rang = bell.wait(timeout)
        finally:
            if not rang:  # who rings forgets the bell, and holds the lock just now
                with self.lock:
                    value._unlisten(bell)
        if not rang and value.state is _NOT_READY:
            raise DeadlineExceededError(f"fetch: {value!r} after {timeout} s")

    async def wait_value_async(self, value: RemoteValue) -> None:
        if value.state is not _NOT_READY:
            return
        with self.lock:
            if value.state is not _NOT_READY:
                return
            bell = LoopBell()
            value._listen(bell)
        try:
            await bell.future
        finally:
            with self.lock:
                value._unlisten(bell)

    def wait_until(self, ready: Ready, timeout: float, what: str) -> None:
        """Waits for something that a worker does; pending errors win."""
        with self.lock:
            self._wanted += 1
        try:
            self._wake()  # if nobody is there, the loop has to count the seconds
            self._block(partial(self._try_until, ready), timeout, what)
        finally:
            with self.lock:
                self._wanted -= 1

    @property
    def needs_worker(self) -> bool:
        """Whether somebody waits for something that only a worker can do."""
        return self._wanted > 0 or not self.queue.is_idle

    async def rest_async(self) -> None:
        """Waits until nothing runs, and nothing waits that may have run.

        Raises:
            PSUnavailableError, UnavailableError: That will not come to be.
        """
        await self._await(self._try_rest)

    # ---- the loop --------------------------------------------------------------------

    def settle(self, ended: Iterable[Ended]) -> None:
        """Tells the values of closures that the queue ended. Lock held."""
        for item in ended:
            item.closure.value._settle_error(item.error)

    def _blamed(self, ended: Iterable[Ended]) -> list[Ended]:
        """Of cancelled closures those that had begun when a parameter server was lost:
        what they did on it is not known, so they are not said to have done nothing."""
        broken = self.broken
        return [
            item
            if broken is None or not item.closure.attempt
            else Ended(item.closure, broken)
            for item in ended
        ]

    def notify(self) -> None:
        """Wakes those whose condition holds now. Lock held."""
        if not self._watchers:
            return
        for bell in [bell for bell, ready in self._watchers.items() if ready()]:
            del self._watchers[bell]
            bell.ring()

    def fail(self, error: ZstratError, *, lasting: bool = False) -> None:
        """An error that belongs to no closure; ``lasting``: until `mend`."""
        with self.lock:
            if lasting:
                self.broken = error
            self.queue.fail(error)
            self.notify()

    def mend(self) -> None:
        """What was broken works again."""
        with self.lock:
            self.broken = None
            self.notify()

    def fenced(self, applied: Mapping[int, Effect]) -> None:
        """All steps are over; see `Queue.fenced`."""
        with self.lock:
            self.settle(self.queue.fenced(applied))
            self.notify()

    def close(self, cause: str) -> None:
        """Cancels everything, what runs included: its outcome is not waited for."""
        with self.lock:
            if self.queue.phase is Phase.CLOSED:
                return
            self._over = self.queue.steps.low_water
            self.settle(self.queue.close(cause))
            self.notify()

    # ---- attempts, lock held ---------------------------------------------------------

    def _enqueue(self, closure: Closure) -> None:
        """Ctrl-C may strike between any two of these lines: `hungry` is taken back
        last, so that a closure in the queue of which the loop does not know yet is seen
        by the next one who looks (`_remind`)."""
        self.queue.put(closure)
        if self.hungry:
            self._wake()
            self.hungry = False

    def _remind(self) -> None:
        """Wakes the loop if somebody was interrupted before doing so."""
        if self.hungry and self.queue.waiting_fresh:
            self._wake()

    def _try_done(self) -> Ready | None:
        ready = self._try_raise()
        if ready is None:
            self._remind()
        return ready

    def _try_raise(self) -> Ready | None:
        queue = self.queue
        if queue.phase is Phase.FAILED:
            self.settle(self._blamed(queue.drain()))
            self.hungry = True
            self._cancel()
        if queue.phase is Phase.CLOSED:
            raise ClosedError("the coordinator is shut down; make a new one")
        if queue.phase is Phase.DRAINING and not queue.is_quiet:
            return lambda: queue.phase is not Phase.DRAINING or queue.is_quiet
        self._fence_if_quiet()
        if queue.phase is Phase.FENCING:
            return lambda: queue.phase is not Phase.FENCING
        if queue.phase is Phase.FENCED:
            error = queue.take_error()
            self.notify()
            raise error.with_traceback(None)
        if self.broken is not None:
            raise self.broken.with_traceback(None)
        return None

    def _fence_if_quiet(self) -> None:
        if self.queue.is_quiet:
            self._fence(self.queue.steps.next, self.queue.fence())

    def _try_rest(self) -> Ready | None:
        queue = self.queue
        self._fence_if_quiet()
        if queue.is_at_rest:
            return None
        for error in (self.broken, self.deserted):
            if error is not None:
                raise error.with_traceback(None)
        return lambda: bool(
            queue.is_at_rest or queue.is_quiet or self.broken or self.deserted
        )

    def _try_put(self, closure: Closure) -> Ready | None:
        ready = self._try_raise()
        if ready is not None:
            return ready
        queue = self.queue
        if not queue.accepts:
            return lambda: queue.accepts or queue.phase is not Phase.OPEN
        self._enqueue(closure)
        return None

    def _try_join(self, mark: int) -> Ready | None:
        queue = self.queue
        if queue.phase is Phase.CLOSED and self._over >= mark:
            return None
        ready = self._try_raise()
        if ready is not None:
            return ready
        if queue.steps.low_water >= mark:
            return None
        return lambda: queue.steps.low_water >= mark or queue.phase is not Phase.OPEN

    def _try_until(self, ready: Ready) -> Ready | None:
        waiting = self._try_raise()
        if waiting is not None:
            return waiting
        if ready():
            return None
        return lambda: ready() or self.queue.phase is not Phase.OPEN

    # ---- the two ways of waiting -----------------------------------------------------

    def _block(self, attempt: Attempt, timeout: float | None, what: str) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self.lock:
                ready = attempt()
                if ready is None:
                    return
                self._remind()
                bell = ThreadBell()
                self._watchers[bell] = ready
            try:
                left = None if deadline is None else deadline - time.monotonic()
                if not bell.wait(left):
                    raise DeadlineExceededError(self._late(what, timeout))
            finally:
                with self.lock:
                    self._watchers.pop(bell, None)

    async def _await(self, attempt: Attempt) -> None:
        while True:
            with self.lock:
                ready = attempt()
                if ready is None:
                    return
                self._remind()
                bell = LoopBell()
                self._watchers[bell] = ready
            try:
                await bell.future
            finally:
                with self.lock:
                    self._watchers.pop(bell, None)

    def _late(self, what: str, timeout: float | None) -> str:
        queue = self.queue
        return (
            f"{what} did not end within {timeout} s: {queue.running} closures run and "
            f"{queue.queued} wait; they go on"
        )
