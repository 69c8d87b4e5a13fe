"""`Outcomes`: ends the closures that workers report, or returns them to be retried. On
the loop.

One message may report hundreds of closures, and the engine's lock is taken once for all
of them. Results are not decoded: their bytes are stored for a fetch.

Workers may fail to reach a parameter server, with hundreds of closures at a time. While
the program's own connection to that server is fine, the closures are retried, all after
the same pause. All failures until then are one *strike*; failures after that pause are
the next strike, with a longer pause. Old strikes are forgotten, so that three hiccups
in a month do not end a job. Too many strikes in a short time, on all workers, do.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    BusyError,
    ProtocolError,
    PSUnavailableError,
    StaleSessionError,
    WorkerLostError,
    from_wire,
)
from zstrat.wire import Completion, Completions, Outcome

from ._queue import HANDBACK_DELAY, Closure, Ended
from ._values import Inline, Kept

if TYPE_CHECKING:
    from ._engine import ClosureEngine
    from ._members import Members
    from ._shipping import WorkerChannel

WINDOW_SECONDS: Final = 60.0
"""Age at which a strike is forgotten."""
STRIKES: Final = 6
"""The most strikes of a worker at one server. With the pauses below, the sixth comes
after about six seconds of failures: longer than the program's own link takes to notice
a lost server."""
FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 5.0
BUSY_SECONDS: Final = 300.0
"""Seconds of retries after which a closure fails because a task is busy. Without a
limit a step that raises `BusyError` by itself would be retried without end."""


@dataclass(slots=True)
class RetryBackoff:
    """The strikes of one worker at one parameter server, and the pause before a
    retry."""

    strikes: deque[float] = field(default_factory=lambda: deque(maxlen=STRIKES))
    """Times at which the last strikes began."""
    pause_end: float = 0.0
    """End of the pause of the last strike."""

    def delay(self, now: float) -> float:
        """Returns the seconds to wait before a retry; may add a strike."""
        self._forget(now)
        if not self.strikes or now >= self.pause_end:
            pause = min(FIRST_PAUSE * 2.0 ** len(self.strikes), LONGEST_PAUSE)
            self.strikes.append(now)
            self.pause_end = now + pause
        return self.pause_end - now

    def is_exhausted(self, now: float) -> bool:
        """Returns whether there are too many strikes for a further retry on this
        worker."""
        self._forget(now)
        return len(self.strikes) >= STRIKES

    def _forget(self, now: float) -> None:
        while self.strikes and now - self.strikes[0] > WINDOW_SECONDS:
            self.strikes.popleft()


OK: Final = int(Outcome.OK)
CANCELLED: Final = int(Outcome.CANCELLED)
FAILED: Final = int(Outcome.FAILED)
MAX_STRUCK: Final = 65536
"""The most steps with a strike whose success is awaited; if there are more, those that
have ended in another way are forgotten."""
ERROR_CHARACTERS: Final = 1000
"""The most characters of an error that `metrics` shows."""


@final
class Outcomes:
    """Ends closures, or puts them back into the queue after failures that are not their
    own fault.

    Args:
        abandoned: Receives the kept results whose remote value was dropped.
    """

    def __init__(
        self, engine: ClosureEngine, members: Members, abandoned: deque[Kept]
    ) -> None:
        self._engine, self._members, self._abandoned = engine, members, abandoned
        self._backoffs: dict[tuple[int, str], RetryBackoff] = {}
        self._avoided: dict[int, str] = {}
        self._struck: dict[int, tuple[int, RetryBackoff]] = {}
        """By step: the worker on which the step had a strike, and the backoff of that
        worker."""
        self.stale = 0
        """Number of outcomes that came after the closure was given to another
        worker."""

    def handle(self, channel: WorkerChannel, message: Completions, now: float) -> bool:
        """Ends the closures of a message, or puts them back into the queue.

        Returns:
            Whether closures wait for a worker.
        """
        if self._avoided:
            self._stop_avoiding(now)
        offset = ended = 0
        member, results = channel.member, message.results
        in_flight, queue = member.in_flight, self._engine.queue
        layouts = channel.task.layouts
        failures: list[tuple[Closure, Completion]] = []
        # Without the lock, as this calls constructors of the user's exceptions.
        errors = {
            completion.step: from_wire(completion.error)
            for completion in message.completions
            if completion.error is not None and completion.step in in_flight
        }
        with self._engine.lock:
            for completion in message.completions:
                step, outcome, layout_id, size, _ = completion
                # Also for a stale outcome, whose bytes are in the message all the same.
                start = offset
                if size > 0:
                    offset += size
                closure = in_flight.pop(step, None)
                if closure is None:
                    self.stale += 1
                    continue
                ended += 1
                layout = layouts.get(layout_id)
                if outcome != OK or layout is None:
                    failures.append((closure, completion))
                    continue
                queue.end(closure)
                if self._struck:
                    self._step_succeeded(step, member.place)
                value = closure.value
                # Before it is settled: then a waiting thread reads it, without the
                # lock.
                value._run = (step, member.name, closure.attempt)
                if size >= 0:
                    value._settle(Inline(layout, results[start:offset]))
                else:
                    kept = Kept(member.place, member.epoch, step, layout)
                    value._settle(kept)
                    # When the value is dropped, its worker may drop the result.
                    weakref.finalize(value, self._abandoned.append, kept).atexit = False
            for closure, completion in failures:
                error = errors.get(closure.step)
                self._failed(channel, closure, completion, error, now)
            self._members.ended(member, ended, now)
            self._engine.waiters.notify()
            more = queue.queued > 0
        if (notes := self._engine.notes) is not None:
            notes.end(ended, time.monotonic())
        return more

    def _failed(
        self,
        channel: WorkerChannel,
        closure: Closure,
        completion: Completion,
        error: Exception | None,
        now: float,
    ) -> None:
        """Fails or retries a closure that failed, or whose result cannot be read. Lock
        held."""
        queue, settle, member = self._engine.queue, self._engine.settle, channel.member
        if completion.outcome == CANCELLED:
            # It did not run here, so it does not count for bounded staleness.
            member.started -= 1
            settle(queue.retry(closure, now, HANDBACK_DELAY, begun=False))
            if isinstance(error, WorkerLostError):
                # So a worker answers that is shutting down: what it has not begun goes
                # elsewhere.
                self._members.leaving(member.place, error.reason, now)
            return
        delay = None
        # DOUBTFUL, or OK with a result that cannot be read: its updates may be applied.
        begun = completion.outcome != FAILED
        if completion.outcome == OK:
            error = ProtocolError(
                f"{member.name} sent a result with the unknown layout "
                f"{completion.layout}; it runs another version of zstrat"
            )
        elif error is None:
            error = ProtocolError(
                f"{member.name} reported a failed closure without an error"
            )
        elif self._engine.outage_error is not None and isinstance(
            error, PSUnavailableError | StaleSessionError
        ):
            # The program knows of the outage, and better than the worker.
            error = self._engine.outage_error
        else:
            delay = self._retry_delay(member.place, closure, error, now)
        if delay is not None:
            settle(queue.retry(closure, now, delay, begun=begun))
            return
        closure.begun |= begun
        summary = f"step {closure.step}: {type(error).__name__}: {error}"
        self._members.failed(member, summary[:ERROR_CHARACTERS])
        queue.end(closure, error)
        closure.value._run = (closure.step, member.name, closure.attempt)
        settle([Ended(closure, error)])

    def _step_succeeded(self, step: int, worker: int) -> None:
        """Clears the strikes of a worker when a step with a strike succeeds there, so
        that any number of short outages does not end a job."""
        struck_on, backoff = self._struck.pop(step, (-1, None))
        if backoff is not None and struck_on == worker:
            backoff.strikes.clear()

    def _retry_delay(
        self, worker: int, closure: Closure, error: Exception, now: float
    ) -> float | None:
        """Returns the seconds after which to retry a closure; None: the closure fails.

        The program's own link knows whether a parameter server is lost. If only workers
        fail to reach the server, the closure is retried until all workers fail. A busy
        server is not lost, and gets more time.
        """
        if self._engine.queue.suspended and isinstance(
            error, PSUnavailableError | StaleSessionError
        ):
            return 0.0  # it runs again when the servers have returned
        match error:
            case PSUnavailableError(task=task):
                pass
            case StaleSessionError():
                task = "the session"
            case BusyError():
                if closure.busy_since is None:
                    closure.busy_since = now
                if now - closure.busy_since > BUSY_SECONDS:
                    return None
                # No strike is noted: a busy server lives, so this worker is not
                # avoided.
                return self._backoff(worker, "a busy task").delay(now)
            case _:
                return None
        backoff = self._backoff(worker, task)
        pause = backoff.delay(now)
        self._note_strike(closure.step, worker, backoff)
        if backoff.is_exhausted(now):
            self._avoided[worker] = task
            self._members.avoid(worker, True)
        # This worker may be lost by now. The closure fails only if nobody reaches the
        # server: one worker alone may have a broken network.
        live = {worker, *(member.place for member in self._members.usable)}
        if all(self._backoff(place, task).is_exhausted(now) for place in live):
            return None
        return pause

    def _note_strike(self, step: int, worker: int, backoff: RetryBackoff) -> None:
        self._struck[step] = worker, backoff
        if len(self._struck) > MAX_STRUCK:  # of cancelled steps, among others
            low_water = self._engine.queue.steps.low_water
            self._struck = {s: at for s, at in self._struck.items() if s >= low_water}

    def _stop_avoiding(self, now: float) -> None:
        """Lets workers whose strikes are old get closures again."""
        for worker, task in list(self._avoided.items()):
            if not self._backoff(worker, task).is_exhausted(now):
                del self._avoided[worker]
                self._members.avoid(worker, False)

    def _backoff(self, worker: int, task: str) -> RetryBackoff:
        return self._backoffs.setdefault((worker, task), RetryBackoff())
