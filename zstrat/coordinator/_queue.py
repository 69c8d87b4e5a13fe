"""Closures that wait, and what becomes of them. Decides only: no lock, clock or socket.

The law of this file: every closure that was `put` ends exactly once, as done, failed or
cancelled, and nobody else ends one.

Theory of operation. Fresh closures wait in a bounded first-in-first-out queue. A
closure that comes back (its worker was lost, a parameter server was unreachable) waits
in a separate queue that is *outside* the bound and goes first: whoever hands closures
back never has to wait for a free slot, so a full queue cannot lock up when all workers
fail.

A closure that was in flight on a lost worker is retried at once. From the second loss
on it is a *suspect*: it may be what kills workers. Suspects run alone on a worker, so
that the next loss convicts the right one and spares the bystanders that were in flight
beside it; they wait longer after each loss, and after ``max_attempts`` losses the
closure fails with the names of the workers that it took along.

    OPEN ──first error──▶ FAILED ─────next call of the user────▶ CANCELLING
      ▲                                                                 │
      │                                        nothing runs on workers that are there
      │                                                                 ▼
      └─── the error is raised, once ─── FENCED ◀──all ps say so─── FENCING

While FAILED the others run on, as in TensorFlow; CLOSED is the end of everything. Who
cancels what waits goes the same way from OPEN, and no error is raised at its end. With
``errors_once`` an error that a fetch has raised counts as raised: when none is left,
FAILED is OPEN again, and nothing is cancelled.

A worker that was lost may have applied the closure that it had, and may still be at it
(a *zombie*). So before the error is raised all parameter servers are told that every
step so far is over, and say which of these *doubtful* closures they have applied: the
others are cancelled, and the error tells the truth that nothing runs any more.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import CancelledError, ResultLostError, WorkerLostError

from ._pending_errors import ClosureSource, PendingError, PendingErrors
from ._steps import Steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._calls import ScheduledCall
    from ._pending_errors import CallSite
    from ._values import RemoteValue


class QueueLeft(NamedTuple):
    """What is left when closures were handed out: so many wait, and before that there
    was no room for more."""

    waiting: int = 0
    full: bool = False


MAX_QUEUED: Final = 262_144
"""TensorFlow's bound: about 100 MB of waiting closures."""
MAX_QUEUED_BYTES: Final = 2**30
"""Of the arguments of waiting closures, which are copied as they are scheduled: batches
would fill the memory of the program long before there are too many closures."""
MAX_AHEAD: Final = 2**19
"""How far above the lowest step that has not ended one may be handed out: half of the
steps that a parameter server can remember (`zstrat.ps.store._ledger`). One slow closure
may be overtaken by so many."""
MAX_ATTEMPTS: Final = 5
SUSPECT_AFTER: Final = 2
"""One loss is bad luck: machines are preempted. Two of the same closure are a clue."""
FIRST_DELAY: Final = 0.1
"""Seconds that a suspect waits behind its second loss; doubled with each further one,
up to `LONGEST_DELAY`."""
LONGEST_DELAY: Final = 5.0
HANDBACK_DELAY: Final = 0.05
"""Seconds before a closure is retried that its worker gave back without running it."""


class QueuePhase(enum.Enum):
    """Where the queue stands with the first error."""

    OPEN = "open"
    FAILED = "failed"
    CANCELLING = "cancelling"
    FENCING = "fencing"
    FENCED = "fenced"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Closure:
    """One scheduled call. ``call`` says what to run and ``value`` who wants to know;
    the queue looks into neither."""

    call: ScheduledCall
    value: RemoteValue
    name: str = "closure"
    claims: tuple[object, ...] = ()
    """What must not go away before the closure has ended."""
    site: CallSite | None = None
    inputs: bytes = b""
    """The bytes of its own arrays among the arguments (`Input`)."""
    nbytes: int = 0
    """What it holds of arguments, and shares with no other closure."""
    step: int = -1
    attempt: int = 0
    """How often it was handed to a worker."""
    busy_since: float | None = None
    """When it found a task too busy for it first."""
    losses: tuple[str, ...] = ()
    """The workers that were lost while they had it."""
    begun: bool = False
    """A worker that did not end it may have run it: it may have had its effect."""

    @property
    def is_suspect(self) -> bool:
        return len(self.losses) >= SUSPECT_AFTER

    @property
    def source(self) -> ClosureSource:
        return ClosureSource(self.step, self.name, self.site)


@dataclass(frozen=True, slots=True)
class Ended:
    """A closure that the queue ended by itself, for the shell to tell its value."""

    closure: Closure
    error: Exception


class Effect(NamedTuple):
    """What is known of the updates of a step whose worker was lost: in words, and
    whether a server has said that it applied some."""

    words: str
    is_certain: bool


_Waiting = tuple[float, int, Closure]


class Queue:
    """Closures from `put` to their end."""

    def __init__(
        self,
        max_queued: int = MAX_QUEUED,
        max_attempts: int = MAX_ATTEMPTS,
        first_step: int = 1,
        max_ahead: int | None = None,
        *,
        errors_once: bool = False,
    ) -> None:
        if max_queued < 1 or max_attempts < 1:
            raise ValueError(
                f"max_queued={max_queued}, max_attempts={max_attempts}: "
                "both must be at least 1"
            )
        self.max_queued, self.max_attempts = max_queued, max_attempts
        self.max_ahead = MAX_AHEAD if max_ahead is None else max_ahead
        self.steps = Steps(first_step)
        self.phase = QueuePhase.OPEN
        self.running = 0
        self._failures = PendingErrors(errors_once)
        """Since the last one was raised, and before the next one begins."""
        self._pending = False
        self._cause: str | None = None
        """Why what waits is cancelled, while it is."""
        self.cancelled = 0
        """Closures that were cancelled so far."""
        self._fresh: deque[Closure] = deque()
        self._nbytes = 0
        """Of the fresh closures."""
        self._retries: list[_Waiting] = []
        self._suspects: list[_Waiting] = []
        self._returned: list[_Waiting] = []
        """Those that came back before they had begun."""
        self._doubtful: list[Closure] = []
        self.held = False
        """Nothing begins but what may have begun already (`is_at_rest`)."""
        self.suspended = False
        """Nothing is handed out: a lost parameter server is awaited, or filled."""

    @property
    def errors(self) -> list[Exception]:
        """Every error since the last one was raised, the first one first."""
        return self._failures.errors

    @property
    def queued(self) -> int:
        """Closures that wait for a worker, those that came back included."""
        back = len(self._retries) + len(self._suspects) + len(self._returned)
        return len(self._fresh) + back

    @property
    def unfinished(self) -> str:
        """How much there is to do, in words."""
        return f"{self.running} closures run and {self.queued} wait"

    @property
    def waiting_fresh(self) -> int:
        """Closures that wait for their first worker."""
        return len(self._fresh)

    @property
    def is_full(self) -> bool:
        """Too many closures wait for their first worker, or too many bytes."""
        return len(self._fresh) >= self.max_queued or self._nbytes >= MAX_QUEUED_BYTES

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return self.steps.low_water == self.steps.next

    @property
    def accepts(self) -> bool:
        """Whether `put` may be called now."""
        return self.phase is QueuePhase.OPEN and not self.is_full

    @property
    def runs(self) -> bool:
        """Whether closures are handed out."""
        return self.phase in (QueuePhase.OPEN, QueuePhase.FAILED)

    def put(self, closure: Closure) -> bool:
        """Takes a new closure at the tail and numbers it, if it accepts one now."""
        if self.phase is not QueuePhase.OPEN or self.is_full:
            return False
        closure.step = self.steps.issue()
        self._fresh.append(closure)
        self._nbytes += closure.nbytes
        return True

    def cancel_waiting(self, cause: str | None = None) -> list[Ended]:
        """Cancels all that waits; what runs is to end by itself. → CANCELLING."""
        assert self.runs, f"cancelled while {self.phase.value}"
        self.phase, self._cause = QueuePhase.CANCELLING, cause
        return self._cancel_queued(cause)

    @property
    def is_quiet(self) -> bool:
        """Cancelling, and no worker that is there runs anything any more."""
        return self.phase is QueuePhase.CANCELLING and self.running == 0

    @property
    def doubtful(self) -> list[int]:
        """Steps that may have been applied, and that no worker has any more."""
        return [closure.step for closure in self._doubtful]

    def fence(self) -> list[int]:
        """All steps so far are to be over. CANCELLING → FENCING.

        Returns:
            Those that may have been applied.
        """
        assert self.is_quiet, "fenced while closures run"
        self.phase = QueuePhase.FENCING
        return self.doubtful

    def fenced(self, applied: Mapping[int, Effect]) -> list[Ended]:
        """All steps so far are over. FENCING → FENCED.

        Args:
            applied: What is known of those that were applied, or still may have been.
                The others were not.
        """
        if self.phase is not QueuePhase.FENCING:  # it was closed, or fenced, meanwhile
            return []
        doubtful, self._doubtful = self._doubtful, []
        self.phase = QueuePhase.FENCED
        ended = []
        for closure in doubtful:
            self.steps.end(closure.step)
            effect = applied.get(closure.step)
            self.cancelled += effect is None
            never = cancellation(self._cause)
            error = never if effect is None else _lost(closure, effect)
            ended.append(Ended(closure, error))
        return ended

    @property
    def is_fenced(self) -> bool:
        """Nothing runs any more, and the first error, if any, is to be raised now."""
        return self.phase is QueuePhase.FENCED

    @property
    def is_at_rest(self) -> bool:
        """Nothing runs, and nothing waits that may have run: every step has had all of
        its effect, or none."""
        waits = self._retries or self._suspects or self._doubtful
        return self.running == 0 and not waits and self.phase is not QueuePhase.FENCING

    @property
    def has_error(self) -> bool:
        """Whether a call of the user has an error to raise."""
        return self._pending and self._failures.first is not None

    @property
    def unheard(self) -> PendingError | None:
        """The first error that no call of the user has raised, nor a fetch."""
        return self._failures.unfetched if self._pending else None

    def reopen(self) -> PendingError | None:
        """The first error, for the one who raises it; None after a cancellation. FENCED
        → OPEN."""
        assert self.is_fenced, "the error is raised when nothing runs"
        pending, self._pending, self.phase = self._pending, False, QueuePhase.OPEN
        return self._failures.first if pending else None

    def fetched(self, error: Exception) -> None:
        """A fetch raises the error, now."""
        self._failures.fetched(error)
        if self.phase is QueuePhase.FAILED and self._failures.first is None:
            self._pending, self.phase = False, QueuePhase.OPEN

    def close(self, cause: str) -> list[Ended]:
        """Cancels all that waits, for good."""
        self.phase, self._pending = QueuePhase.CLOSED, False
        return self._cancel_queued(cause)

    def ready(self, now: float) -> tuple[int, int]:
        """How many ordinary closures and how many suspects may go to a worker now."""
        if not self.runs or self.suspended:
            return 0, 0
        fresh = 0 if self.held else _due(self._returned, now) + self._reachable
        return _due(self._retries, now) + fresh, _due(self._suspects, now)

    def next_due(self) -> float | None:
        """When the next closure that came back may go again."""
        heaps = [self._retries, self._suspects]
        if not self.held:  # else these wait for its end, however long they are due
            heaps.append(self._returned)
        heads = [heap[0][0] for heap in heaps if heap]
        return min(heads, default=None)

    def take(self, limit: int, now: float) -> list[Closure]:
        """At most ``limit`` ordinary closures, those that came back first."""
        assert self.runs, f"nothing is handed out while {self.phase.value}"
        taken: list[Closure] = []
        fresh = self._fresh
        # Held: only what may have had a part of its effect runs, to have all of it.
        heaps = (self._retries,) if self.held else (self._retries, self._returned)
        for heap in heaps:
            while heap and len(taken) < limit and heap[0][0] <= now:
                taken.append(heapq.heappop(heap)[2])
        count = 0 if self.held else min(limit - len(taken), self._reachable)
        begun = [fresh.popleft() for _ in range(count)]
        self._nbytes -= sum([closure.nbytes for closure in begun])
        taken += begun
        for closure in taken:
            closure.attempt += 1
        self.running += len(taken)
        return taken

    def take_suspect(self, now: float) -> Closure:
        """A closure that is to run alone."""
        due, _, closure = heapq.heappop(self._suspects)
        assert due <= now, "it has to wait longer"
        assert self.runs, f"nothing is handed out while {self.phase.value}"
        closure.attempt += 1
        self.running += 1
        return closure

    def end(self, closure: Closure, error: Exception | None = None) -> None:
        """The closure ran to its end; the first error of all is kept to be raised."""
        self._stopped(closure)
        self.steps.end(closure.step)
        if error is not None:
            closure.source.sign(error)
            self.fail(error, closure)

    def fail(self, error: Exception, closure: Closure | None = None) -> None:
        """Something is wrong; the first such error waits for the user's next call."""
        if not self.runs:
            return  # provoked by cancelling: it belongs to its own value alone
        if self.phase is QueuePhase.OPEN:
            self.phase, self._pending = QueuePhase.FAILED, True
            self._failures.begin()
        source = None if closure is None else closure.source
        self._failures.add(PendingError(error, source))

    def retry(
        self, closure: Closure, now: float, delay: float = 0.0, *, begun: bool
    ) -> list[Ended]:
        """The closure did not run to its end through no fault of its own.

        Args:
            begun: It may have run, so that its effect may be there.
        """
        self._stopped(closure)
        closure.begun |= begun
        closure.attempt -= not begun  # that was none
        if self.phase is QueuePhase.CLOSED:
            return self._cancel([closure], None)
        if not self.runs:
            if not closure.begun:
                return self._cancel([closure], self._cause)
            # It may have had its effect: the fence will say.
            self._doubtful.append(closure)
            return []
        heap = self._returned
        if closure.begun:
            heap = self._suspects if closure.is_suspect else self._retries
        # Held: it came back because it was asked for, not because something is wrong.
        due = 0.0 if self.held and not closure.begun else now + delay
        heapq.heappush(heap, (due, closure.step, closure))
        return []

    def lost(self, closure: Closure, worker: str, now: float) -> list[Ended]:
        """The worker that had the closure in flight is gone."""
        closure.losses = (*closure.losses, worker)
        lost = len(closure.losses)
        if lost >= self.max_attempts and self.runs:
            error = WorkerLostError(
                ", ".join(closure.losses),
                f"{closure.name} (step {closure.step}) was given up: in {lost} "
                "attempts each worker that ran it was lost, so it seems to be what "
                "kills them (out of memory, a crash in native code?); raise "
                "max_attempts= if workers are often lost for other reasons. Its "
                "updates may have been applied",
            )
            self.end(closure, error)
            return [Ended(closure, error)]
        wait = FIRST_DELAY * 2.0 ** (lost - SUSPECT_AFTER)
        delay = 0.0 if lost < SUSPECT_AFTER else min(wait, LONGEST_DELAY)
        return self.retry(closure, now, delay, begun=True)

    @property
    def _reachable(self) -> int:
        """Fresh closures that are not too far ahead of the lowest one."""
        if not self._fresh:
            return 0
        ahead = self._fresh[0].step - self.steps.low_water
        return min(len(self._fresh), max(0, self.max_ahead - ahead))

    def _stopped(self, closure: Closure) -> None:
        assert self.running > 0, f"step {closure.step} stopped, but nothing runs"
        self.running -= 1

    def _cancel_queued(self, cause: str | None) -> list[Ended]:
        heaps = (*self._retries, *self._suspects, *self._returned)
        waiting = [*(item[2] for item in heaps), *self._fresh, *self._doubtful]
        self._fresh.clear()
        self._nbytes = 0
        self._retries.clear()
        self._suspects.clear()
        self._returned.clear()
        self._doubtful.clear()
        # Closed for good: no fence will say which of them were applied.
        if self.phase is not QueuePhase.CLOSED:
            self._doubtful = [closure for closure in waiting if closure.begun]
            waiting = [closure for closure in waiting if not closure.begun]
        return self._cancel(waiting, cause)

    def _cancel(self, closures: list[Closure], cause: str | None) -> list[Ended]:
        if not closures:
            return []
        for closure in closures:
            self.steps.end(closure.step)
        self.cancelled += len(closures)
        never, perhaps = cancellation(cause), cancellation(cause, begun=True)
        return [Ended(each, perhaps if each.begun else never) for each in closures]


def _due(heap: list[_Waiting], now: float) -> int:
    if not heap or heap[0][0] > now:
        return 0
    return sum(due <= now for due, _, _ in heap)


def cancellation(cause: str | None = None, *, begun: bool = False) -> CancelledError:
    """What the value of a cancelled closure says."""
    words = "The corresponding function is cancelled. Please reschedule the function."
    if begun:
        words = (
            "The corresponding function is cancelled. A worker had begun it, so its "
            "updates may have been applied: to schedule it again may apply them twice."
        )
    return CancelledError(f"{words} ({cause})" if cause else words)


def _lost(closure: Closure, effect: Effect) -> ResultLostError:
    by = f" with {', '.join(closure.losses)}" if closure.losses else ""
    again = "would" if effect.is_certain else "may"
    return ResultLostError(
        closure.step,
        f"{closure.name} was running when another one failed, and its result is lost"
        f"{by}. Its updates {effect.words}: to schedule it again {again} apply them "
        "twice",
    )
