"""`ClosureEngine`: the queue and the lock that the user's threads and the loop share.

The law of this file: the queue changes, and values are settled, only with `lock` held,
on any thread; single numbers may be read without it. Nothing that can block or run
foreign code happens under the lock.

A call of the user is a short *attempt* under the lock, which succeeds, raises, or
returns what to wait for. `Waiters` repeats it, blocking or awaiting, so that both
coordinators share every decision.
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
    from ._steps import CallSite
    from .rounds._optimizer_rounds import SessionRounds

INTERRUPT_SECONDS: Final = 1.0
"""Seconds that Ctrl-C waits until the loop reports how many closures were cancelled."""

NOTICE_SECONDS: Final = 10.0
"""Seconds after which a call that waits for workers to build something is logged."""


class ClosureEngine:
    """The queue with its lock, and the calls of the user that wait for closures."""

    def __init__(self, queue: Queue, loop: LoopSide, rounds: SessionRounds) -> None:
        self.loop, self.rounds = loop, rounds
        queue.leases.rounds = rounds
        # Plain attributes, as remote values call them: fetching takes no lock.
        self.fetch_kept: Callable[[Kept], list[np.ndarray]] = loop.fetch_kept
        self.fetch_kept_async: Callable[[Kept], Awaitable[list[np.ndarray]]] = (
            loop.fetch_kept_async
        )
        self.waiters: Final = Waiters(self)
        """Calls of the user that wait for closures."""
        self.wait_value: Callable[[RemoteValue, float | None], None] = (
            self.waiters.wait_value
        )
        self.wait_value_async: Callable[[RemoteValue], Awaitable[None]] = (
            self.waiters.wait_value_async
        )
        self.notes: ProgramNotes | None = None
        """Records the program's part of a time line, while one is recorded; else
        None."""
        self.lock = threading.Lock()
        self.queue = queue
        self.outage_error: ZstratError | None = None
        """The error of calls that schedule, join or fetch while a parameter server is
        lost; None while all are there."""
        self.no_worker_error: ZstratError | None = None
        """The error of closures that waited too long for a worker."""
        self.must_wake = True
        """Whether the next `put` has to wake the loop, because the loop has taken all
        closures."""
        self.taken_over: str | None = None
        """Message that names the strategy of this program that took the cluster over;
        None if none did."""
        self.oldest: Callable[[], str] = str  # "" until the dispatcher sets it
        """A function that describes the closure that has run longest, and its
        worker."""
        self._worker_waits = 0
        """Number of calls that wait until a worker has built something."""
        self._low_water_at_close = 0
        """The lowest step that had not ended when the engine was closed."""

    def put(self, call: ScheduledCall, inputs: bytes, site: CallSite) -> RemoteValue:
        """Queues a closure; returns its value. Blocks while the queue is full, or is
        being cancelled."""
        began = 0.0 if self.notes is None else time.monotonic()
        value = RemoteValue(self, call.result)
        closure = self._closure(call, value, inputs, site)
        # The queue takes nearly every closure at once: this saves an attempt.
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
        return Closure(
            call, value, name, call.claims(), site, inputs, nbytes, draws=call.draws
        )

    def join(self, timeout: float | None) -> None:
        """Blocks until all closures scheduled so far have ended, and the rounds to
        which they contribute are closed."""
        # Closures that other threads schedule from now on are not waited for.
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
        """Cancels waiting closures and waits for running ones; returns how many were
        cancelled."""
        request = self._cancel_soon()
        self.waiters.block(partial(self._try_cancelled, request), timeout, "cancel")
        return self.queue.cancelled - request.before

    async def cancel_async(self) -> int:
        request = self._cancel_soon()
        await self.waiters.wait(partial(self._try_cancelled, request))
        return self.queue.cancelled - request.before

    def interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Cancels waiting closures after Ctrl-C in a call of the user, and adds a note
        to the interrupt that says how many. Does not wait for running ones."""
        bell, request = ThreadBell(), Cancelling("Ctrl-C")
        try:
            with self.lock:
                if self.queue.phase is QueuePhase.CLOSED:
                    return
                # The loop does the cancelling, as a second Ctrl-C would interrupt it
                # here.
                self.waiters.watchers[bell] = lambda: request.is_done
                self.loop.cancel_waiting(request)
            bell.wait(INTERRUPT_SECONDS)
        finally:
            with self.lock:
                self.waiters.watchers.pop(bell, None)
        if not request.is_done:
            interrupt.add_note(
                f"the coordinator's loop did not answer for {INTERRUPT_SECONDS:g} s; "
                "it will cancel the closures that wait for a worker when it does"
            )
        elif request.waited or request.running:
            interrupt.add_note(
                f"{request.waited} closures that waited for a worker were cancelled; "
                f"workers have {request.running} more, and drop those that they have "
                "not started. The next call of the coordinator waits for the others."
            )

    def done(self) -> bool:
        """Returns whether no closure waits or runs. Raises the pending error."""
        self.waiters.block(self._try_done, None, "done")
        return self.queue.is_idle

    async def done_async(self) -> bool:
        await self.waiters.wait(self._try_done)
        return self.queue.is_idle

    def _note_put(self, closure: Closure, began: float) -> None:
        if (notes := self.notes) is not None:
            notes.schedule(closure.step, began, time.monotonic())

    def wait_until(self, ready: Ready, timeout: float, what: str) -> None:
        """Blocks until ``ready()`` returns True, which the work of a worker brings
        about. Raises a pending error instead. ``what`` names the wait in errors."""
        with self.lock:
            # Before the loop wakes: its turn looks at `needs_worker`.
            self._worker_waits += 1
        try:
            self.loop.wake()  # it starts the timeout if there is no worker
            attempt = partial(self._try_until, ready, what)
            self.waiters.block(attempt, timeout, what, NOTICE_SECONDS)
        finally:
            with self.lock:
                self._worker_waits -= 1

    def unfinished(self) -> str:
        """Describes the closures that have not ended. Lock held."""
        return f"{self.queue.unfinished}{self.oldest()}"

    @property
    def standstill(self) -> ZstratError | None:
        """The reason why waiting closures are not handed out, while none runs; None if
        they are. Lock held."""
        if self.queue.running or not self.queue.runs:
            return None  # cancelled closures end by themselves
        if self.outage_error is None and self.queue.phase is QueuePhase.FAILED:
            # Raised once; then closures wait for a worker again.
            return self.no_worker_error
        return self.outage_error

    @property
    def needs_worker(self) -> bool:
        """Whether a call waits for a worker."""
        return self._worker_waits > 0 or not self.queue.is_idle

    async def rest_async(self) -> None:
        """Waits until no closure runs, and no closure waits that a worker may have run
        before.

        Raises:
            PSUnavailableError, UnavailableError: That cannot happen now: a parameter
                server, or every worker, is lost.
        """
        await self.waiters.wait(self._try_rest)

    def cancel_waiting(self, request: Cancelling | None) -> bool:
        """Cancels waiting closures, for ``request``, or because a closure has failed.

        Returns:
            Whether workers have to drop the closures that they have not started.
        """
        queue = self.queue
        with self.lock:
            # An idle queue stays open, without a fence, which asks every server.
            before, busy = queue.cancelled, not queue.is_idle
            cancels = queue.phase is QueuePhase.FAILED or (
                request is not None and queue.phase is QueuePhase.OPEN and busy
            )
            if cancels:
                ended = queue.cancel_waiting(None if request is None else request.cause)
                self.settle(self._blame_outage(ended))
                self.must_wake = True
            if request is not None:
                request.is_done, request.before = True, before
                request.running = queue.running
                request.waited = queue.cancelled - before
            self.waiters.notify()
        return cancels

    def fetched(self, error: Exception) -> None:
        """Notes that a fetch raises the ``error`` of a value."""
        with self.lock:
            before = self.queue.phase
            self.queue.fetched(error)
            if self.queue.phase is not before:
                self.loop.wake()  # it starts the timeout for a worker again
            self.waiters.notify()

    def settle(self, ended: Iterable[Ended]) -> None:
        """Settles the values of closures that the queue ended, each with its error.
        Lock held."""
        for item in ended:
            item.closure.value._settle_error(item.error)

    def _blame_outage(self, ended: Iterable[Ended]) -> list[Ended]:
        """Gives cancelled closures that had started when a parameter server was lost
        the error of that loss: it is not known whether the server applied them."""
        outage = self.outage_error
        return [
            item
            if outage is None or not item.closure.attempt
            else Ended(item.closure, outage)
            for item in ended
        ]

    def fail(self, error: ZstratError, *, lasting: bool = False) -> None:
        """Fails the run with an error that belongs to no closure. Every call raises a
        ``lasting`` error until `end_outage`."""
        with self.lock:
            if lasting:
                self.outage_error = error
            self.queue.fail(error)
            self.waiters.notify()

    def end_outage(self) -> None:
        """Ends the outage: all parameter servers have returned."""
        with self.lock:
            self.outage_error = None
            self.waiters.notify()

    def fenced(self, end: int, applied: Mapping[int, Effect]) -> None:
        """Ends all steps below ``end``; see `Queue.fenced`."""
        with self.lock:
            if end != self.queue.steps.next:
                return  # an earlier fence that was raised twice
            self.settle(self.queue.fenced(applied))
            self.waiters.notify()

    def close(self, cause: str) -> None:
        """Cancels all closures, without waiting for the running ones."""
        with self.lock:
            if self.queue.phase is QueuePhase.CLOSED:
                return
            # Closing ends all steps, and so raises the low water: `join` has to know
            # which had ended before.
            self._low_water_at_close = self.queue.steps.low_water
            self._close(cause)

    def give_way(self, reason: str) -> str | None:
        """Closes the coordinator if all its closures have ended, else returns a
        description of the unfinished ones. After that, calls raise an error with the
        ``reason``."""
        with self.lock:
            queue = self.queue
            if queue.phase is QueuePhase.CLOSED:
                return None
            # While a parameter server is lost, unfinished closures cannot end.
            if self.outage_error is None and not queue.is_idle:
                return queue.unfinished
            self.taken_over = reason
            self._close(reason)
        return None

    def closed_error(self) -> ClosedError:
        """Returns the error that calls raise after `close`."""
        return ClosedError(
            self.taken_over or "the coordinator is shut down; make a new one"
        )

    def _close(self, cause: str) -> None:
        self.settle(self.queue.close(cause))
        self.waiters.notify()

    def _enqueue(self, closure: Closure) -> bool:
        """Queues the closure, and wakes the loop if needed. Returns whether the queue
        took the closure.

        Ctrl-C may strike between any two of these lines. `must_wake` is reset last, so
        that the next call wakes the loop if this one was interrupted (`remind`).
        """
        if not self.queue.put(closure):
            return False
        if self.must_wake:
            self.loop.wake()
            self.must_wake = False
        return True

    def remind(self) -> None:
        """Wakes the loop if a call that should have done so was interrupted. Lock
        held."""
        if self.must_wake and self.queue.waiting_fresh:
            self.loop.wake()

    def _cancel_soon(self) -> Cancelling:
        request = Cancelling("coordinator.cancel")
        with self.lock:
            if self.queue.phase is QueuePhase.CLOSED:
                raise self.closed_error()
            self.loop.cancel_waiting(request)
        return request

    def _try_cancelled(self, request: Cancelling) -> Ready | None:
        if self.queue.phase is QueuePhase.CLOSED:
            raise self.closed_error()
        if not request.is_done:
            return lambda: request.is_done or self.queue.phase is QueuePhase.CLOSED
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
        # The first error goes before an outage, which every later call raises as well
        # (`fail`).
        if queue.phase is QueuePhase.FENCED:
            failure = queue.reopen()
            self.waiters.notify()
            if failure is not None:
                raise failure.raised_by(call)
        if self.outage_error is not None:
            raise self.outage_error.with_traceback(None)
        return None

    def _try_ended(self) -> Ready | None:
        """Returns None when all cancelled closures have ended, else the condition to
        wait for. When they have ended the queue is open, unless an error is to be
        raised."""
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
        # In this order, as Ctrl-C may strike in between: raising a fence twice does no
        # harm, while waiting for one that was never raised has no end.
        if self.queue.is_quiet:
            self.loop.fence(self.queue.steps.next, self.queue.doubtful)
            self.queue.fence()

    def _try_rest(self) -> Ready | None:
        queue = self.queue
        self._fence_if_quiet()
        if queue.is_at_rest:
            return None
        for error in (self.outage_error, self.no_worker_error):
            if error is not None:
                raise error.with_traceback(None)
        return lambda: bool(
            queue.is_at_rest
            or queue.is_quiet
            or self.outage_error
            or self.no_worker_error
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
        # All that it waits for had ended before the coordinator was closed: no error.
        if queue.phase is QueuePhase.CLOSED and self._low_water_at_close >= mark:
            return None
        ready = self._try_raise("coordinator.join")
        if ready is not None:
            return ready
        rounds = self.rounds
        if queue.steps.low_water < mark:
            return lambda: (
                queue.steps.low_water >= mark or queue.phase is not QueuePhase.OPEN
            )
        if not rounds.is_open_below(mark):
            return None
        # No closure is left that could contribute, so the loop closes rounds with what
        # they have (`RoundClosing.look`).
        rounds.flush_below = max(rounds.flush_below, mark)
        self.loop.wake()
        return lambda: (
            not rounds.is_open_below(mark) or queue.phase is not QueuePhase.OPEN
        )

    def _try_until(self, ready: Ready, what: str) -> Ready | None:
        waiting = self._try_raise(what)
        if waiting is not None:
            return waiting
        if ready():
            return None
        return lambda: ready() or self.queue.phase is not QueuePhase.OPEN
