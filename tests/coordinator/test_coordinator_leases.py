"""The leases of examples: which are open, done, returned. No worker, no clock."""

import random
from functools import partial

import pytest

from zstrat.coordinator.leases import REMEMBERED, Draw, LeaseBook
from zstrat.coordinator.parts import Closure, Effect, Queue, QueuePhase
from zstrat.data import Lease
from zstrat.errors import (
    ClosureInputError,
    InvalidArgumentError,
    OutOfRangeError,
    PSUnavailableError,
    StepError,
)
from zstrat.wire import LEASE

DATA = 7
"""The number of the iterator."""


def book_of(size, batch, **options):
    book = LeaseBook("data", batch, **options)
    assert not book.built(size)
    return book


class Run:
    """A queue whose closures draw from one dataset."""

    def __init__(self, size=10, batch=3, **options):
        self.queue = Queue(first_step=1)
        self.book = book_of(size, batch, **options)
        self.queue.leases.books[DATA] = self.book
        self.applied = []

    def put(self, count=1, draws=1):
        for _ in range(count):
            drawn = [Draw(DATA, draws)]
            assert self.queue.put(Closure(None, None, draws=drawn))

    def take(self, limit=100):
        return self.queue.take(min(limit, self.queue.ready(9.0)[0]), 9.0)

    def end(self, closure, error=None):
        if error is None:
            self.applied += [Lease(*x[1:]) for x in LEASE.iter_unpack(closure.leases)]
        self.queue.end(closure, error)

    def exhausted(self):
        ended, self.queue.exhausted = self.queue.exhausted, []
        return [item.error for item in ended]


def leases_of(closures):
    return [[Lease(*x[1:]) for x in LEASE.iter_unpack(c.leases)] for c in closures]


def test_leases_are_drawn_when_closures_are_handed_out():
    run = Run(epochs=2)
    run.put(8)
    assert run.book.open == 0
    first = run.take(2)
    assert leases_of(first) == [[Lease(0, 0, 3)], [Lease(0, 3, 3)]]
    rest = run.take()
    assert leases_of(rest)[:3] == [[Lease(0, 6, 3)], [Lease(0, 9, 1)], [Lease(1, 0, 3)]]
    for closure in (*first, *rest):
        run.end(closure)
    assert run.book.is_over
    assert run.book.done == 20


def test_the_remainder_of_each_epoch_may_be_dropped():
    run = Run(epochs=2, drop_remainder=True)
    run.put(6)
    assert [x.size for (x,) in leases_of(run.take())] == [3] * 6
    assert run.book.left_of(0) == 0
    assert LeaseBook("few", 3, drop_remainder=True).built(2)


def test_a_remainder_that_is_dropped_is_not_done_in_a_program_that_goes_on():
    """The program before was restored between two epochs."""
    made = partial(LeaseBook, "x", 4, epochs=2, drop_remainder=True)
    before, after = made(), made()
    assert not before.built(10)
    before.restore({**before.state(), "epoch": 1})
    after.inherited = before.done_leases
    assert not after.built(10)
    assert (before.done, after.done, after.total) == (8, 8, 16)
    assert after.left_of(1) == 2


def test_a_retried_closure_keeps_its_lease():
    run = Run()
    run.put()
    (closure,) = run.take()
    leases = closure.leases
    run.queue.lost(closure, "worker 0", 1.0)
    assert run.take() == [closure]
    assert closure.leases == leases
    run.end(closure)
    assert run.applied == [Lease(0, 0, 3)]


def test_the_end_waits_for_leases_that_may_come_back():
    run = Run(size=3)
    run.put(3)
    (closure,) = run.take()
    assert run.exhausted() == []
    assert (run.queue.parked, run.queue.queued, run.queue.running) == (2, 2, 1)
    assert run.take() == []
    run.queue.end(closure, ValueError("bad"))
    (again,) = run.take()
    assert again is not closure
    assert leases_of([again]) == [[Lease(0, 0, 3)]]
    assert again.attempt == 1
    run.end(again)
    assert run.take() == []
    (error,) = run.exhausted()
    assert isinstance(error, OutOfRangeError)
    assert run.queue.is_idle


def test_closures_fail_with_the_reason_why_no_worker_has_the_dataset():
    run, why = Run(), []
    run.book = run.queue.leases.books[DATA] = LeaseBook("data", 3)
    run.book.failure = lambda: why[0] if why else None
    run.put(2)
    assert run.take() == []
    assert (run.queue.parked, run.exhausted()) == (2, [])
    why.append(ClosureInputError("by a test"))
    run.queue.leases_changed(DATA)
    assert run.take() == []
    assert run.exhausted() == [why[0], why[0]]
    assert run.queue.is_idle


def test_parked_closures_let_others_pass_and_can_be_cancelled():
    run = Run(size=3)
    run.put(2)
    plain = Closure(None, None)
    run.queue.put(plain)
    assert [c.draws for c in run.take()] == [[Draw(DATA, 1)], ()]
    ended = run.queue.cancel_waiting("by a test")
    assert len(ended) == 1
    assert run.queue.parked == 0


def test_closures_that_wait_for_leases_count_as_queued_ones_for_the_bound():
    run = Run(size=3)
    run.queue.max_queued = 3
    run.put(3)
    (closure,) = run.take()
    assert run.queue.parked == 2
    run.put()
    assert run.queue.is_full
    assert not run.queue.put(Closure(None, None))
    run.end(closure)
    assert run.take() == []
    assert len(run.exhausted()) == 3
    assert not run.queue.is_full


def test_several_batches_are_leased_together():
    run = Run(size=12, batch=3)
    run.put(2, draws=3)
    (closure,) = run.take()
    assert leases_of([closure]) == [[Lease(0, n, 3) for n in (0, 3, 6)]]
    run.end(closure)
    run.take()
    (error,) = run.exhausted()
    assert isinstance(error, OutOfRangeError)
    assert "1 batches left" in str(error)
    assert not run.book.is_over
    assert run.book.left_of(0) == 1


def test_a_failed_range_is_named_and_comes_last_in_its_epoch():
    run = Run(size=6, epochs=2)
    run.put(5)
    bad = run.take(1)[0]
    error = ValueError("bad")
    run.end(bad, error)
    assert any("examples 0 to 3 of epoch 0" in note for note in error.__notes__)
    assert any("on_error" in note for note in error.__notes__)
    assert run.queue.phase is QueuePhase.FAILED
    order = [x for (x,) in leases_of(run.take())]
    assert order == [Lease(0, 3, 3), Lease(0, 0, 3), Lease(1, 0, 3), Lease(1, 3, 3)]


@pytest.mark.parametrize("error", [ValueError("bad"), StepError("Mine", "bad")])
def test_a_failed_range_may_be_skipped(error):
    run = Run(size=6, on_error="skip")
    run.put(2)
    one, two = run.take()
    run.end(one, error)
    assert run.queue.phase is QueuePhase.OPEN
    assert (run.book.skipped, run.book.done) == (3, 0)
    run.end(two, PSUnavailableError("ps 0", "gone"))  # not the fault of the examples
    assert run.queue.phase is QueuePhase.FAILED
    assert run.book.left_of(0) == 1
    assert run.book.skipped == 3


@pytest.mark.parametrize("error", [PSUnavailableError("ps 0", "gone"), OSError("bad")])
def test_a_range_is_left_out_whose_updates_may_have_been_applied(error):
    run = Run(size=6)
    run.put(2)
    doubtful, other = run.take()
    run.queue.retry(doubtful, 1.0, begun=True)  # a worker had sent its updates
    assert run.take() == [doubtful]
    run.end(doubtful, error)
    assert (run.book.skipped, run.book.left_of(0)) == (3, 0)
    assert any("may have been applied" in note for note in error.__notes__)
    assert any("examples 0 to 3" in note for note in error.__notes__)
    run.end(other)
    assert run.book.is_over


def test_cancelled_and_doubtful_closures_give_back_what_was_not_applied():
    run = Run(size=15)
    run.put(5)
    failed, returned, doubtful, applied, unknown = run.take()
    run.queue.retry(returned, 1.0, begun=False)
    run.queue.end(failed, ValueError("bad"))
    run.queue.cancel_waiting()
    run.queue.retry(doubtful, 1.0, begun=True)
    run.queue.retry(applied, 1.0, begun=True)
    run.queue.retry(unknown, 1.0, begun=True)
    run.queue.fence()
    perhaps = Effect("may have been applied", False)
    known = {applied.step: Effect("were applied", True), unknown.step: perhaps}
    *_, last = run.queue.fenced(known)
    assert any("examples 12 to 15" in note for note in last.error.__notes__)
    assert (run.book.done, run.book.skipped) == (3, 3)
    assert run.book.open == 0
    assert {tuple(x) for x in run.book.state()["open"]} == {
        (0, 0, 3),
        (0, 3, 3),
        (0, 6, 3),
    }


def test_who_kills_all_its_workers_is_left_out():
    run = Run(size=3)
    run.put()
    for number in range(5):
        suspect = number > 1
        (closure,) = [run.queue.take_suspect(99.0)] if suspect else run.take()
        ended = run.queue.lost(closure, f"worker {number}", 1.0)
    (item,) = ended
    assert any("may have been applied" in note for note in item.error.__notes__)
    assert run.book.is_over
    assert run.book.skipped == 3


def not_done(state, size, epochs):
    """All (epoch, position) of a state that are not done, by its definition."""
    left = {(e, p) for e, start, n in state["open"] for p in range(start, start + n)}
    first, at = state["epoch"], state["next"]
    left |= {(first, p) for p in range(at, size)}
    return left | {(e, p) for e in range(first + 1, epochs) for p in range(size)}


@pytest.mark.parametrize("seed", range(30))
def test_any_history_applies_each_example_once(seed):
    """Random ends, losses, cancellations, saves, restores with another batch size, and
    losses of what was applied since a save."""
    rng, size, epochs = random.Random(seed), 23, 3
    run = Run(size, 4, epochs=epochs)
    counts = dict.fromkeys(((e, p) for e in range(epochs) for p in range(size)), 0)
    saved = run.book.state(), dict(counts)
    running = []

    def apply(closure):
        for _, epoch, start, n in LEASE.iter_unpack(closure.leases):
            for position in range(start, start + n):
                counts[epoch, position] += 1
        run.queue.end(closure)

    for _ in range(400):
        run.put(rng.randrange(2))
        running += run.take(rng.randrange(4))
        run.exhausted()
        rng.shuffle(running)
        what = rng.random()
        if running and what < 0.6:
            apply(running.pop())
        elif running and what < 0.8:
            run.queue.retry(running.pop(), 1.0, begun=rng.random() < 0.5)
        elif what < 0.85:
            done = {key for key, n in counts.items() if n}
            state = run.book.state()
            assert not_done(state, size, epochs) == counts.keys() - done
            saved = state, dict(counts)
        elif what < 0.9:  # all servers are filled again
            run.book.rewind(saved[0])
            counts.update(saved[1])
            run.queue.leases_changed(DATA)
        if run.queue.phase is not QueuePhase.OPEN:
            break
    # Another program continues what is not done, with another batch size.
    last = Run(size, 5, epochs=epochs)
    last.book.restore(run.book.state())
    last.put(200)
    while not last.book.is_over:
        for closure in last.take(3):
            for _, epoch, start, n in LEASE.iter_unpack(closure.leases):
                for position in range(start, start + n):
                    counts[epoch, position] += 1
            last.queue.end(closure)
    assert set(counts.values()) == {1}


def test_what_was_skipped_after_a_state_is_leased_again_and_counted_once():
    run = Run(size=9, on_error="skip")
    state = run.book.state()
    run.put(5)
    bad, good, _ = run.take(3)
    run.end(bad, ValueError("bad"))
    run.end(good)
    run.book.rewind(state)
    assert (run.book.done, run.book.skipped) == (0, 0)
    again, _ = run.take()
    run.end(again, ValueError("bad"))
    assert (run.book.done, run.book.skipped) == (0, 3)


class Waiting:
    """Rounds with contributions of these steps."""

    def __init__(self):
        self.steps = []


def test_steps_wait_for_rounds_that_report_their_gradients_after_their_end():
    run, rounds, count = Run(size=REMEMBERED + 9, batch=1), Waiting(), REMEMBERED + 5
    run.queue.leases.rounds = [rounds]
    run.put(count)
    for closure in run.take(count):
        run.end(closure)  # in one message, before the rounds have them
    rounds.steps = list(range(1, count + 1))
    run.queue.leases.forget_applied()
    waiting = run.queue.leases.waiting_for_rounds(run.book)
    assert waiting == [Lease(0, n, 1) for n in range(count)]
    rounds.steps = [count]
    run.queue.leases.forget_applied()
    rounds.steps = [1, count]
    assert run.queue.leases.waiting_for_rounds(run.book) == [Lease(0, count - 1, 1)]


def test_a_pass_that_is_moved_has_no_leases_that_wait_for_rounds():
    run, rounds = Run(size=9), Waiting()
    run.queue.leases.rounds = [rounds]
    start = run.book.state()
    run.put(2)
    for closure in run.take():
        run.end(closure)
    rounds.steps = [1, 2]
    assert len(run.queue.leases.waiting_for_rounds(run.book)) == 2
    run.queue.give_leases_back(DATA)
    run.book.restore(start)
    assert run.queue.leases.waiting_for_rounds(run.book) == []


def test_states_of_other_data_are_refused():
    book = book_of(10, 3, seed=1)
    assert "9 examples" in book.misfit(book_of(9, 3, seed=1).state())
    assert "shuffle_seed=2" in book.misfit(book_of(10, 3, seed=2).state())
    assert book.misfit(book_of(10, 4, seed=1, epochs=None).state()) == ""
    other = Run(10, 5, seed=1, epochs=2)
    other.put(4)
    other.take(3)
    assert "epochs=1" in book.misfit(other.book.state())
    assert book_of(10, 5, seed=1, epochs=3).misfit(other.book.state()) == ""
    with pytest.raises(InvalidArgumentError):
        book.misfit({"pipelines": []})
    assert "another worker" in book.built(11)


def test_a_whole_batch_is_required_of_a_restored_pass_too():
    book = LeaseBook("data", 11, drop_remainder=True)
    assert "batch=11" in book.misfit(book_of(10, 3).state())
