"""The queue as a state machine: each closure ends exactly once, whatever happens."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tiers import examples

from zstrat.coordinator.parts import Closure, Effect, Queue, QueuePhase
from zstrat.errors import CancelledError, ResultLostError, WorkerLostError

BOUND, ATTEMPTS, AHEAD = 6, 3, 5


class QueueMachine(RuleBasedStateMachine):
    """Plays the user and the workers; keeps its own books."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.open: dict[int, Closure] = {}
        self.running: list[Closure] = []
        self.doubtful: set[int] = set()
        self.begun: set[int] = set()
        self.ended: Counter = Counter()
        self.once = False
        self.owed: list[Exception] = []
        """Errors of which the first is to be raised by the user's next call."""
        self.cancelled = 0

    @initialize(once=st.booleans())
    def begin(self, once):
        self.once = once
        self.queue = Queue(BOUND, ATTEMPTS, errors_once=once)
        self.queue.max_ahead = AHEAD

    def _end(self, closure):
        self.ended[closure.step] += 1
        del self.open[closure.step]

    def _settle(self, ended):
        for item in ended:
            self._end(item.closure)
            self.cancelled += isinstance(item.error, CancelledError)
            if isinstance(item.error, WorkerLostError):
                self._failed(item.error)

    def _failed(self, error):
        if self.queue.runs:
            self.owed.append(error)

    @precondition(lambda self: self.queue.accepts)
    @rule()
    def put(self):
        closure = Closure(call=None, value=None)
        assert self.queue.put(closure)
        assert closure.step not in self.ended
        self.open[closure.step] = closure

    @precondition(lambda self: self.queue.runs)
    @rule()
    def cancel_waiting(self):
        self._settle(self.queue.cancel_waiting())
        assert self.queue.queued == 0
        self.doubtful = self.open.keys() - {c.step for c in self.running}
        assert self.doubtful <= self.begun, "what never began is cancelled at once"

    @precondition(lambda self: self.queue.is_quiet)
    @rule(data=st.data())
    def fence(self, data):
        self.queue.fence()
        doubtful = self.queue.doubtful
        assert sorted(doubtful) == sorted(self.open) == sorted(self.doubtful)
        steps = st.lists(st.sampled_from(doubtful)) if doubtful else st.just([])
        applied = dict.fromkeys(data.draw(steps), Effect("were applied", True))
        ended = self.queue.fenced(applied)
        for item in ended:
            lost = isinstance(item.error, ResultLostError)
            assert lost == (item.closure.step in applied)
        self._settle(ended)
        self.doubtful.clear()

    @precondition(lambda self: self.queue.runs)
    @rule(held=st.booleans())
    def hold(self, held):
        self.queue.held = held

    @precondition(lambda self: self.queue.phase is QueuePhase.FENCED)
    @rule()
    def raise_error(self):
        assert not self.running, "nothing runs when the error is raised"
        assert not self.open, "and nothing waits"
        failure = self.queue.reopen()
        assert (failure and failure.error) is next(iter(self.owed), None)
        self.owed.clear()
        assert self.queue.is_idle
        assert self.queue.accepts

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def fetch_an_error(self, data):
        error = self.owed[data.draw(st.integers(0, len(self.owed) - 1))]
        self.queue.fetched(error)
        if self.once:
            self.owed.remove(error)

    @rule(limit=st.integers(1, 4))
    def take(self, limit):
        ordinary, suspects = self.queue.ready(self.now)
        if ordinary:
            taken = self.queue.take(limit, self.now)
            assert 1 <= len(taken) <= limit
            if self.queue.held:
                assert {closure.step for closure in taken} <= self.begun
            low_water = self.queue.steps.low_water
            assert all(closure.step < low_water + AHEAD for closure in taken)
            self.running += taken
        elif suspects:
            self.running.append(self.queue.take_suspect(self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data, fails):
        closure = self._stop(data)
        error = ValueError(closure.step) if fails else None
        if error is not None:
            self._failed(error)
        self.queue.end(closure, error)
        self._end(closure)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data):
        closure = self._stop(data)
        self._may_have_begun(closure)
        self._settle(self.queue.lost(closure, "/job:worker/task:1", self.now))
        assert len(closure.losses) <= ATTEMPTS

    @precondition(lambda self: self.running)
    @rule(data=st.data(), begun=st.booleans())
    def retry(self, data, begun):
        closure = self._stop(data)
        if begun:
            self._may_have_begun(closure)
        elif closure.step in self.begun and not self.queue.runs:
            self.doubtful.add(closure.step)
        self._settle(self.queue.retry(closure, self.now, 0.5, begun=begun))

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def fail(self):
        error = RuntimeError("from outside")
        self._failed(error)
        self.queue.fail(error)

    def _may_have_begun(self, closure):
        self.begun.add(closure.step)
        if not self.queue.runs:
            self.doubtful.add(closure.step)

    def _stop(self, data):
        return self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

    @invariant()
    def books_agree(self):
        queue = self.queue
        assert queue.running == len(self.running) >= 0
        assert queue.queued + queue.running + len(self.doubtful) == len(self.open)
        unsure = (self.begun & self.open.keys()) - {c.step for c in self.running}
        assert queue.is_at_rest == (not self.running and not unsure)
        assert all(count == 1 for count in self.ended.values())
        assert queue.steps.low_water == min(self.open, default=queue.steps.next)
        assert queue.has_error == bool(self.owed)
        assert queue.phase is not (QueuePhase.OPEN if self.owed else QueuePhase.FAILED)
        assert queue.cancelled == self.cancelled
        assert queue.waiting_fresh <= BOUND

    def teardown(self):
        self._settle(self.queue.close("the test is over"))
        for closure in list(self.running):
            self._settle(self.queue.retry(closure, self.now, begun=True))
        self.running.clear()
        assert not self.open
        assert self.queue.is_idle
        assert self.queue.running == 0


TestQueue = QueueMachine.TestCase
TestQueue.settings = examples(60, stateful_step_count=40)


def filled(count, **options):
    queue = Queue(**options)
    closures = [Closure(None, None, name=f"f{i}") for i in range(count)]
    for closure in closures:
        queue.put(closure)
    return queue, closures


def test_closures_that_come_back_go_first_and_do_not_need_a_slot():
    queue, closures = filled(2, max_queued=2)
    (first,) = queue.take(1, 0.0)
    queue.put(Closure(None, None))
    assert queue.is_full
    assert queue.lost(first, "w", 0.0) == []
    assert queue.is_full
    assert queue.queued == 3
    assert queue.take(2, 0.0) == [first, closures[1]]
    assert first.attempt == 2


def test_the_arguments_of_what_waits_are_bounded():
    queue = Queue()
    half = [Closure(None, None, nbytes=2**29) for _ in range(4)]
    assert [queue.put(closure) for closure in half] == [True, True, False, False]
    assert queue.is_full
    (first,) = queue.take(1, 0.0)
    assert queue.put(half[2])
    queue.lost(first, "w", 0.0)  # what comes back needs no room
    assert queue.take(1, 0.0) == [first]
    assert queue.is_full
    queue.cancel_waiting()
    assert not queue.is_full


def test_one_closure_may_be_larger_than_the_bound():
    queue = Queue()
    large = Closure(None, None, nbytes=2**33)
    assert queue.put(large)
    assert not queue.put(Closure(None, None))
    assert queue.take(2, 0.0) == [large]
    assert queue.put(Closure(None, None))


def test_no_step_runs_too_far_ahead_of_the_lowest_one():
    queue, closures = filled(8)
    queue.max_ahead = 3
    slow, *quick = queue.take(8, 0.0)
    assert (slow, quick) == (closures[0], closures[1:3])
    for closure in quick:
        queue.end(closure)
    assert queue.ready(0.0) == (0, 0)
    assert queue.retry(slow, 0.0, begun=True) == []
    assert queue.take(8, 0.0) == [slow], "the lowest one always goes"
    queue.end(slow)
    assert queue.take(8, 0.0) == closures[3:6]


def test_what_comes_back_while_all_rests_and_may_have_begun_is_due_at_its_time():
    queue, (lost, fresh) = filled(2)
    queue.take(2, 0.0)
    queue.held = True
    assert queue.retry(fresh, 1.0, 0.5, begun=False) == []
    assert queue.lost(lost, "w0", 1.0) == []
    assert queue.take(1, 1.0) == [lost]
    assert queue.retry(lost, 1.0, 0.5, begun=False) == []
    assert queue.next_due() == pytest.approx(1.5), "not when the fresh one was"
    assert queue.ready(1.5) == (1, 0)


def test_a_closure_that_kills_its_workers_is_reported_with_their_names():
    queue, (poison,) = filled(1, max_attempts=3)
    queue.take(1, 0.0)
    assert queue.lost(poison, "w0", 0.0) == []
    queue.take(1, 0.0)
    assert queue.lost(poison, "w1", 0.0) == []
    assert queue.ready(0.0) == (0, 0), "it waits before it may run again"
    assert queue.next_due() == pytest.approx(0.1)
    assert queue.ready(0.1) == (0, 1), "and then alone"
    assert queue.take_suspect(0.1) is poison
    (ended,) = queue.lost(poison, "w0", 0.2)
    assert isinstance(ended.error, WorkerLostError)
    for word in ("w0", "w1", "f0", "max_attempts"):
        assert word in str(ended.error)
    assert queue.phase is QueuePhase.FAILED
    assert queue.running == 0


def test_losses_that_the_closure_survives_do_not_stay_with_the_next():
    queue, (closure,) = filled(1, max_attempts=2)
    queue.take(1, 0.0)
    queue.retry(closure, 0.0, 0.0, begun=False)
    queue.take(1, 0.0)
    assert closure.attempt == 1, "it never began"
    queue.retry(closure, 0.0, 0.0, begun=True)
    queue.take(1, 0.0)
    assert closure.losses == ()
    assert closure.attempt == 2
    assert queue.lost(closure, "w", 0.0) == []


def test_later_errors_are_listed_but_the_first_is_raised():
    queue, closures = filled(3)
    queue.take(3, 0.0)
    errors = [ValueError("one"), ValueError("two")]
    for closure, error in zip(closures, errors, strict=False):
        queue.end(closure, error)
    queue.cancel_waiting()
    assert not queue.is_quiet, "one still runs"
    queue.end(closures[2], ValueError("provoked by cancelling"))
    queue.fence()
    assert queue.doubtful == []
    assert queue.phase is QueuePhase.FENCING, "zombies may have an effect"
    assert queue.fenced({}) == []
    assert queue.reopen().error is errors[0]
    assert list(queue.errors) == errors
    assert queue.accepts, "and the queue is usable again"
