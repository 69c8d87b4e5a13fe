"""Where the user's threads and the loop thread meet: one lock around the queue.

The law of this file: the queue is changed, and values are settled, with `lock` held, by
whichever thread has something to say; single numbers may be read without it. Nothing is
done under it that can block or run foreign code. A user's call is a short *attempt*
under the lock that either succeeds, raises, or says what to wait for; `Waiters` repeats
it, so the blocking and the asynchronous coordinator share every decision.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from zstrat.errors import ClosedError, ZstratError
from zstrat.threads import ThreadBell

from ._queue import Closure, Effect, Ended, Queue, QueuePhase
from ._values import AsyncRemoteValue, Kept, RemoteValue
from ._waiting import Cancelling, LoopSide, Ready, Waiters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    import numpy as np

    from zstrat.telemetry.timeline import ProgramNotes

    from ._calls import ScheduledCall
    from ._pending_errors import CallSite

INTERRUPT_SECONDS: Final = 1.0
"""Seconds that an interrupt waits for the loop to say how much it has cancelled."""


class ClosureEngine:
    """The queue with its lock, and the calls of the user that wait for it."""

    def __init__(self, queue: Queue, loop: LoopSide) -> None:
        self.loop = loop
        # Plain attributes, as values ask their engine: fetching takes no lock.
        self.bring: Callable[[Kept], list[np.ndarray]] = loop.bring
        self.bring_async: Callable[[Kept], Awaitable[list[np.ndarray]]] = (
            loop.bring_async
        )
        self.waiters: Final = Waiters(self)
        """Calls of the user that wait."""
        self.wait_value: Callable[[RemoteValue, float | None], None] = (
            self.waiters.wait_value
        )
        self.wait_value_async: Callable[[RemoteValue], Awaitable[None]] = (
            self.waiters.wait_value_async
        )
        self.notes: ProgramNotes | None = None
        """Where what happens is noted while a time line is taken."""
        self.lock = threading.Lock()
        self.queue = queue
        self.outage_error: ZstratError | None = None
        """While a ps is lost: what calls that schedule, join or fetch raise."""
        self.deserted: ZstratError | None = None
        """Why work waits in vain: no worker was there for long."""
        self.must_wake = True
        """The loop has taken all that waited, so the next `put` wakes it."""
        self.taken_over: str | None = None
        """Who holds the cluster now, if another strategy of this program does."""
        self.oldest: Callable[[], str] = str  # "", until the dispatcher sets it
        """Words for what has run the longest, and where."""
        self._wanted = 0
        self._low_water_at_close = 0
        """At the end: all steps below this one ended by themselves."""

    def put(self, call: ScheduledCall, inputs: bytes, site: CallSite) -> RemoteValue:
        """Queues the call; blocks while the queue is full, or all is cancelled after
        an error."""
        began = 0.0 if self.notes is None else time.monotonic()
        value = RemoteValue(self, call.result)
        closure = self._closure(call, value, inputs, site)
        # Nearly every closure is queued at once: no attempt is made for it.
        with self.lock:
            queued = self.outage_error is None and self._enqueue(closure)
        if not queued:
            self.waiters.block(partial(self._try_put, closure), None, "schedule")
        if began:
            self._note_put(closure, began)
        return value

    async def put_async(
        self, call: ScheduledCall, inputs: bytes, site: CallSite | None
    ) -> AsyncRemoteValue:
        began = 0.0 if self.notes is None else time.monotonic()
        value = AsyncRemoteValue(self, call.result)
        closure = self._closure(call, value, inputs, site)
        with self.lock:
            queued = self.outage_error is None and self._enqueue(closure)
        if not queued:
            await self.waiters.wait(partial(self._try_put, closure))
        if began:
            self._note_put(closure, began)
        return value

    @staticmethod
    def _closure(
        call: ScheduledCall, value: RemoteValue, inputs: bytes, site: CallSite | None
    ) -> Closure:
        name, nbytes = call.result.name, call.nbytes + len(inputs)
        return Closure(call, value, name, call.claims(), site, inputs, nbytes)

    def join(self, timeout: float | None) -> None:
        """Waits for all that is scheduled so far."""
        # Another thread may go on scheduling: its closures are not waited for.
        with self.lock:
            mark = self.queue.steps.next
        try:
            self.waiters.block(partial(self._try_join, mark), timeout, "join")
        finally:
            self.waiters.show()

    async def join_async(self) -> None:
        with self.lock:
            mark = self.queue.steps.next
        try:
            await self.waiters.wait(partial(self._try_join, mark))
        finally:
            self.waiters.show()

    def cancel(self, timeout: float | None) -> int:
        """Cancels what waits, waits for what runs; returns how many were cancelled."""
        wish = self._cancel_soon()
        self.waiters.block(partial(self._try_cancelled, wish), timeout, "cancel")
        return self.queue.cancelled - wish.before

    async def cancel_async(self) -> int:
        wish = self._cancel_soon()
        await self.waiters.wait(partial(self._try_cancelled, wish))
        return self.queue.cancelled - wish.before

    def interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Cancels what waits, as Ctrl-C has struck in a call of the user, and tells the
        interrupt how much that was. What runs is not waited for."""
        bell, wish = ThreadBell(), Cancelling("Ctrl-C")
        try:
            with self.lock:
                if self.queue.phase is QueuePhase.CLOSED:
                    return
                self.waiters.watchers[bell] = lambda: wish.is_carried_out
                self.loop.cancel_waiting(wish)
            bell.wait(INTERRUPT_SECONDS)
        finally:
            with self.lock:
                self.waiters.watchers.pop(bell, None)
        if not wish.is_carried_out:
            interrupt.add_note(
                f"the coordinator's loop has not answered for {INTERRUPT_SECONDS:g} s; "
                "it cancels the closures that wait for a worker as soon as it does"
            )
        elif wish.waited or wish.running:
            interrupt.add_note(
                f"{wish.waited} closures that waited for a worker were cancelled; "
                f"workers have {wish.running} more, and drop those that they have not "
                "begun. The next call of the coordinator waits for the others."
            )

    def done(self) -> bool:
        """Whether nothing waits or runs; raises the pending error."""
        self.waiters.block(self._try_done, None, "done")
        return self.queue.is_idle

    async def done_async(self) -> bool:
        await self.waiters.wait(self._try_done)
        return self.queue.is_idle

    def _note_put(self, closure: Closure, began: float) -> None:
        if (notes := self.notes) is not None:
            notes.schedule(closure.step, began, time.monotonic())

    def wait_until(self, ready: Ready, timeout: float, what: str) -> None:
        """Waits for something that a worker does; pending errors win."""
        with self.lock:
            self._wanted += 1
        try:
            self.loop.wake()  # without a worker the loop has to count the seconds
            self.waiters.block(partial(self._try_until, ready, what), timeout, what)
        finally:
            with self.lock:
                self._wanted -= 1

    def unfinished(self) -> str:
        """What there is still to do, in words. Lock held."""
        return f"{self.queue.unfinished}{self.oldest()}"

    @property
    def standstill(self) -> ZstratError | None:
        """Why closures that wait are handed to nobody, while none runs. Lock held."""
        if self.queue.running or not self.queue.runs:
            return None  # what was cancelled ends by itself
        if self.outage_error is None and self.queue.phase is QueuePhase.FAILED:
            return self.deserted  # once it was raised a worker is waited for again
        return self.outage_error

    @property
    def needs_worker(self) -> bool:
        """Whether a call waits for what only a worker can do."""
        return self._wanted > 0 or not self.queue.is_idle

    async def rest_async(self) -> None:
        """Waits until nothing runs, and nothing waits that may have run.

        Raises:
            PSUnavailableError, UnavailableError: That will not come to be.
        """
        await self.waiters.wait(self._try_rest)

    def cancel_waiting(self, wish: Cancelling | None) -> bool:
        """Cancels closures that wait: for a wish, or else because one has failed.

        Returns:
            Whether what the workers have not begun is to be dropped.
        """
        queue = self.queue
        with self.lock:
            before, busy = queue.cancelled, not queue.is_idle
            cancels = queue.phase is QueuePhase.FAILED or (
                wish is not None and queue.phase is QueuePhase.OPEN and busy
            )
            if cancels:
                ended = queue.cancel_waiting(None if wish is None else wish.cause)
                self.settle(self._blamed(ended))
                self.must_wake = True
            if wish is not None:
                wish.is_carried_out, wish.before = True, before
                wish.running, wish.waited = queue.running, queue.cancelled - before
            self.waiters.notify()
        return cancels

    def fetched(self, error: Exception) -> None:
        """A fetch raises the error of a value."""
        with self.lock:
            before = self.queue.phase
            self.queue.fetched(error)
            if self.queue.phase is not before:
                self.loop.wake()  # a worker is waited for again, with a time limit
            self.waiters.notify()

    def settle(self, ended: Iterable[Ended]) -> None:
        """Tells the values of closures that the queue ended. Lock held."""
        for item in ended:
            item.closure.value._settle_error(item.error)

    def _blamed(self, ended: Iterable[Ended]) -> list[Ended]:
        """Of cancelled closures those that had begun when a parameter server was lost:
        what they did on it is not known, so they are not said to have done nothing."""
        outage = self.outage_error
        return [
            item
            if outage is None or not item.closure.attempt
            else Ended(item.closure, outage)
            for item in ended
        ]

    def fail(self, error: ZstratError, *, lasting: bool = False) -> None:
        """An error that belongs to no closure; ``lasting``: until `end_outage`."""
        with self.lock:
            if lasting:
                self.outage_error = error
            self.queue.fail(error)
            self.waiters.notify()

    def end_outage(self) -> None:
        """All parameter servers are there again."""
        with self.lock:
            self.outage_error = None
            self.waiters.notify()

    def fenced(self, end: int, applied: Mapping[int, Effect]) -> None:
        """All steps below ``end`` are over; see `Queue.fenced`."""
        with self.lock:
            if end != self.queue.steps.next:
                return  # an earlier one, raised twice: no step is issued meanwhile
            self.settle(self.queue.fenced(applied))
            self.waiters.notify()

    def close(self, cause: str) -> None:
        """Cancels everything, what runs included: its outcome is not waited for."""
        with self.lock:
            if self.queue.phase is QueuePhase.CLOSED:
                return
            self._low_water_at_close = self.queue.steps.low_water
            self._close(cause)

    def give_way(self, words: str) -> str | None:
        """Closes, if nothing is unfinished; else returns what is. Later calls of the
        coordinator raise the ``words``."""
        with self.lock:
            queue = self.queue
            if queue.phase is QueuePhase.CLOSED:
                return None
            # With a parameter server gone, what is unfinished cannot end.
            if self.outage_error is None and not queue.is_idle:
                return queue.unfinished
            self.taken_over = words
            self._close(words)
        return None

    def closed_error(self) -> ClosedError:
        """What is raised once it is closed."""
        shut = "the coordinator is shut down; make a new one"
        return ClosedError(self.taken_over or shut)

    def _close(self, cause: str) -> None:
        self.settle(self.queue.close(cause))
        self.waiters.notify()

    def _enqueue(self, closure: Closure) -> bool:
        """Queues the closure, if the queue accepts it.

        Ctrl-C may strike between any two of these lines: `must_wake` is taken back
        last, so that a closure in the queue of which the loop does not know yet is seen
        by the next call that looks (`remind`)."""
        if not self.queue.put(closure):
            return False
        if self.must_wake:
            self.loop.wake()
            self.must_wake = False
        return True

    def remind(self) -> None:
        """Wakes the loop if a call was interrupted before it could. Lock held."""
        if self.must_wake and self.queue.waiting_fresh:
            self.loop.wake()

    def _cancel_soon(self) -> Cancelling:
        wish = Cancelling("coordinator.cancel")
        with self.lock:
            if self.queue.phase is QueuePhase.CLOSED:
                raise self.closed_error()
            self.loop.cancel_waiting(wish)
        return wish

    def _try_cancelled(self, wish: Cancelling) -> Ready | None:
        if self.queue.phase is QueuePhase.CLOSED:
            raise self.closed_error()
        if not wish.is_carried_out:
            return lambda: wish.is_carried_out or self.queue.phase is QueuePhase.CLOSED
        return self._try_ended()

    def _try_done(self) -> Ready | None:
        ready = self._try_raise("coordinator.done")
        if ready is None:
            self.remind()
        return ready

    def _try_raise(self, call: str) -> Ready | None:
        queue = self.queue
        if queue.phase is QueuePhase.CLOSED:
            raise self.closed_error()
        if queue.phase is QueuePhase.FAILED:
            self.loop.cancel_waiting()
            return lambda: queue.phase is not QueuePhase.FAILED
        ready = self._try_ended()
        if ready is not None:
            return ready
        if queue.phase is QueuePhase.FENCED:
            failure = queue.reopen()
            self.waiters.notify()
            if failure is not None:
                raise failure.raised_by(call)
        if self.outage_error is not None:
            raise self.outage_error.with_traceback(None)
        return None

    def _try_ended(self) -> Ready | None:
        """None if all has ended that was cancelled; the queue is open then, unless an
        error is still to be raised."""
        queue = self.queue
        if queue.phase is QueuePhase.CANCELLING and not queue.is_quiet:
            return lambda: queue.phase is not QueuePhase.CANCELLING or queue.is_quiet
        self._fence_if_quiet()
        if queue.phase is QueuePhase.FENCING:
            return lambda: queue.phase is not QueuePhase.FENCING
        if queue.phase is QueuePhase.FENCED and not queue.has_error:
            queue.reopen()
            self.waiters.notify()
        return None

    def _fence_if_quiet(self) -> None:
        # In this order, for Ctrl-C may strike in between: a fence that is raised twice
        # does no harm, and one that was never raised would be waited for in vain.
        if self.queue.is_quiet:
            self.loop.fence(self.queue.steps.next, self.queue.doubtful)
            self.queue.fence()

    def _try_rest(self) -> Ready | None:
        queue = self.queue
        self._fence_if_quiet()
        if queue.is_at_rest:
            return None
        for error in (self.outage_error, self.deserted):
            if error is not None:
                raise error.with_traceback(None)
        return lambda: bool(
            queue.is_at_rest or queue.is_quiet or self.outage_error or self.deserted
        )

    def _try_put(self, closure: Closure) -> Ready | None:
        ready = self._try_raise("coordinator.schedule")
        if ready is not None:
            return ready
        queue = self.queue
        if self._enqueue(closure):
            return None
        return lambda: queue.accepts or queue.phase is not QueuePhase.OPEN

    def _try_join(self, mark: int) -> Ready | None:
        queue = self.queue
        if queue.phase is QueuePhase.CLOSED and self._low_water_at_close >= mark:
            return None
        ready = self._try_raise("coordinator.join")
        if ready is not None:
            return ready
        if queue.steps.low_water >= mark:
            return None
        return lambda: (
            queue.steps.low_water >= mark or queue.phase is not QueuePhase.OPEN
        )

    def _try_until(self, ready: Ready, what: str) -> Ready | None:
        waiting = self._try_raise(what)
        if waiting is not None:
            return waiting
        if ready():
            return None
        return lambda: ready() or self.queue.phase is not QueuePhase.OPEN
