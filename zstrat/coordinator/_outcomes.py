"""What becomes of the closures that a worker reports as ended, or as to be tried again.

Runs on the loop, in bulk: one message may tell of hundreds of closures, and the
engine's lock is taken once for all of them. Results are not looked into: their bytes
are put where a fetch will find them.

Workers may say that they do not reach a parameter server: second-hand, hundreds of
closures at a time. While our own connection to that server is fine this is a hiccup:
the closures are tried again, all after the same pause. What is reported until then is
one *strike*, what fails after it is the next, with a longer pause. Strikes are
forgotten after a while, so that three hiccups in a month do not end a job; too many in
a short time, from all workers, do.
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
from ._values import Kept, RemoteValue

if TYPE_CHECKING:
    from ._engine import ClosureEngine
    from ._members import Members
    from ._shipping import WorkerChannel

WINDOW_SECONDS: Final = 60.0
"""After which a strike is forgotten."""
STRIKES: Final = 6
"""With the pauses below the sixth comes after about six seconds of trouble: longer than
our own link needs to notice that the server is gone."""
FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 5.0
BUSY_SECONDS: Final = 300.0
"""After which a task that is busy is the error of a closure that found it so each time.
A step may raise the error by itself, and would be tried for ever."""


@dataclass(slots=True)
class RetryBackoff:
    """Reports of one worker about one parameter server."""

    strikes: deque[float] = field(default_factory=lambda: deque(maxlen=STRIKES))
    """When each of the last ones began."""
    pause_end: float = 0.0
    """End of the pause of the last one."""

    def delay(self, now: float) -> float:
        """How long to wait before the closure is tried again."""
        self._forget(now)
        if not self.strikes or now >= self.pause_end:
            pause = min(FIRST_PAUSE * 2.0 ** len(self.strikes), LONGEST_PAUSE)
            self.strikes.append(now)
            self.pause_end = now + pause
        return self.pause_end - now

    def is_exhausted(self, now: float) -> bool:
        """Whether trying again through this worker is no use."""
        self._forget(now)
        return len(self.strikes) >= STRIKES

    def _forget(self, now: float) -> None:
        while self.strikes and now - self.strikes[0] > WINDOW_SECONDS:
            self.strikes.popleft()


OK: Final = int(Outcome.OK)
FAILED: Final = int(Outcome.FAILED)
MAX_STRUCK: Final = 65536
"""Steps that met with trouble and have not ended well; beyond it, those that are over
in another way are dropped."""
ERROR_CHARACTERS: Final = 1000
"""Characters of an error that are kept for `metrics`."""


@final
class Outcomes:
    """Ends closures, and judges failures that are not the closure's own fault.

    Args:
        abandoned: Gets the kept results whose value nobody holds any more.
    """

    def __init__(
        self, engine: ClosureEngine, members: Members, abandoned: deque[Kept]
    ) -> None:
        self._engine, self._members, self._abandoned = engine, members, abandoned
        self._backoffs: dict[tuple[int, str], RetryBackoff] = {}
        self._avoided: dict[int, str] = {}
        self._struck: dict[int, tuple[int, RetryBackoff]] = {}
        """By step: the worker that reported trouble with it, and with what."""
        self.stale = 0
        """Outcomes of closures that were given to another worker in the meantime."""

    def take(self, channel: WorkerChannel, message: Completions, now: float) -> bool:
        """Ends the closures of the message, or has them tried again.

        Returns:
            Whether closures wait that may go to a worker now.
        """
        if self._avoided:
            self._forgive(now)
        offset = ended = 0
        member, results = channel.member, message.results
        in_flight, queue = member.in_flight, self._engine.queue
        layouts = channel.task.layouts
        failures: list[tuple[Closure, Completion]] = []
        # Without the lock: constructors of the user's own exceptions run here.
        errors = {
            completion.step: from_wire(completion.error)
            for completion in message.completions
            if completion.error is not None and completion.step in in_flight
        }
        with self._engine.lock:
            for completion in message.completions:
                step, outcome, layout_id, size, _ = completion
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
                value._run = (step, member.name, closure.attempt)
                if size >= 0:
                    value._settle(layout, results[start:offset])
                else:
                    kept = Kept(member.place, member.epoch, step, layout)
                    value._settle_kept(kept)
                    self._watch(value, kept)
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
        """Takes a closure that did not end well, or whose result cannot be read. Lock
        held."""
        queue, settle, member = self._engine.queue, self._engine.settle, channel.member
        if completion.outcome not in (OK, FAILED):
            settle(queue.retry(closure, now, HANDBACK_DELAY, begun=False))
            if isinstance(error, WorkerLostError):
                self._members.leaving(member.place, error.reason, now)
            return
        delay = None
        if completion.outcome == OK:
            error = ProtocolError(
                f"{member.name} sent a result of layout {completion.layout}, which it "
                "did not describe: it runs another version of zstrat"
            )
        elif error is None:
            error = ProtocolError(f"{member.name} does not say how a closure failed")
        elif (lost := self._lost_server(error)) is not None:
            error = lost
        else:
            delay = self._again(member.place, closure, error, now)
        if delay is not None:
            settle(queue.retry(closure, now, delay, begun=True))
            return
        words = f"step {closure.step}: {type(error).__name__}: {error}"
        self._members.failed(member, words[:ERROR_CHARACTERS])
        queue.end(closure, error)
        closure.value._run = (closure.step, member.name, closure.attempt)
        settle([Ended(closure, error)])

    def _lost_server(self, error: Exception) -> Exception | None:
        """What we know better than the worker of why a closure failed: our own link has
        lost a parameter server, or knows that it has lost what it held."""
        if isinstance(error, PSUnavailableError | StaleSessionError):
            return self._engine.outage_error
        return None

    def _step_succeeded(self, step: int, worker: int) -> None:
        """A step ended well. If it had met with trouble on this worker, that is over:
        outages that pass end no job, however many there are."""
        struck_on, backoff = self._struck.pop(step, (-1, None))
        if backoff is not None and struck_on == worker:
            backoff.strikes.clear()

    def _again(
        self, worker: int, closure: Closure, error: Exception, now: float
    ) -> float | None:
        """In how many seconds the closure is worth another try; None: never.

        Our own links tell when a parameter server is really gone; what workers say of
        it second-hand may be a hiccup between them, and is no use to try only if all
        workers that are there say it. One that is busy is not gone: it gets more time.
        """
        if self._engine.queue.suspended and isinstance(
            error, PSUnavailableError | StaleSessionError
        ):
            return 0.0  # it runs again when the servers are there, whoever saw it first
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
                return self._backoff(worker, "a busy task").delay(now)
            case _:
                return None
        backoff = self._backoff(worker, task)
        pause = backoff.delay(now)
        self._remember(closure.step, worker, backoff)
        if backoff.is_exhausted(now):
            self._avoided[worker] = task
            self._members.avoid(worker, True)
        live = {worker, *(member.place for member in self._members.usable)}
        if all(self._backoff(place, task).is_exhausted(now) for place in live):
            return None
        return pause

    def _remember(self, step: int, worker: int, backoff: RetryBackoff) -> None:
        self._struck[step] = worker, backoff
        if len(self._struck) > MAX_STRUCK:  # those that were cancelled
            low_water = self._engine.queue.steps.low_water
            self._struck = {s: at for s, at in self._struck.items() if s >= low_water}

    def _forgive(self, now: float) -> None:
        """Workers whose trouble is long ago get closures again."""
        for worker, task in list(self._avoided.items()):
            if not self._backoff(worker, task).is_exhausted(now):
                del self._avoided[worker]
                self._members.avoid(worker, False)

    def _backoff(self, worker: int, task: str) -> RetryBackoff:
        return self._backoffs.setdefault((worker, task), RetryBackoff())

    def _watch(self, value: RemoteValue, kept: Kept) -> None:
        """When nobody holds the value any more, its worker may drop the result."""
        weakref.finalize(value, self._abandoned.append, kept).atexit = False
