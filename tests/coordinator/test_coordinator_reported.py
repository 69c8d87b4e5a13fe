"""Workers that report themselves while a program trains."""

from __future__ import annotations

import pytest
from coordinator_fakes import good

from zstrat.coordinator import Workers
from zstrat.coordinator.membership import AdmitWorker, Membership
from zstrat.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    PermissionDeniedError,
    from_wire,
)
from zstrat.wire import OpenSession, WorkerReported


@pytest.fixture
def reported(make_world):
    """``reported(address, index)`` is how a program answers a worker that has reported
    itself at its server."""
    world = make_world(workers=1)
    coordinator = world.coordinator()
    server = world.ps[0]

    def report(address, index=-1, timeout=20.0):
        known = len(server.answers)
        session = world.session.cluster.session
        told = WorkerReported(session, known + 1, address, index, timeout)
        world.on_loop(server.link.say, told)
        world.until(lambda: len(server.answers) > known)
        answer = server.answers[-1]
        assert (answer.session, answer.report) == (session, known + 1)
        if answer.error is not None:
            raise from_wire(answer.error)
        return answer.index

    report.world, report.coordinator = world, coordinator
    report.workers = Workers(world.session)
    return report


def test_a_worker_that_reports_itself_is_refused_unless_that_is_wished(reported):
    with pytest.raises(PermissionDeniedError, match=r"workers\.accept_joining"):
        reported("late:1", timeout=0.01)
    reported.workers.accept_joining()
    assert reported("late:1") == 1
    reported.workers.accept_joining(False)
    with pytest.raises(PermissionDeniedError, match=r"workers\.accept_joining"):
        reported("late:1")


def test_a_worker_that_waited_for_the_program_is_taken_in(make_world):
    world = make_world(workers=1)
    server = world.ps[0]

    @server.wrap
    def tells_before_it_answers(handle, message):
        if isinstance(message, OpenSession):
            told = WorkerReported(message.session, 1, "early:1", -1, 20.0)
            server.link.say(told)
        return handle(message)

    world.connect()
    Workers(world.session).accept_joining()
    world.until(lambda: server.answers)
    assert [(each.index, each.error) for each in server.answers] == [(1, None)]


def test_a_worker_that_reports_itself_gets_a_number_and_closures(reported):
    reported.workers.accept_joining()
    numbers = [reported(address) for address in ("late:1", "later:1", "late:1")]
    assert numbers == [1, 2, 1], "each its own, and the same when it asks again"
    late = reported.world.newcomer("later:1", 2)
    assert reported("later:1", 2) == 2
    assert reported.workers.addresses == {0: "worker0:1", 2: "later:1"}
    reported.workers.remove("worker0:1")
    assert reported.coordinator.schedule(good).fetch() == 1
    assert len(late.ran) == 1
    assert reported("later:1", 2) == 2, "it is there"
    assert len(late.sessions) == 1
    assert reported.coordinator.metrics()["workers_added"] == 1


def test_a_report_that_is_heard_twice_takes_the_worker_in_once(reported):
    reported.workers.accept_joining()
    world, server = reported.world, reported.world.ps[0]
    late = world.newcomer("late:1", reported("late:1"))
    told = WorkerReported(world.session.cluster.session, 2, "late:1", 1, 20.0)

    def say_twice():
        server.link.say(told)
        server.link.say(told)

    world.on_loop(say_twice)
    world.until(lambda: len(server.answers) == 3)
    assert [(each.index, each.error) for each in server.answers[1:]] == [(1, None)] * 2
    assert len(late.sessions) == 1
    assert reported.coordinator.metrics()["workers_added"] == 1


def test_no_report_keeps_numbers_from_those_that_come(reported):
    reported.workers.accept_joining()
    with pytest.raises(InvalidArgumentError, match=r"--index.*\b2147483647\b"):
        reported("late:1", 2**64 - 1)
    for address in ("nowhere:1", "late:1"):
        reported.world.newcomer(address).alive = False
    for timeout in (0.01, float("nan")):
        with pytest.raises(DeadlineExceededError):
            reported("nowhere:1", 2**31 - 1, timeout)
    assert reported("late:1") == 1
    with pytest.raises(DeadlineExceededError):
        reported("late:1", 1, 0.01)
    assert reported("later:1") == 2
    assert reported("late:1") == 1, "it is nobody else's"


def test_who_reports_itself_and_cannot_join_is_told_why(reported):
    reported.workers.accept_joining()
    unlike = reported.world.newcomer("late:1", reported("late:1"))
    unlike.devices = 4
    with pytest.raises(InvalidArgumentError):
        reported("late:1", 1)
    with pytest.raises(AlreadyExistsError, match="worker 0"):
        reported("late:1", 0)
    with pytest.raises(ValueError, match=r"'0\.0\.0\.0:1'"):
        reported("0.0.0.0:1")
    for address in (
        "late",
        "a b:1",
        "a\n\x1b[31m:1",
        "ipc:///tmp/\x1b",
        "x" * 999 + ":1",
    ):
        with pytest.raises(ValueError, match="expected") as refused:
            reported(address)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 500
    assert reported.workers.addresses == {0: "worker0:1"}
    unlike.devices = 2
    assert reported("late:1", 1) == 1


def test_who_was_removed_does_not_come_back_by_itself(reported):
    reported.workers.accept_joining()
    reported.world.newcomer("late:1", reported("late:1"))
    reported("late:1", 1)
    reported.workers.remove("late:1")
    for index in (-1, 1):
        with pytest.raises(PermissionDeniedError, match=r"workers\.add\('late:1'\)"):
            reported("late:1", index)
    assert reported("other:1") == 2, "a number is never given to another address"
    with pytest.raises(InvalidArgumentError, match="--index"):
        reported("other:1", 1)
    assert reported.workers.add("late:1") == 1


def test_what_never_comes_takes_no_room_for_ever():
    membership = Membership({0: "host:1"})
    for number in range(1, 3000):
        wanted = membership.reported(f"nowhere:{number}", number)
        membership.withdraw(wanted.place)
    assert membership.size == 1 + 1024
    assert membership.promise("late:1") == 1
    wanted = membership.reported("late:1", 1)
    membership.joined(wanted.place)
    assert membership.addresses == {0: "host:1", 1: "late:1"}


def test_numbers_end_and_are_found_below():
    membership = Membership({0: "host:1", 1: "host:2"})
    far = membership.reported("far:1", 2**31 - 1)
    membership.joined(far.place)
    assert [membership.promise(f"late:{n}") for n in (1, 2)] == [2, 3]


def test_numbers_that_were_promised_are_nobody_elses():
    membership = Membership({0: "host:1"})
    assert [membership.promise(f"host:{n}") for n in (2, 3)] == [1, 2]
    assert membership.add("host:4") == AdmitWorker(1, 3, "host:4")
    assert membership.add("host:3") == AdmitWorker(2, 2, "host:3")
    assert membership.reported("host:3", 2) == 2
    membership.fix_places("a variable has a value per worker")
    with pytest.raises(InvalidArgumentError):
        membership.promise("host:5")
