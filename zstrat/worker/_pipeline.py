"""What a worker does next: which closure to prepare, to run, and what to post when.

A closure is *queued*, then *prepared* (its batch drawn, its program found), then it
waits in the *line* for the values that it reads, runs, and leaves an ending and perhaps
a push. Between the thread that does this and the event loop that owns the sockets every
hop costs a wake-up, so what has to cross is collected in an outbox and posted at once.
Theory of operation:

- Order. Closures run in the order of dispatch. A closure reads what those before it
  wrote: its pull is posted only after their pushes, on the same links, which keep
  order. So of the line everything up to the first *writer* may be pulled, and one
  closure behind it may be prepared while the writer waits or runs (``_after``). When
  the writer has run, its push and the pull of the next one leave in one post: a
  training step costs one hop each way and one round trip.
- With ``prefetch``, a step that only feeds optimizers does not wait for the push of
  another one: its values are pulled while that one computes. They are then older by
  one step of this worker, as those of the other workers are anyway.
- Read-only closures may be prepared ``window`` ahead. Those that read the same
  variables share one pull: each of them was dispatched before that pull, so a value
  read by it is as fresh as its own pull could promise.
- An outbox is posted when nothing else can be done, when a pull in it is what the
  head of the line waits for, or when the next piece of work would end after the oldest
  entry has waited for ``interval``. Work that was never measured counts as endless, so
  nobody's result waits for somebody else's compilation.

No thread, no clock, no socket: the executor calls and obeys. The law: each dispatched
closure leaves in exactly one ending (by `ran`, `refused` or `cancelled`).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW: Final = 32
"""Read-only closures prepared ahead: at 20 µs each, half of them hide a round trip of
300 µs while the other half's pull is under way."""
INTERVAL: Final = 1e-3
"""Seconds that an ending may wait for company: 50 quick closures share one message, and
nobody notices a millisecond."""
BUDGET: Final = 64 * 2**20
"""Bytes of values that may wait in the line before it grows no more; beyond, looking
ahead would fill the memory to save a round trip that is short beside the transfer."""


class Do(enum.Enum):
    """What the executor is to do now."""

    PREPARE = enum.auto()
    RUN = enum.auto()
    POST = enum.auto()
    WAIT = enum.auto()


@final
@dataclass(slots=True, eq=False)
class Costs:
    """The seconds that the last preparation and the last run of a function took."""

    prepare: float = math.inf
    run: float = math.inf


@final
@dataclass(slots=True, eq=False)
class Step:
    """One closure on its way: the executor says what it is, the pipeline where."""

    number: int
    task: Any
    """What to run; shared by the steps of a batch."""
    costs: Costs
    work: Any = None
    """What the executor made of the task when it prepared the step."""
    reads: Any = None
    """What is pulled for it, compared by identity; None: nothing."""
    nbytes: int = 0
    writes: bool = False
    optimizes: bool = False
    """All that it writes are gradients for optimizers."""
    alone: bool = False
    ready: bool = False
    values: Any = None
    error: BaseException | None = None
    """Why its values did not come: it cannot run."""
    dropped: bool = False


@final
@dataclass(slots=True, eq=False)
class Pull:
    """One request for values, on behalf of the steps that read the same variables."""

    reads: Any
    steps: list[Step]


@final
@dataclass(slots=True)
class Post:
    """What crosses to the loop: pushes first, then pulls, so that these read those."""

    pushes: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs of push and the ending that its acknowledgement releases."""
    pulls: list[Pull] = field(default_factory=list)
    endings: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pushes or self.pulls or self.endings)


@final
class Pipeline:
    """The closures of one session on their way through one worker."""

    __slots__ = (
        "_after", "_budget", "_bytes", "_early", "_interval", "_line", "_oldest",
        "_outbox", "_prefetch", "_queue", "_refilling", "_window", "_writer",
    )  # fmt: skip

    def __init__(
        self,
        *,
        window: int = WINDOW,
        interval: float = INTERVAL,
        budget: int = BUDGET,
        prefetch: bool = False,
    ) -> None:
        self._prefetch: Final = prefetch
        self._window: Final = window
        self._interval: Final = interval
        self._budget: Final = budget
        self._queue: Final[deque[Step]] = deque()
        self._line: Final[deque[Step]] = deque()
        self._writer: Step | None = None
        """First of the line that writes."""
        self._after: Step | None = None
        """The one step behind the writer; its pull has to wait for that one's push,"""
        self._early = False
        """unless this says that it was fetched before."""
        self._bytes = 0
        self._refilling = False
        self._outbox = Post()
        self._oldest = math.inf

    def __len__(self) -> int:
        """Closures that have not run."""
        return len(self._queue) + len(self._line)

    # What happened

    def dispatched(self, task: Any, costs: Costs, numbers: Iterable[int]) -> None:
        """Closures came; they run behind all that came before."""
        self._queue.extend([Step(number, task, costs) for number in numbers])

    def prepared(
        self,
        step: Step,
        now: float,
        *,
        cost: float = 0.0,
        reads: Any = None,
        nbytes: int = 0,
        writes: bool = False,
        optimizes: bool = False,
        alone: bool = False,
    ) -> None:
        """The step that `next` named has what it needs but for the values it reads.

        ``alone``: it talks to the parameter servers by itself while it runs, so that
        all before it must have been posted.
        """
        assert self._queue.popleft() is step
        step.costs.prepare = cost
        step.reads, step.writes, step.alone = reads, writes, alone
        step.optimizes = optimizes
        shared = self._line and self._line[-1].reads is reads
        step.nbytes = 0 if shared else nbytes
        self._bytes += step.nbytes
        self._line.append(step)
        if self._writer is None:
            self._open(step, now)
        else:
            self._after = step
            self._early = self._prefetch and self._writer.optimizes and optimizes
            if self._early:
                self._fetch(step, now)

    def refused(self, step: Step, ending: Any, now: float) -> None:
        """The step that `next` named could not be prepared."""
        assert self._queue.popleft() is step
        self.leave(ending, now)

    def arrived(
        self, pull: Pull, values: Any, error: BaseException | None = None
    ) -> None:
        """The answer to a pull; of steps that were cancelled it is ignored."""
        for step in pull.steps:
            if not step.dropped:
                step.values, step.error, step.ready = values, error, True

    def ran(
        self, step: Step, ending: Any, now: float, *, cost: float, push: Any = None
    ) -> None:
        """The step that `next` named is over; its ending waits for the push, if any."""
        assert self._line.popleft() is step
        self._bytes -= step.nbytes
        step.costs.run = cost
        if push is None:
            self.leave(ending, now)
        else:
            self._outbox.pushes.append((push, ending))
            self._oldest = min(self._oldest, now)
        if step is self._writer:
            self._writer = None
            after, self._after = self._after, None
            if after is not None and self._early:
                self._writer, self._early = after, False
            elif after is not None:
                self._open(after, now)

    def cancelled(self) -> tuple[list[Step], list[Step]]:
        """Gives up all that has not run.

        Returns:
            The prepared steps, last one first (in that order their elements go back),
            and the queued ones.
        """
        prepared, queued = list(reversed(self._line)), list(self._queue)
        for step in prepared:
            step.dropped = True
        self._line.clear()
        self._queue.clear()
        self._outbox.pulls.clear()
        self._writer = self._after = None
        self._bytes, self._refilling, self._early = 0, False, False
        if not self._outbox:
            self._oldest = math.inf
        return prepared, queued

    def leave(self, ending: Any, now: float) -> None:
        """An ending to be posted; the other methods call this but for `cancelled`."""
        self._outbox.endings.append(ending)
        self._oldest = min(self._oldest, now)

    # What to do

    def next(self, now: float) -> tuple[Do, Step | None]:
        """The next thing to do; with its step for `Do.PREPARE` and `Do.RUN`."""
        do, step = self._choose()
        if self._oldest < math.inf and self._must_post(do, step, now):
            return Do.POST, None
        return do, step

    def post(self) -> Post:
        """The outbox, which is empty afterwards."""
        outbox, self._outbox = self._outbox, Post()
        self._oldest = math.inf
        return outbox

    def validate(self) -> None:
        """Asserts what must hold between any two calls."""
        line = list(self._line)
        writers = [step for step in line if step.writes]
        if self._writer is None:
            assert not writers
            assert self._after is None
        else:
            assert writers[0] is self._writer
            behind = line[line.index(self._writer) + 1 :]
            assert behind == ([] if self._after is None else [self._after])
        assert len(line) <= self._window + 1
        assert self._bytes == sum(step.nbytes for step in line) >= 0
        assert (self._oldest < math.inf) == bool(self._outbox)
        unposted = {id(s) for pull in self._outbox.pulls for s in pull.steps}
        late = None if self._early else self._after
        assert unposted <= {id(step) for step in line if step is not late}

    def _choose(self) -> tuple[Do, Step | None]:
        head = self._line[0] if self._line else None
        if head is None or not head.ready:
            if self._queue and self._may_prepare():
                return Do.PREPARE, self._queue[0]
            return Do.WAIT, None
        if self._refills(head) or self._looks_ahead(head):
            return Do.PREPARE, self._queue[0]
        return Do.RUN, head

    def _may_prepare(self) -> bool:
        if self._writer is not None:
            return self._after is None
        return len(self._line) < self._window and self._bytes <= self._budget

    def _refills(self, head: Step) -> bool:
        """Whether to prepare the next half window before running on, so that its pull
        is under way while the rest of this one runs."""
        self._refilling = (
            (self._refilling or len(self._line) <= self._window // 2)
            and head.reads is not None
            and self._writer is None
            and self._may_prepare()
            and bool(self._queue)
            and self._queue[0].costs.prepare < math.inf
        )
        return self._refilling

    def _looks_ahead(self, head: Step) -> bool:
        """Whether to prepare the step behind an optimizer step before that runs, so
        that its pull is under way meanwhile: values that came early would else make
        every second round trip visible."""
        return (
            self._prefetch
            and head is self._writer
            and head.optimizes
            and self._after is None
            and bool(self._queue)
            and self._queue[0].costs.prepare < math.inf
        )

    def _must_post(self, do: Do, step: Step | None, now: float) -> bool:
        pulls = self._outbox.pulls
        match do:
            case Do.PREPARE:
                assert step is not None
                # A writer ends what may be pulled together: nothing can join any more.
                if pulls and self._writer is not None:
                    return True
                cost = step.costs.prepare
            case Do.RUN:
                assert step is not None
                if pulls or step.alone:
                    return True
                cost = step.costs.run
            case _:
                return True
        return now + cost > self._oldest + self._interval

    def _open(self, step: Step, now: float) -> None:
        """Everything that wrote before the step is posted, or will be with its pull."""
        if step.writes:
            self._writer = step
        self._fetch(step, now)

    def _fetch(self, step: Step, now: float) -> None:
        """Has the values of the step pulled."""
        if step.reads is None:
            step.ready = True
            return
        pulls = self._outbox.pulls
        if pulls and pulls[-1].reads is step.reads:
            pulls[-1].steps.append(step)
        else:
            pulls.append(Pull(step.reads, [step]))
        self._oldest = min(self._oldest, now)
