"""What the rounds of an optimizer say of themselves: for whom they waited."""

from __future__ import annotations

import pytest

import zstrat as zs
from zstrat.coordinator.rounds import SessionRounds
from zstrat.wire import StepContribution

OPTIMIZER, WORKERS = 7, 4


@pytest.fixture
def session():
    return SessionRounds()


def add(session, name="adam", optimizer=OPTIMIZER, **policy):
    session.add(optimizer, name, zs.Rounds(**policy))
    return session.get(optimizer)


def contribute(rounds, worker, step, at, base=None):
    base = rounds.number if base is None else base
    given = StepContribution(step, 1, rounds.optimizer, base, 1.0, coupled=False)
    rounds.contributed(worker, given, at)


def close(rounds, at):
    rounds.close()
    rounds.closed(at)


def test_rounds_wait_for_the_last_contribution_alone(session):
    rounds = add(session)
    for number in range(10):
        begin, step = 2.0 * number, WORKERS * number
        for worker in range(WORKERS):
            late = 1.5 if worker == 3 else 0.25 * worker
            contribute(rounds, worker, step + worker, begin + late)
        close(rounds, begin + 2.0)
    seen = session.metrics(WORKERS, 20.0)["adam"]
    assert (seen["closed"], seen["waiting"], seen["workers"]) == (10, 0, WORKERS)
    # worker:2 came after 0.5 s, and worker:3 one second later.
    assert seen["waited_for"] == {"worker:3": {"rounds": 10, "seconds": 10.0}}
    # The first one has begun at a time that is not known.
    recent = {"worker:3": {"rounds": 9, "seconds": 9.0}}
    assert seen["recent"] == {"rounds": 9, "seconds": 18.0, "waited_for": recent}
    assert seen["per_s"] == pytest.approx(0.5, rel=0.1)


def test_recent_rounds_forget_a_worker_that_is_quick_again(session):
    rounds = add(session)
    for number in range(200):
        slow = 1 if number < 100 else 0
        contribute(rounds, 1 - slow, 2 * number, float(number))
        contribute(rounds, slow, 2 * number + 1, number + 0.5)
        close(rounds, number + 0.5)
    seen = session.metrics(2, 200.0)["adam"]
    assert [*seen["recent"]["waited_for"]] == ["worker:0"]
    assert seen["waited_for"]["worker:1"] == {"rounds": 100, "seconds": 50.0}


@pytest.mark.parametrize("late", ["drop", "next"])
def test_who_was_late_and_what_was_dropped(session, late):
    rounds = add(session, backup=1, late=late)
    contribute(rounds, 0, 1, 0.0)
    close(rounds, 0.0)
    contribute(rounds, 1, 2, 0.5, base=0)
    seen = session.metrics(2, 1.0)["adam"]
    assert seen["late"] == {"worker:1": 1}
    assert seen["dropped"] == ({"worker:1": 1} if late == "drop" else {})
    assert seen["waiting"] == (late == "next")
    # A round of one contribution waits for nobody.
    assert seen["waited_for"] == {}


def test_the_workers_that_rounds_wait_for_most_are_named_to_observers(session):
    rounds = add(session)
    for worker in range(1, 20):
        contribute(rounds, 0, 2 * worker, 100.0 * worker)
        contribute(rounds, worker, 2 * worker + 1, 100.0 * worker + worker)
        close(rounds, 100.0 * worker + worker)
    seen = session.metrics(WORKERS, 2000.0, 2)["adam"]
    assert [*seen["waited_for"]] == ["worker:19", "worker:18"]
    assert len(session.metrics(WORKERS, 2000.0)["adam"]["waited_for"]) == 19


def test_two_optimizers_of_one_name_are_two(session):
    add(session, "adam", 3)
    add(session, "adam", 5)
    assert [*session.metrics(WORKERS, 0.0)] == ["adam", "adam 5"]


def test_rounds_that_begin_again_keep_their_count(session):
    rounds = add(session)
    contribute(rounds, 0, 1, 0.0)
    close(rounds, 0.5)
    rounds.begin(0)
    contribute(rounds, 0, 2, 1.5)
    close(rounds, 2.0)
    assert session.metrics(1, 2.0)["adam"]["closed"] == 2
    assert session.metrics(1, 2.0)["adam"]["per_s"] > 0
