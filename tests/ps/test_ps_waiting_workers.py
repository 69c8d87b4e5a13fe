"""Workers that no program knows report themselves at a server. No sockets."""

from __future__ import annotations

import asyncio

import pytest
from ps_callers import SESSION, Gated, caller

from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnavailableError,
    to_wire,
)
from zstrat.testing import FakeRemote
from zstrat.wire import (
    AnswerReport,
    CloseSession,
    Done,
    Job,
    OpenSession,
    ReportWorker,
    WorkerReported,
)

WORKER, OTHER = FakeRemote(Job.WORKER, 3), FakeRemote(Job.WORKER, 4)


class Heard(FakeRemote):
    """A coordinator, and which workers it was told of."""

    def __init__(self, session=SESSION):
        super().__init__(Job.CHIEF, session)
        self.told = []

    def notify(self, message):
        if isinstance(message, WorkerReported):
            self.told.append(message)


@pytest.fixture
async def server():
    server = Gated()
    server.ask(CloseSession(SESSION, False))
    yield server
    await server.service.drain()


def report(server, patience=60.0, address="late:1", peer=WORKER):
    return server.ask(ReportWorker(address, -1, patience), peer)


def opened(server, chief):
    server.ask(OpenSession(chief.hello.incarnation, 0, 1, []), chief)
    return chief


async def test_a_worker_waits_for_a_program_and_hears_its_answer(server):
    first = report(server)
    chief = opened(server, Heard())
    second = report(server, address="later:1", peer=OTHER)
    early, late = chief.told
    assert early == WorkerReported(SESSION, early.report, "late:1", -1, 60.0)
    assert (late.address, late.report != early.report) == ("later:1", True)
    answer = AnswerReport(SESSION, early.report, 4)
    assert server.ask(answer, chief) == Done()
    error = to_wire(InvalidArgumentError("it has 2 devices"))
    server.ask(AnswerReport(SESSION, late.report, -1, error), chief)
    assert await first == answer
    with pytest.raises(InvalidArgumentError):
        await second
    assert server.ask(answer, chief) == Done(), "twice is no error"


async def test_a_program_that_comes_back_or_follows_is_told_again(server):
    chief = opened(server, Heard())
    waiting = report(server)
    again = opened(server, Heard())
    assert again.told == chief.told
    server.service.lost(again, "ended")
    server.service.lost(chief, "ended")
    follower = opened(server, Heard(9))
    (told,) = follower.told
    server.ask(AnswerReport(9, told.report, 1), follower)
    assert (await waiting).index == 1


async def test_an_answer_for_the_process_before_is_nobodys(server):
    before = Gated()
    first = report(before)
    chief = opened(before, Heard())
    waiting = report(server, peer=OTHER)
    opened(server, Heard())
    late = AnswerReport(SESSION, chief.told[0].report, 4)
    assert server.ask(late, caller(Job.CHIEF)) == Done()
    assert not waiting.done()
    await before.service.drain()
    with pytest.raises(UnavailableError):
        await first
    server.service.lost(OTHER, "ended")


@pytest.mark.parametrize(
    ("holds", "words"),
    [(None, "no program has opened"), (False, "is gone within"), (True, "not taken")],
)
async def test_patience_ends_with_words(server, holds, words):
    if holds is not None:
        chief = opened(server, Heard())
    if holds is False:
        server.service.lost(chief, "ended")
    with pytest.raises(DeadlineExceededError, match=words):
        await report(server, 0.01)


async def test_one_connection_does_not_take_the_place_of_others(server):
    first = report(server)
    with pytest.raises(BusyError):
        report(server, address="later:1")
    second = report(server, address="later:1", peer=OTHER)
    chief = opened(server, Heard())
    server.ask(AnswerReport(SESSION, chief.told[0].report, 4), chief)
    assert (await first).index == 4
    assert not second.done()
    report(server)


async def test_a_worker_whose_connection_broke_reports_itself_again(server):
    first = report(server)
    chief = opened(server, Heard())
    second = report(server)
    with pytest.raises(BusyError):
        await first
    server.ask(AnswerReport(SESSION, chief.told[-1].report, 4), chief)
    assert (await second).index == 4
    assert len(chief.told) == 2


async def test_only_workers_report_and_only_coordinators_answer(server):
    for role in (Job.CHIEF, Job.PS, Job.EVALUATOR, Job.OBSERVER):
        with pytest.raises(PermissionDeniedError, match="from worker"):
            server.ask(ReportWorker("late:1", -1, 1.0), caller(role))
    with pytest.raises(PermissionDeniedError, match="AnswerReport"):
        server.ask(AnswerReport(SESSION, 1, 1), WORKER)


async def test_nobody_waits_for_ever(server):
    gone = report(server)
    server.service.lost(WORKER, "ended")
    with pytest.raises(asyncio.CancelledError):
        await gone
    waiting = report(server)
    await server.service.drain()
    with pytest.raises(UnavailableError):
        await waiting
