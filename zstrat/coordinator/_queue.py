"""The queue of closures: which wait, which run next, and how each one ends. Decides
only, without lock, clock or socket.

The law of this file: every closure that was `put` ends exactly once, as done, failed or
cancelled, and only the queue ends one.

New closures wait in a bounded first-in-first-out queue. A closure that comes back (its
worker was lost, or a parameter server was unreachable) waits in a separate queue
*outside* the bound, which goes first. So returning closures never waits for a free
slot, and a full queue cannot lock up when all workers fail.

A closure that was in flight on a lost worker is retried at once. From its second loss
on it is a *suspect*, as it may be what kills workers. Suspects run alone on a worker,
so that the next loss blames the right closure. They wait longer after each loss, and
after ``max_attempts`` losses the closure fails with the names of the lost workers.

    OPEN ──first error──▶ FAILED ─────next call of the user────▶ CANCELLING
      ▲                                                                 │
      │                                        nothing runs on connected workers
      │                                                                 ▼
      └─── the error is raised, once ─── FENCED ◀──all ps say so─── FENCING

While FAILED, other closures continue, as in TensorFlow. CLOSED is final. Cancelling by
the user goes the same way from OPEN, and raises no error at its end. With
``errors_once`` an error that a fetch raised counts as raised: when none is left, FAILED
becomes OPEN again, and nothing is cancelled.

A lost worker may have applied the closure that it had, or may still run it (a
*zombie*). So before the error is raised, a fence notifies all parameter servers that
every step so far is over, and they answer which of these *doubtful* closures they
applied. The others are cancelled, and when the error is raised nothing runs.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import (
    CancelledError,
    ResultLostError,
    WorkerLostError,
)

from ._steps import ClosureSource, PendingError, PendingErrors, Steps
from .leases import SessionLeases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.wire import PlainTree

    from ._calls import ScheduledCall
    from ._steps import CallSite
    from ._values import RemoteValue
    from .leases import Draw


class QueueLeft(NamedTuple):
    """The state of the queue, as workers get it with closures: the number of closures
    left (``waiting``), whether the queue was ``full`` before, and ``metrics`` for
    observers (None: unchanged)."""

    waiting: int = 0
    full: bool = False
    metrics: PlainTree = None


MAX_QUEUED: Final = 262_144
"""Default for the most closures that wait, as in TensorFlow: about 100 MB."""
MAX_QUEUED_BYTES: Final = 2**30
"""The most bytes in the arguments of waiting closures, which are copies: batches would
fill the memory of the program long before there are too many closures."""
MAX_AHEAD: Final = 2**19
"""The most steps that may overtake the oldest unfinished one: half of the steps that a
parameter server can remember (`zstrat.ps.store._ledger`)."""
MAX_ATTEMPTS: Final = 5
SUSPECT_AFTER: Final = 2
"""Number of losses from which a closure is a suspect. One loss is bad luck, as machines
are preempted. Two of the same closure are a clue."""
FIRST_DELAY: Final = 0.1
"""Seconds that a suspect waits after its second loss. Each further loss doubles them,
up to `LONGEST_DELAY`."""
LONGEST_DELAY: Final = 5.0
HANDBACK_DELAY: Final = 0.05
"""Seconds before a closure is retried that its worker returned without running it."""


class QueuePhase(enum.Enum):
    """The phase of the queue; the drawing is in the docstring of the module."""

    OPEN = "open"
    FAILED = "failed"
    CANCELLING = "cancelling"
    FENCING = "fencing"
    FENCED = "fenced"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Closure:
    """One scheduled call. The queue uses neither ``call`` nor ``value``."""

    call: ScheduledCall
    value: RemoteValue
    name: str = "closure"
    claims: tuple[object, ...] = ()
    """Keeps resources alive until the closure has ended."""
    site: CallSite | None = None
    inputs: bytes = b""
    """The bytes of the arrays among the arguments of this closure."""
    nbytes: int = 0
    """Memory in bytes of arguments that no other closure shares."""
    step: int = -1
    attempt: int = 0
    """How often the closure was handed to a worker."""
    busy_since: float | None = None
    """Time at which a task first was too busy for the closure; None if none was."""
    losses: tuple[str, ...] = ()
    """Names of the workers that were lost while they had the closure."""
    draws: Sequence[Draw] = ()
    """Number of batches that the closure draws from each leased dataset."""
    leases: bytes = b""
    """The packed leases of the closure, from when it is first handed out."""
    begun: bool = False
    """Whether a worker may have sent the closure's updates without reporting
    success."""

    @property
    def is_suspect(self) -> bool:
        return len(self.losses) >= SUSPECT_AFTER

    @property
    def source(self) -> ClosureSource:
        return ClosureSource(self.step, self.name, self.site)


@dataclass(frozen=True, slots=True)
class Ended:
    """A closure that the queue ended by itself; the caller settles the value with
    ``error``."""

    closure: Closure
    error: Exception


class Effect(NamedTuple):
    """What is known of the updates of a step whose worker was lost, as text for
    messages. ``is_certain``: a server has confirmed that it applied some of them."""

    words: str
    is_certain: bool


_Waiting = tuple[float, int, Closure]


class Queue:
    """The closures of a coordinator and their order. See the docstring of the
    module."""

    def __init__(
        self,
        max_queued: int = MAX_QUEUED,
        max_attempts: int = MAX_ATTEMPTS,
        first_step: int = 1,
        *,
        errors_once: bool = False,
    ) -> None:
        self.max_queued, self.max_attempts = max_queued, max_attempts
        self.max_ahead = MAX_AHEAD
        self.steps = Steps(first_step)
        self.phase = QueuePhase.OPEN
        self.running = 0
        self._failures = PendingErrors(errors_once)
        """The errors since the last one was raised to the user."""
        self._pending = False
        self._cause: str | None = None
        """Why waiting closures are cancelled, while they are being cancelled."""
        self.cancelled = 0
        """Number of closures cancelled so far."""
        self._fresh: deque[Closure] = deque()
        self._nbytes = 0
        """Bytes of arguments of the fresh (never handed out) and the parked
        closures."""
        self._retries: list[_Waiting] = []
        self._suspects: list[_Waiting] = []
        self._returned: list[_Waiting] = []
        """Closures that workers returned before starting them."""
        self._doubtful: list[Closure] = []
        self.leases: Final = SessionLeases[Closure]()
        self.exhausted: list[Ended] = []
        """Closures that ended because no data are left for them; their values are not
        settled yet."""
        self.held = False
        """Whether only closures that may have started before are handed out (see
        `is_at_rest`)."""
        self.suspended = False
        """Whether no closures are handed out, while a lost parameter server is awaited
        or restored."""

    @property
    def errors(self) -> list[Exception]:
        """The errors since the last one was raised to the user, oldest first."""
        return self._failures.errors

    @property
    def queued(self) -> int:
        """Number of closures that wait for a worker, including those that came back."""
        back = len(self._retries) + len(self._suspects) + len(self._returned)
        return len(self._fresh) + back + self.parked

    @property
    def parked(self) -> int:
        """Number of closures that wait for data: until leases of other closures have
        ended, or come back."""
        return self.leases.parked

    @property
    def runs_again(self) -> bool:
        """Whether a closure is waiting that a worker may have run before."""
        return bool(self._retries or self._suspects)

    @property
    def unfinished(self) -> str:
        """Describes how many closures run and wait."""
        return f"{self.running} closures run and {self.queued} wait"

    @property
    def waiting_fresh(self) -> int:
        """Number of closures that wait for their first worker."""
        return len(self._fresh)

    @property
    def is_full(self) -> bool:
        """Whether too many closures, or too many bytes, wait for their first worker."""
        waiting = len(self._fresh) + self.leases.parked
        return waiting >= self.max_queued or self._nbytes >= MAX_QUEUED_BYTES

    @property
    def is_idle(self) -> bool:
        """Whether no closure waits or runs."""
        return self.steps.low_water == self.steps.next

    @property
    def accepts(self) -> bool:
        """Whether `put` takes a closure now."""
        return self.phase is QueuePhase.OPEN and not self.is_full

    @property
    def runs(self) -> bool:
        """Whether closures may be handed out in this phase."""
        return self.phase in (QueuePhase.OPEN, QueuePhase.FAILED)

    def put(self, closure: Closure) -> bool:
        """Gives a new closure its step number and appends it; returns False if the
        queue is full or not open."""
        if self.phase is not QueuePhase.OPEN or self.is_full:
            return False
        # Numbered here, not when it is handed out: `join` waits for all numbers up to
        # now, and rounds add contributions in the order of the calls.
        closure.step = self.steps.issue()
        self._fresh.append(closure)
        self._nbytes += closure.nbytes
        return True

    def cancel_waiting(self, cause: str | None = None) -> list[Ended]:
        """Cancels the waiting closures; running ones continue. OPEN or FAILED →
        CANCELLING."""
        assert self.runs, f"cancelled while {self.phase.value}"
        self.phase, self._cause = QueuePhase.CANCELLING, cause
        return self._cancel_queued(cause)

    @property
    def is_quiet(self) -> bool:
        """Whether the phase is CANCELLING, and no connected worker runs a closure."""
        return self.phase is QueuePhase.CANCELLING and self.running == 0

    @property
    def doubtful(self) -> list[int]:
        """Returns the steps of doubtful closures: no worker has them, but they may have
        been applied."""
        return [closure.step for closure in self._doubtful]

    def fence(self) -> None:
        """Begins to close all steps so far on the servers. CANCELLING → FENCING."""
        assert self.is_quiet, "fenced while closures run"
        self.phase = QueuePhase.FENCING

    def fenced(self, applied: Mapping[int, Effect]) -> list[Ended]:
        """Ends the doubtful closures, now that all steps so far are closed on the
        servers. FENCING → FENCED.

        Args:
            applied: What is known of the steps that were, or may have been, applied.
                The others were not.
        """
        if self.phase is not QueuePhase.FENCING:  # it was closed, or fenced, meanwhile
            return []
        doubtful, self._doubtful = self._doubtful, []
        self.phase = QueuePhase.FENCED
        ended = []
        # Only now: while the fence was raised, these steps kept the low water down, so
        # no server could forget them before it had answered.
        for closure in doubtful:
            self.steps.end(closure.step)
            effect = applied.get(closure.step)
            never = cancellation(self._cause)
            error = never if effect is None else _lost(closure, effect)
            if effect is None:
                self.cancelled += 1
                self.leases.cancelled(closure)
            # The push that was applied carried the leases, too, so its examples are
            # read. If it is not certain, they are left out: reading them again might
            # train on them twice.
            elif closure.leases and effect.is_certain:
                self.leases.applied(closure)
            elif closure.leases:
                self.leases.failed(closure, error)
            ended.append(Ended(closure, error))
        return ended

    @property
    def is_at_rest(self) -> bool:
        """Whether no closure runs, and none is waiting that may have run before: every
        step was applied on all servers or on none."""
        waits = self._retries or self._suspects or self._doubtful
        return self.running == 0 and not waits and self.phase is not QueuePhase.FENCING

    @property
    def has_error(self) -> bool:
        """Whether the next call of the user raises an error."""
        return self._pending and self._failures.first is not None

    @property
    def unraised(self) -> PendingError | None:
        """The first error that neither a call nor a fetch has raised."""
        return self._failures.unfetched if self._pending else None

    def reopen(self) -> PendingError | None:
        """Returns the first error, for the caller to raise, or None after a
        cancellation. FENCED → OPEN."""
        assert self.phase is QueuePhase.FENCED, "the error is raised after the fence"
        pending, self._pending, self.phase = self._pending, False, QueuePhase.OPEN
        return self._failures.first if pending else None

    def fetched(self, error: Exception) -> None:
        """Notes that a fetch has raised the error."""
        self._failures.fetched(error)
        # Nothing was cancelled yet, as no call of the user has come: so the run simply
        # continues (`errors_once`).
        if self.phase is QueuePhase.FAILED and self._failures.first is None:
            self._pending, self.phase = False, QueuePhase.OPEN

    def close(self, cause: str) -> list[Ended]:
        """Cancels all waiting closures. → CLOSED."""
        self.phase, self._pending = QueuePhase.CLOSED, False
        return self._cancel_queued(cause)

    def ready(self, now: float) -> tuple[int, int]:
        """Returns how many ordinary closures, and how many suspects, a worker may get
        now."""
        if not self.runs or self.suspended:
            return 0, 0
        fresh = 0 if self.held else _due(self._returned, now) + self._reachable
        return _due(self._retries, now) + fresh, _due(self._suspects, now)

    def next_due(self) -> float | None:
        """Returns the time at which the next closure that came back may be handed out;
        None if none waits."""
        heaps = [self._retries, self._suspects]
        if not self.held:  # else these wait until it ends
            heaps.append(self._returned)
        heads = [heap[0][0] for heap in heaps if heap]
        return min(heads, default=None)

    def take(self, limit: int, now: float) -> list[Closure]:
        """Hands out at most ``limit`` ordinary closures, first those that came back."""
        assert self.runs, f"nothing is handed out while {self.phase.value}"
        taken: list[Closure] = []
        fresh = self._fresh
        # Held: only closures that may be applied in part run, to be applied in full.
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
        return self._lease(taken) if self.leases.books else taken

    def take_suspect(self, now: float) -> Closure:
        """Hands out a suspect, which has to run alone."""
        due, _, closure = heapq.heappop(self._suspects)
        assert due <= now, "it has to wait longer"
        assert self.runs, f"nothing is handed out while {self.phase.value}"
        closure.attempt += 1
        self.running += 1
        return closure

    def end(self, closure: Closure, error: Exception | None = None) -> None:
        """Ends a closure that ran to its end. The first ``error`` is kept for the next
        call of the user, which raises it."""
        self._stopped(closure)
        self.steps.end(closure.step)
        skipped = False
        if closure.leases:
            if error is None:
                self.leases.applied(closure)
            else:
                skipped = self.leases.failed(closure, error)
            if self.leases.parked:
                for draw in closure.draws:
                    self.leases_changed(draw.resource)
        if error is not None:
            closure.source.sign(error)
            # Skipped examples (`on_error="skip"`) are an expected failure: the value
            # raises it, the run does not.
            if not skipped:
                self.fail(error, closure)

    def fail(self, error: Exception, closure: Closure | None = None) -> None:
        """Keeps an error for the next call of the user. If there are several, the call
        raises the first one."""
        if not self.runs:
            return  # an effect of cancelling, which only its own value raises
        if self.phase is QueuePhase.OPEN:
            self.phase, self._pending = QueuePhase.FAILED, True
            self._failures.begin()
        source = None if closure is None else closure.source
        self._failures.add(PendingError(error, source))

    def retry(
        self, closure: Closure, now: float, delay: float = 0.0, *, begun: bool
    ) -> list[Ended]:
        """Puts a closure that did not end, through no fault of its own, back into the
        queue. Returns closures that ended instead, for the caller to settle.

        Args:
            begun: The closure's updates may have been applied.
        """
        self._stopped(closure)
        closure.begun |= begun
        closure.attempt -= not begun  # it does not count
        if self.phase is QueuePhase.CLOSED:
            # Nobody waits for a fence any longer, so its value says that it may have
            # been applied.
            return self._cancel([closure], None)
        if not self.runs:
            if not closure.begun:
                return self._cancel([closure], self._cause)
            # It may have been applied; the fence will say.
            self._doubtful.append(closure)
            return []
        # What may have been applied goes before what was not begun: a checkpoint waits
        # for the former alone (`is_at_rest`).
        heap = self._returned
        if closure.begun:
            heap = self._suspects if closure.is_suspect else self._retries
        # Held: it came back because it was called back, so it need not wait.
        due = 0.0 if self.held and not closure.begun else now + delay
        heapq.heappush(heap, (due, closure.step, closure))
        return []

    def lost(self, closure: Closure, worker: str, now: float) -> list[Ended]:
        """Puts a closure whose worker was lost back into the queue, or fails it as the
        likely cause of the losses. Returns closures that ended, for the caller to
        settle."""
        closure.losses = (*closure.losses, worker)
        closure.begun = True
        lost = len(closure.losses)
        # While the queue is cancelled, the fence decides instead: it may find the
        # updates applied, or never sent.
        if lost >= self.max_attempts and self.runs:
            error = WorkerLostError(
                ", ".join(closure.losses),
                f"{closure.name} (step {closure.step}) failed: all {lost} workers that "
                "ran it were lost, so it probably kills them (out of memory, a crash "
                "in native code?). Raise max_attempts= if workers are often lost for "
                "other reasons. Its updates may have been applied",
            )
            self.end(closure, error)
            return [Ended(closure, error)]
        wait = FIRST_DELAY * 2.0 ** (lost - SUSPECT_AFTER)
        delay = 0.0 if lost < SUSPECT_AFTER else min(wait, LONGEST_DELAY)
        return self.retry(closure, now, delay, begun=True)

    @property
    def _reachable(self) -> int:
        """Returns how many fresh closures may be handed out without getting too far
        ahead of the oldest unfinished step."""
        if not self._fresh:
            return 0
        # Fresh closures have consecutive steps, but for a few that were parked. So one
        # subtraction does, and the margin of `MAX_AHEAD` covers these.
        ahead = self._fresh[0].step - self.steps.low_water
        return min(len(self._fresh), max(0, self.max_ahead - ahead))

    def leases_changed(self, resource: int) -> None:
        """Puts closures that wait for leases of the dataset ``resource`` back into the
        queue, so that they try again."""
        self._fresh.extendleft(reversed(self.leases.unpark(resource)))

    def give_leases_back(self, resource: int) -> None:
        """Takes the leases of the dataset ``resource`` from closures that have not
        started, because the pass is about to continue at another position. Nothing may
        run."""
        self.leases.give_back(resource, [item[2] for item in self._returned])

    def _lease(self, taken: list[Closure]) -> list[Closure]:
        """Leases the data that these closures draw. Returns the closures that have
        their leases. The others wait for leases, or end as no data are left."""
        leased = self.leases.lease(taken)
        if leased is None:
            return taken
        # They were taken as fresh ones; parking undoes that, and their bytes count
        # again.
        for closure in leased.parked:
            self.running -= 1
            closure.attempt -= 1
            self._nbytes += closure.nbytes
        for closure, error in leased.over:
            self.end(closure, error)
            self.exhausted.append(Ended(closure, error))
        return leased.ready

    def _stopped(self, closure: Closure) -> None:
        assert self.running > 0, f"step {closure.step} stopped, but nothing runs"
        self.running -= 1

    def _cancel_queued(self, cause: str | None) -> list[Ended]:
        heaps = (*self._retries, *self._suspects, *self._returned)
        waiting = [*(item[2] for item in heaps), *self._fresh, *self._doubtful]
        waiting += self.leases.unpark_all()
        self._fresh.clear()
        self._nbytes = 0
        self._retries.clear()
        self._suspects.clear()
        self._returned.clear()
        self._doubtful.clear()
        # If it is closed, no fence will say which of them were applied.
        if self.phase is not QueuePhase.CLOSED:
            self._doubtful = [closure for closure in waiting if closure.begun]
            waiting = [closure for closure in waiting if not closure.begun]
        return self._cancel(waiting, cause)

    def _cancel(self, closures: list[Closure], cause: str | None) -> list[Ended]:
        if not closures:
            return []
        for closure in closures:
            self.steps.end(closure.step)
            self.leases.cancelled(closure)
        self.cancelled += len(closures)
        never, perhaps = cancellation(cause), cancellation(cause, begun=True)
        return [
            Ended(closure, perhaps if closure.begun else never) for closure in closures
        ]


def _due(heap: list[_Waiting], now: float) -> int:
    if not heap or heap[0][0] > now:
        return 0
    return sum(due <= now for due, _, _ in heap)


def cancellation(cause: str | None = None, *, begun: bool = False) -> CancelledError:
    """Returns the error for the value of a cancelled closure; ``begun``: its updates
    may have been applied."""
    words = "The corresponding function is cancelled. Please reschedule the function."
    if begun:
        words = (
            "The corresponding function is cancelled. A worker had started it, so its "
            "updates may have been applied; scheduling it again may apply them twice."
        )
    return CancelledError(f"{words} ({cause})" if cause else words)


def _lost(closure: Closure, effect: Effect) -> ResultLostError:
    by = f" with {', '.join(closure.losses)}" if closure.losses else ""
    again = "would" if effect.is_certain else "may"
    return ResultLostError(
        closure.step,
        f"{closure.name} was running when another closure failed, and its result is "
        f"lost{by}. Its updates {effect.words}; scheduling it again {again} apply them "
        "twice",
    )
