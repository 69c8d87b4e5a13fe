"""Decides what a worker does next: which closure to prepare, to run, and what to post
when.

A closure is *queued*, then *prepared* (its batch drawn, its program found), then it
waits in the *line* for the values that it reads, runs, and leaves an *ending* (its
outcome) and perhaps a push. Between the thread that does this and the event loop that
owns the sockets every hop costs a wake-up, so messages that have to cross are collected
in an *outbox* and *posted* (handed to the loop) at once. Theory of operation:

- Order. Closures run in the order of dispatch. A closure reads what those before it
  wrote: its pull is posted only after their pushes, on the same links, which keep
  order. So the closures of the line up to the first *writer* may be pulled, and one
  closure after it may be prepared while the writer waits or runs (``_held``). When the
  writer has run, its push and the pull of the next closure leave in one post: a
  training step costs one hop each way and one round trip.
- With a ``prefetch`` of n, steps that only write gradients for optimizers do not wait
  for each other's pushes: the values of the next n are pulled while one computes. These
  values are then older by up to n steps of this worker, as those of the other workers
  are anyway.
- Levels. The rows that a step looks up may say which rows it needs next. The answer to
  its pull is then given to the program (*advance*), which names what to pull next; the
  step may run after its last answer. A step that may be pulled may be pulled again at
  any time, so steps advance wherever in the line they are, and before the head runs.
- Read-only closures may be prepared ``window`` ahead. Those that read the same
  variables share one pull: each of them was dispatched before that pull, so a value
  read by it is as fresh as its own pull could promise. Rows are never shared.
- The values that wait in the line, and the rows that steps have made from answers when
  they advanced, are bounded: beyond ``budget`` nothing is prepared or advanced but what
  the head needs, and the one step after it.
- Elements are drawn in the order of the closures. A step whose values do not arrive
  gives its element back, so the steps after it that failed with it give theirs back
  first, and the others are prepared once more (`put_back`).
- A window of local steps may have steps that need no values (*begin*). The head
  computes them while its pull is under way; all closures before it have run.
- A closure that cannot be prepared ends when those before it have run, and nothing is
  prepared after it until then: a dataset that has ended must not make the closures fail
  that still had an element.
- An outbox is posted when nothing else can be done, when a pull in it is what the head
  of the line waits for, or when the next piece of work would end after the oldest entry
  has waited for ``interval``. Work that was never measured counts as endless, so no
  result waits for the compilation of another step.

No thread, no clock, no socket: the executor asks what to do, and does it. The law: each
dispatched closure leaves in exactly one ending (by `ran`, `refused` or `cancelled`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.telemetry import EagerTimes, Phase, StepUnderWay

from ._closure import ClosureStep, Do, Post, SharedPull, StepNotes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.telemetry import EagerNotes

    from ._closure import Costs

WINDOW: Final = 32
"""Most read-only closures to prepare ahead: at 20 µs each, half of them hide a round
trip of 300 µs while the pull of the other half is under way."""
INTERVAL: Final = 1e-3
"""Seconds that an ending may wait for others, to be sent in one message: 50 quick
closures share one message, and nobody notices a millisecond."""
PAUSE: Final = 10.0
"""Seconds without a closure after which the program counts as busy with something else,
not as between two steps."""
BUDGET: Final = 64 * 2**20
"""Bytes of values in the line beyond which the line does not grow. More would fill the
memory to save a round trip that is short beside the transfer."""


@final
class Pipeline:
    """The closures of one session on their way through one worker. Decides what the
    executor thread does next."""

    __slots__ = (
        "_answered", "_budget", "_bytes", "_depth", "_following", "_held", "_interval",
        "_line", "_oldest", "_outbox", "_queue", "_quick", "_refilling", "_stuck",
        "_waits", "_window", "_writer", "is_captured", "preparing",
    )  # fmt: skip

    def __init__(
        self,
        *,
        window: int = WINDOW,
        interval: float = INTERVAL,
        budget: int = BUDGET,
        prefetch: int = 0,
    ) -> None:
        self._depth: Final = prefetch
        self._window: Final = window
        self._interval: Final = interval
        self._budget: Final = budget
        self._queue: Final[deque[ClosureStep]] = deque()
        self._line: Final[deque[ClosureStep]] = deque()
        self._writer: ClosureStep | None = None
        """The first step of the line that writes."""
        self._following = 0
        """Number of steps after the writer in the line; they are pulled before the
        writer's push."""
        self._held: ClosureStep | None = None
        """The last step of the line, if its pull has to wait for all pushes before it;
        it is one of ``_following``."""
        self._answered: Final[deque[ClosureStep]] = deque()
        """Steps whose values have arrived, and which have to advance before their next
        pull."""
        self._stuck = False
        """Whether the first step of the queue was refused; it ends after the steps of
        the line."""
        self._bytes = 0
        self._refilling = False
        self._outbox = Post()
        self._quick = self._outbox.times.quick
        self._oldest = math.inf
        self.is_captured = False
        """Whether each step, even a quick one, is reported with its number and times.
        Any thread may set this."""
        self._waits: float | None = None
        """Since when there has been nothing to do; None: there is work."""
        self.preparing: tuple[ClosureStep, float] | None = None
        """The step that is being prepared (draws elements, or has its program made),
        and since when."""

    def __len__(self) -> int:
        """Returns the number of closures that have not run."""
        return len(self._queue) + len(self._line)

    # What happened

    def dispatched(
        self, task: Any, costs: Costs, numbers: Iterable[int], now: float
    ) -> None:
        """Adds closures, to run after all that arrived before."""
        # Idle is only time in which nothing waited for values either; see `_stalled`.
        if self._waits is not None and not self._line:
            idle, self._waits = now - self._waits, None
            self._outbox.times.idle += idle if idle < PAUSE else 0.0
        self._queue.extend([ClosureStep(n, task, costs, now) for n in numbers])

    def prepared(
        self,
        step: ClosureStep,
        now: float,
        *,
        cost: float = 0.0,
        reads: Any = None,
        nbytes: int = 0,
        levels: int = 0,
        writes: bool = False,
        optimizes: bool = False,
        alone: bool = False,
        begins: bool = False,
        examples: int = 0,
    ) -> None:
        """Records that the step returned by `next` is prepared, except for the values
        it reads.

        Args:
            begins: A part of the step can be computed before its values arrive.
            levels: How often the step has to advance before it can run.
            alone: The step sends its own requests to the parameter servers while it
                runs, so everything before it must have been posted.
            examples: How many examples the step has drawn.
        """
        first = self._queue.popleft()
        assert first is step
        step.costs.prepare = cost
        step.prepared = now
        if cost:
            step.notes = StepNotes(cost, examples)
        step.reads, step.writes, step.alone = reads, writes, alone
        step.begins = begins
        step.optimizes, step.levels = optimizes, levels
        # The values of a shared pull are in memory once, so only one step counts them.
        writer, line = self._writer, self._line
        shared = writer is None and line and line[-1].reads is reads
        step.nbytes = 0 if shared else nbytes
        self._bytes += step.nbytes
        line.append(step)
        if writer is None:
            self._open(step, now)
            return
        # A step after the writer is not pulled yet (``_held``), unless both only feed
        # optimizers and the user allows older values.
        self._following += 1
        if self._depth and writer.optimizes and optimizes:
            self._fetch(step, now)
        else:
            self._held = step

    def refused(self, step: ClosureStep, ending: Any, now: float) -> None:
        """Records that the step returned by `next` could not be prepared."""
        assert self._queue[0] is step
        # Not an ending yet: its error would have the coordinator cancel the steps
        # before it, which are prepared and can still run.
        step.ending, self._stuck = ending, True
        if not self._line:
            self._release(now)

    def arrived(
        self,
        pull: SharedPull,
        values: Any,
        now: float,
        error: BaseException | None = None,
    ) -> None:
        """Hands the answer to a pull, or its error, to the steps that wait for it.
        Ignores steps that were cancelled."""
        if self._waits is not None and self._line:
            self._stalled(pull, max(0.0, now - self._waits))
            self._waits = None
        # All steps of the pull waited as long, whenever they joined it.
        took = max(0.0, now - pull.asked)
        for step in pull.steps:
            if step.dropped:
                continue
            notes = step.notes
            assert notes is not None
            notes.arrived = now
            notes.pulled += took
            # The clocks of the first pull stay: staleness counts from the oldest value
            # that a step uses. So it is with rounds.
            notes.clocks = {**pull.clocks, **(notes.clocks or {})}
            if pull.rounds:
                notes.rounds = notes.rounds or pull.rounds
            step.values, step.error = values, error
            # With an error it does not advance but gets its turn, in which it ends.
            if step.levels and error is None:
                self._answered.append(step)
            else:
                step.ready = True

    def begun(self, step: ClosureStep, cost: float) -> None:
        """Records that the step returned by `next` has computed the part that needs no
        values."""
        step.begins, step.begun = False, cost

    def advanced(
        self,
        step: ClosureStep,
        now: float,
        *,
        cost: float = 0.0,
        reads: Any = None,
        nbytes: int = 0,
    ) -> None:
        """Records that the step returned by `next` has used the values of its last
        pull, and next needs ``reads``."""
        self._answered.remove(step)
        step.costs.advance = cost
        step.levels -= 1
        step.values, step.reads = None, reads
        step.nbytes += nbytes
        self._bytes += nbytes
        self._fetch(step, now)

    def broke(self, step: ClosureStep, ending: Any) -> None:
        """Records that the step returned by `next` raised when it was given the values
        of a pull, to name the rows that it needs next. The step ends with ``ending``
        when all steps before it have run."""
        self._answered.remove(step)
        step.ending, step.ready = ending, True

    def ran(
        self,
        step: ClosureStep,
        ending: Any,
        now: float,
        *,
        cost: float,
        push: Any = None,
        eager: EagerNotes | None = None,
    ) -> None:
        """Records that the step returned by `next` has run. Its ending waits for the
        acknowledgement of the push, if there is one."""
        line = self._line
        first = line.popleft()
        assert first is step
        if step.nbytes:
            self._let_go(step)
        step.costs.run = cost
        notes = step.notes
        if eager is not None:
            begun = step.received, step.prepared
            noted = EagerTimes(step.number, *begun, cost, now, eager)
            self._outbox.times.eager.append(noted)
        elif notes is None and not self.is_captured:
            # As `Recorder.ran` reads them, `QUICK` numbers each: change both.
            quick = self._quick
            quick.append(step.prepared - step.received)  # sooner than to add a tuple
            quick.append(cost)
        else:
            notes = notes or StepNotes()
            # As `Recorder.ran` reads them, `FULL` numbers each: change both.
            self._outbox.times.full += (
                step.number, step.received, step.prepared, cost, now, notes.drew,
                notes.asked, notes.arrived, notes.pulled, notes.examples,
            )  # fmt: skip
        if push is None:
            self.leave(ending, now)
        else:
            self._outbox.pushes.append((push, ending))
            self._outbox.read_at.append(None if notes is None else notes.clocks)
            self._oldest = min(self._oldest, now)
        if step is self._writer:
            self._pass_on(now)
        # The last step of the line is gone, so the refused one after it may end.
        if self._stuck and not self._line:
            self._release(now)

    def cancelled(self) -> tuple[list[ClosureStep], list[ClosureStep]]:
        """Removes all closures that have not run.

        Returns:
            The prepared steps, last one first (their elements are given back in that
            order), and the queued ones.
        """
        prepared, queued = list(reversed(self._line)), list(self._queue)
        # Pulls that are under way cannot be called back; `arrived` ignores steps that
        # are dropped.
        for step in prepared:
            step.dropped = True
        self._line.clear()
        self._queue.clear()
        self._answered.clear()
        self._outbox.pulls.clear()
        self._writer = self._held = None
        self._bytes = self._following = 0
        self._refilling = self._stuck = False
        # Pushes and endings of steps that have run stay, and are still due.
        if not self._outbox:
            self._oldest = math.inf
        return prepared, queued

    def put_back(self) -> list[ClosureStep]:
        """Moves the steps after the head back to the queue, because the head gives its
        element back, and later elements have to be given back first. Steps next to the
        head whose values also failed to arrive stay in the line, and only give their
        elements back.

        Returns:
            The steps after the head whose elements are to be given back, last one
            first.
        """
        # The values of one pull fail together, so what failed with the head stands next
        # to it. It keeps its place and ends the same way.
        line, failed = self._line, 1
        while failed < len(line) and line[failed].error is not None:
            failed += 1
        again = [line.pop() for _ in range(len(line) - failed)]
        if self._stuck:  # by the end of the data, perhaps, which is not reached now
            self._stuck, self._queue[0].ending = False, None
        for step in again:
            step.dropped = True
            self._bytes -= step.nbytes
            # A new object: the pull of the old one may still be answered.
            fresh = ClosureStep(step.number, step.task, step.costs, step.received)
            self._queue.appendleft(fresh)
        if again:
            self._forget(again)
        return again + [*line][:0:-1]

    def leave(self, ending: Any, now: float) -> None:
        """Queues an ending to be posted. The caller does so after `cancelled`; all
        other events queue their endings themselves."""
        self._outbox.endings.append(ending)
        self._oldest = min(self._oldest, now)

    def under_way(self, last_post: float) -> StepUnderWay | None:
        """Returns the step that the executor thread runs; None: no step, or unknown.
        The loop calls this while the executor changes the line. That is safe, because a
        deque is copied in one operation of the interpreter, but the step may have ended
        at that moment.

        Args:
            last_post: When the thread last posted: it has begun nothing earlier.
        """
        # Copied once; what follows looks at this moment only.
        preparing, waits, line = self.preparing, self._waits, tuple(self._line)
        if preparing is not None:
            return StepUnderWay(Phase.DRAW, preparing[0].number, preparing[1])
        if not line:
            return None
        head = line[0]
        if waits is not None:
            return StepUnderWay(Phase.PULL, head.number, waits)
        if not head.ready:
            return None
        arrived = 0.0 if head.notes is None else head.notes.arrived
        # The latest of these bounds when the thread has begun, which it does not note
        # itself.
        began = max(last_post, head.prepared, arrived)
        return StepUnderWay(Phase.COMPUTE, head.number, began)

    # What to do

    def next(self, now: float) -> tuple[Do, ClosureStep | None]:
        """Returns the next thing to do, and its step; the step is None if the thread
        has to post or to wait."""
        do, step = self._choose()
        # Without entries there is nothing to be late, and `_must_post` is skipped.
        if self._oldest < math.inf and self._must_post(do, step, now):
            return Do.POST, None
        return do, step

    def rests(self, now: float) -> None:
        """Records that the thread waits from now on, because `next` found nothing to
        do."""
        if self._waits is None:
            self._waits = now

    def post(self) -> Post:
        """Returns the outbox, and starts an empty one."""
        outbox, self._outbox = self._outbox, Post()
        # An alias that saves `ran` attribute look-ups per closure, so it has to follow
        # the outbox.
        self._quick = self._outbox.times.quick
        self._oldest = math.inf
        return outbox

    def validate(self) -> None:
        """Asserts the invariants that hold between any two calls."""
        line = list(self._line)
        writers = [step for step in line if step.writes]
        place = line.index(writers[0]) + 1 if writers else len(line)
        following = line[place:]
        assert self._writer is (writers[0] if writers else None)
        assert len(following) == self._following <= max(1, self._depth)
        early = following if self._held is None else following[:-1]
        assert self._held is None or following[-1] is self._held
        assert not early or all(step.optimizes for step in (*writers[:1], *early))
        assert place <= self._window + 1
        assert self._bytes == sum(step.nbytes for step in line) >= 0
        assert (self._oldest < math.inf) == bool(self._outbox)
        posted = {id(step) for step in line if step is not self._held}
        assert {id(s) for pull in self._outbox.pulls for s in pull.steps} <= posted
        assert {id(step) for step in self._answered} <= posted
        assert all(step.levels and not step.ready for step in self._answered)
        assert not self._stuck or (line and self._queue[0].ending is not None)

    def _choose(self) -> tuple[Do, ClosureStep | None]:
        head = self._line[0] if self._line else None
        # First: while a step that has its answer waits to advance, its next pull is not
        # under way.
        step = self._advances(head) if self._answered else None
        if step is not None:
            return Do.ADVANCE, step
        if head is None or not head.ready:
            if head is not None and head.begins:
                return Do.BEGIN, head
            if self._queue and self._may_prepare():
                return Do.PREPARE, self._queue[0]
            return Do.WAIT, None
        # Before running: a pull that leaves now is answered while the head computes.
        if self._refills(head) or self._looks_ahead(head):
            return Do.PREPARE, self._queue[0]
        return Do.RUN, head

    def _advances(self, head: ClosureStep | None) -> ClosureStep | None:
        """Returns which step to advance now, so that its next pull is under way
        meanwhile; None: no step. A step whose advance was never measured advances only
        when nothing can run, and a step other than the head only while there is room
        for the values that it requests."""
        if head in self._answered:
            return head
        step = self._answered[0]
        if self._bytes > self._budget:
            return None
        assert head is not None
        return step if step.costs.advance < math.inf or not head.ready else None

    def _may_prepare(self) -> bool:
        if self._stuck:
            return False
        if self._writer is None:
            return len(self._line) < self._window and self._bytes <= self._budget
        if not self._following:
            return True  # one step after the writer is allowed whatever it holds
        # Beyond the writer only as far as the prefetch reaches, and not behind a step
        # that has to wait for a push anyway.
        more = self._held is None and self._following < self._depth
        return more and self._bytes <= self._budget

    def _refills(self, head: ClosureStep) -> bool:
        """Returns whether to prepare the next half of the read-only closures before
        running the head, so that their pull is under way while the rest of the present
        half runs."""
        # Refill at half, up to the full window, then run down: without this memory each
        # run would be followed by one preparation, and pulls could not be shared.
        self._refilling = (
            (self._refilling or len(self._line) <= self._window // 2)
            and head.reads is not None
            and self._writer is None
            and self._may_prepare()
            and bool(self._queue)
            and self._queue[0].costs.prepare < math.inf
        )
        return self._refilling

    def _looks_ahead(self, head: ClosureStep) -> bool:
        """Returns whether to prepare a step after an optimizer step before that one
        runs, so that the pull is under way meanwhile. Otherwise values that arrived
        early would make every second round trip visible."""
        return (
            self._depth > 0
            and head is self._writer
            and head.optimizes
            and bool(self._queue)
            and self._may_prepare()
            and self._queue[0].costs.prepare < math.inf
        )

    def _must_post(self, do: Do, step: ClosureStep | None, now: float) -> bool:
        pulls = self._outbox.pulls
        match do:
            case Do.PREPARE | Do.ADVANCE:
                assert step is not None
                # A writer ends what may be pulled together: nothing can join later.
                if pulls and self._writer is not None:
                    return True
                costs = step.costs
                cost = costs.prepare if do is Do.PREPARE else costs.advance
            case Do.RUN:
                assert step is not None
                # The head may run only when its pull was answered, so a pull in the
                # outbox is of a step after it: send it before the thread is busy. An
                # eager step asks the servers itself, and must find all earlier pushes
                # there.
                if pulls or step.alone:
                    return True
                cost = step.costs.run
            case _:
                # Nothing else can be done until the loop acts on the outbox.
                return True
        return now + cost > self._oldest + self._interval

    def _open(self, step: ClosureStep, now: float) -> None:
        """Requests the values of a step. All writers before the step have run, and
        their pushes are sent before its pull or together with it."""
        if step.writes:
            self._writer = step
        self._fetch(step, now)

    def _let_go(self, step: ClosureStep) -> None:
        """Drops the values of a step that has run, unless the next one shares them."""
        # A step without reads shares nothing, though ``None is None``.
        after = self._line[0] if self._line and step.reads is not None else None
        if after is not None and after.reads is step.reads and not after.nbytes:
            after.nbytes = step.nbytes
        else:
            self._bytes -= step.nbytes

    def _pass_on(self, now: float) -> None:
        """Makes the next step of the line the writer, because the writer has run; if
        the next step was held, requests its values."""
        self._writer = None
        if not self._following:
            return
        self._following -= 1
        head = self._line[0]
        if head is self._held:
            self._held = None
            self._open(head, now)
        else:
            self._writer = head  # it was fetched ahead, so it moves what it has read

    def _stalled(self, pull: SharedPull, seconds: float) -> None:
        """Records how long the whole line has waited for values, which have now
        arrived."""
        times = self._outbox.times
        times.stalled += seconds
        # All servers answered; the last one is the one that the line has waited for.
        if pull.clocks:
            last = next(reversed(pull.clocks))
            times.stalls[last] = times.stalls.get(last, 0.0) + seconds

    def _release(self, now: float) -> None:
        """Ends the step that could not be prepared, because all steps before it have
        run."""
        self._stuck = False
        self.leave(self._queue.popleft().ending, now)

    def _forget(self, steps: list[ClosureStep]) -> None:
        """Drops steps that were removed from the end of the line from all
        bookkeeping."""
        for step in steps:
            if step in self._answered:
                self._answered.remove(step)
        pulls = self._outbox.pulls
        for pull in pulls:
            pull.steps[:] = [step for step in pull.steps if not step.dropped]
        pulls[:] = [pull for pull in pulls if pull.steps]
        # They stood at the end of the line, so if the writer is one of them, nothing
        # after it is left.
        if self._writer is not None and self._writer.dropped:
            self._writer = self._held = None
            self._following = 0
        elif self._writer is not None:
            self._held = None  # it was the last one
            self._following = len(self._line) - 1 - self._line.index(self._writer)
        self._refilling = False
        if not self._outbox:
            self._oldest = math.inf

    def _fetch(self, step: ClosureStep, now: float) -> None:
        """Adds the step's pull to the outbox. A step that reads nothing is ready at
        once."""
        if step.reads is None:
            # It reads nothing, but has levels: it can advance to its first pull at
            # once.
            if step.levels:
                self._answered.append(step)
            else:
                step.ready = True
            return
        if step.notes is None:
            step.notes = StepNotes()
        if not step.notes.asked:
            step.notes.asked = now
        pulls = self._outbox.pulls
        # Same object, same variables (`Catalog` gives one `Reads` for each set), so one
        # answer serves both.
        if pulls and pulls[-1].reads is step.reads:
            pulls[-1].steps.append(step)
        else:
            pulls.append(SharedPull(step.reads, [step], now))
        self._oldest = min(self._oldest, now)
