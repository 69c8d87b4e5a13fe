"""Who may use a worker, and what is left when they go."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from zstrat.codecs import Wire
from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
    WorkerLostError,
)
from zstrat.program import function
from zstrat.ps import PsUpdate, Ref
from zstrat.testing import FakeRemote
from zstrat.wire import (
    Batch,
    CancelSteps,
    CloseSession,
    Completion,
    Dispatch,
    Fetch,
    Inspect,
    Job,
    OpenSession,
    Outcome,
    Pull,
    PutCode,
    RoundNumber,
    StepContribution,
    UpdateOp,
)
from zstrat.worker import Ending, Post, Reads, RoundPush, SharedPull


@function
def double(x):
    return x * 2


async def test_opening_tells_the_devices(closed):
    opened = await closed.open()
    assert (opened.platform, opened.devices) == ("cpu", 1)
    assert all(link.is_started for link in closed.links)


@pytest.mark.parametrize("role", [Job.WORKER, Job.PS, Job.OBSERVER, Job.EVALUATOR])
async def test_only_a_chief_runs_code(world, role):
    world.remote.role = role
    for message in (
        PutCode(world.session, b"d", b"c"),
        Dispatch(world.session, 0, [], b"", ()),
        OpenSession(5, 0, 1, []),
        CloseSession(world.session, True),
        Fetch(world.session, 1),
    ):
        with pytest.raises(PermissionDeniedError, match=f"from chief.* is {role}"):
            await world.ask(message)
    statistics = await world.ask(Inspect())
    assert statistics.values["task"] == "/job:worker/task:0"
    world.remote.role = Job.CHIEF


async def test_messages_of_others_are_refused(world):
    with pytest.raises(ProtocolError):
        await world.ask(Pull(world.session, []))
    for message in (Dispatch(5, 0, [], b"", ()), CancelSteps(5), PutCode(5, b"", b"")):
        with pytest.raises(StaleSessionError):
            await world.ask(message)


async def test_before_the_first_session(closed):
    with pytest.raises(StaleSessionError):
        await closed.ask(PutCode(1000, b"", b""))


async def test_a_second_coordinator_waits_for_the_loss_of_the_first(world):
    digest = await world.ship(double)
    second = FakeRemote(Job.CHIEF, 78, pid=2)
    take = OpenSession(2000, 0, 1, ["0"])
    with pytest.raises(BusyError):
        await world.ask(take, second)
    assert await world.run(digest, [1], world.arguments(np.float32(1))) == [2]
    world.worker.lost(world.remote, "silent")
    with pytest.raises(StaleSessionError):
        await world.ask(PutCode(world.session, b"", b""))
    for service in world.services:
        service.lost(world.remote, "silent")
    world.remote = second
    await world.open(session=2000)
    world.seen = 0
    (error,) = await world.run(digest, [2])
    assert isinstance(error, NotFoundError)  # code of the first is gone
    assert world.links[0].is_closed
    assert not world.links[1].is_closed


async def test_a_coordinator_that_is_lost_while_it_opens_owns_nothing(closed):
    first, second = closed.chief(), closed.chief()
    opening = closed.worker.handle(first, OpenSession(1000, 0, 1, ["0"]))
    closed.worker.lost(first, "it said goodbye in the same breath")
    await asyncio.gather(opening, return_exceptions=True)
    assert closed.worker.statistics()["session"] == 0
    closed.remote = second
    await closed.open(session=2000)
    assert closed.worker.statistics()["session"] == 2000


async def test_loss_of_the_coordinator_closes_its_datasets(world):
    closing = threading.Event()

    def dataset_fn():
        try:
            while True:
                yield np.zeros(1)
        finally:
            closing.set()

    await world.build(dataset_fn)
    world.worker.lost(world.remote, "killed")
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, closing.wait, 20)
    world.services[0].lost(world.remote, "killed")
    world.session = 1001
    await world.open()
    digest = await world.ship(double)
    assert await world.run(digest, [1], world.arguments(np.float32(2))) == [4]


async def test_what_runs_when_its_coordinator_is_lost_is_not_pushed(world):
    v = world.variable(np.float32(0))
    gate = world.gate()

    class Tick:
        """Blocks while the step is prepared."""

        def __iter__(self):
            yield np.float32(1)
            gate.hold()
            yield np.float32(1)

    @function
    def step(iterator):
        v.assign_add(next(iterator))

    digest, arguments = await world.reading(Tick, step)
    await world.run(digest, [1], arguments)
    world.dispatch(digest, [2], arguments)
    await gate.wait_reached()
    world.log.clear()
    world.worker.lost(world.remote, "killed")
    gate.open()
    await world.worker._executor.submit(lambda: None)
    assert world.value(v) == 1
    assert world.log == []


async def test_opening_again_starts_afresh_with_the_code_that_is_compiled(world):
    closed = []

    def dataset_fn():
        try:
            while True:
                yield np.zeros(1)
        finally:
            closed.append(True)

    await world.build(dataset_fn)
    digest = await world.ship(double)
    await world.run(digest, [1], world.arguments(np.float32(1)))
    compiled = world.worker.statistics()["compilations"]
    world.remote = world.chief()
    await world.open()
    world.seen = 0
    world.forget(1)
    (error,) = await world.run(digest, [1], 1)
    assert isinstance(error, NotFoundError)  # its arguments are gone
    assert await world.run(digest, [2], world.arguments(np.float32(1))) == [2]
    assert len(world.remote.notices[-1].layouts) == 1  # the first may have been lost
    assert world.worker.statistics()["compilations"] == compiled
    assert closed == [True]
    assert [link.is_closed for link in world.links] == [True, False]


async def test_a_closure_twice_in_one_batch_is_one(world):
    digest = await world.ship(double)
    arguments = world.arguments(np.float32(1))
    assert await world.run(digest, [1, 1, 2], arguments) == [2, 2, 2]
    assert world.worker.statistics()["duplicates"] == 1
    assert await world.worker.drain() is True


async def test_a_server_that_does_not_answer(impatient):
    impatient.has_servers = False
    with pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        await impatient.open()
    impatient.has_servers = True
    impatient.session = 1001
    impatient.remote = impatient.chief()
    for service in impatient.services:
        service._ownership.close(1000)
    await impatient.open()


async def test_closing_drops_all_and_exit_is_told_once(world):
    digest = await world.ship(double)
    await world.ask(CloseSession(world.session, True))
    assert world.exits == [True]
    with pytest.raises(StaleSessionError):
        world.dispatch(digest, [1])
    await world.ask(CloseSession(world.session, True))
    assert world.exits == [True]
    await asyncio.gather(*world.worker._leaving)
    assert world.links[0].is_closed


async def test_a_close_that_comes_late_ends_nothing_that_was_opened_since(world):
    before, world.remote = world.remote, world.chief()
    await world.open()  # sent at 0, as all that says nothing else
    with pytest.raises(StaleSessionError):
        await world.ask(CloseSession(world.session, True, sent=-1.0), before)
    world.worker.lost(before, "it left")
    assert world.exits == []
    digest = await world.ship(double)
    world.seen = 0
    assert await world.run(digest, [1], world.arguments(np.float32(1))) == [2]


async def test_draining_sends_back_what_has_not_begun(world):
    gate = world.gate()

    @function(eager=True)
    def slow():
        gate.hold()
        return "ran"

    digest = await world.ship(slow)
    world.dispatch(digest, [1, 2])
    await gate.wait_reached()
    draining = asyncio.ensure_future(world.worker.drain())
    await asyncio.sleep(0)
    world.dispatch(digest, [3])
    (error,) = await world.outcomes([3])
    assert isinstance(error, WorkerLostError)
    assert error.retryable
    assert not draining.done()
    gate.open()
    assert await draining is True
    ran, sent_back = await world.outcomes([1, 2])
    assert ran == "ran"
    assert isinstance(sent_back, WorkerLostError)
    with pytest.raises(WorkerLostError):
        await world.ask(OpenSession(3000, 0, 1, []))


async def test_draining_has_a_bound(world):
    gate = world.gate()

    @function(eager=True)
    def slow():
        gate.hold()

    world.dispatch(await world.ship(slow), [1])
    session = world.worker._session
    refusal = WorkerLostError("w", "ends")
    assert await session.drain(refusal, asyncio.get_running_loop().time()) is False
    gate.open()
    await world.outcomes([1])


async def test_a_coordinator_that_does_not_read_is_asked_again(world):
    digest = await world.ship(double)
    world.remote.refusals = [lambda message: BusyError("full")] * 2
    assert await world.run(digest, [1, 2], world.arguments(np.float32(1))) == [2, 2]


async def test_completions_that_do_not_fit_are_sent_in_halves(world):
    def too_large(message):
        return ValueError("too large") if len(message.completions) > 1 else None

    def never(message):
        return ValueError("no") if message.completions[0].outcome == 0 else None

    digest = await world.ship(double)
    arguments = world.arguments(np.float32(1))
    world.remote.refusals = [too_large] * 30
    assert await world.run(digest, range(20), arguments) == [2] * 20
    world.remote.refusals = [never]
    (error,) = await world.run(digest, [30], arguments)
    assert isinstance(error, ValueError)
    world.remote.refusals = []


async def test_too_many_closures_are_sent_back(world, monkeypatch):
    monkeypatch.setattr("zstrat.worker._worker_session.MAX_OPEN", 10)
    digest = await world.ship(double)
    world.dispatch(digest, range(8), world.arguments(np.float32(1)))
    world.dispatch(digest, range(8, 20))
    for error in await world.outcomes(range(8, 20)):
        assert isinstance(error, BusyError)
    assert await world.outcomes(range(8)) == [2] * 8


async def test_statistics(world):
    digest = await world.ship(double)
    await world.run(digest, range(5), world.arguments(np.float32(1)))
    await world.run(b"unknown", [5])
    values = (await world.ask(Inspect())).values
    assert (values["done"], values["failed"], values["waiting"]) == (5, 1, 0)
    assert world.worker.telemetry()["process"]["memory"] > 2**20
    assert (values["platform"], values["devices"]) == ("cpu", 1)
    assert (values["functions"], values["session"]) == (1, world.session)


async def test_a_defect_of_our_own_ends_the_session_and_is_told(closed, caplog):
    await closed.open()
    executor = closed.worker._executor

    def defect():
        raise AssertionError("a defect")

    executor.tell(defect)
    await executor.close(20)  # the thread has called us back before it ended
    assert "executor thread failed" in caplog.text
    closed.crashes.clear()


def encoded(world, step):
    encoding = world.worker._session.runner.encoding
    update = PsUpdate(0, 5, UpdateOp.OPTIMIZE, 1, (np.arange(600, dtype=np.float32),))
    wire = Wire(push="topk", density=0.1)
    return encoding.encoded(step, [update], {1: wire})[1]


async def test_what_a_format_left_out_is_sent_in_the_next_session(world):
    session = world.worker._session
    settle = session.runner.encoding.residuals.settle
    settle(encoded(world, 1), is_sent=True)
    ending = Ending(Completion(2, int(Outcome.OK), 1, 0, None), lent=encoded(world, 2))
    assert session.runner.encoding.residuals.nbytes == 0  # a push has taken it
    world.remote = world.chief()
    await world.open()
    session.carry_out(Post([([], ending)], [None]))
    assert world.worker._session is not session
    assert world.worker._session.runner.encoding.residuals.nbytes == 2400


async def test_nobody_waits_for_the_round_of_a_push_that_could_not_be_sent(
    world, monkeypatch
):
    session = world.worker._session

    def contribute(self, given, updates):
        raise ValueError("too large")

    monkeypatch.setattr(type(session.client), "contribute", contribute)
    asked = []
    monkeypatch.setattr(
        type(session.client),
        "pull_round",
        lambda self, after, *_, **__: asked.append(after) or asyncio.Future(),
    )
    session._reports.opened(Batch(b"", 0, 1, [1], 0))
    given = StepContribution(1, 1, 7, 0, 1.0, coupled=False)
    ending = Ending(Completion(1, int(Outcome.OK), 1, 0, None))
    pull = SharedPull(Reads((Ref(0, 5),), (), (7,)), [], 0.0)
    push = RoundPush([], [], [given])
    session.carry_out(Post([(push, ending)], [None], [pull]))
    assert asked == [[RoundNumber(7, 0)]]


@pytest.mark.parametrize("ends", [[1, 2], [2, 1]])
@pytest.mark.parametrize("bases", [(3, 3), (2, 3)])
async def test_pulls_wait_for_the_contribution_that_stands_when_another_fails(
    world, monkeypatch, bases, ends
):
    session = world.worker._session
    world.layouts[0] = None  # of no result
    sent, asked = {}, []

    def contribute(self, given, updates):
        return sent.setdefault(given[0].step, asyncio.Future())

    client = type(session.client)
    monkeypatch.setattr(client, "contribute", contribute)
    monkeypatch.setattr(
        client,
        "pull_round",
        lambda self, after, *_, **__: asked.append(after) or asyncio.Future(),
    )
    session._reports.opened(Batch(b"", 0, 1, [1, 2], 0))
    for step, base in zip((1, 2), bases, strict=True):
        given = StepContribution(step, 1, 7, base, 1.0, coupled=False)
        ending = Ending(Completion(step, int(Outcome.OK), 0, -1, None))
        push = RoundPush([], [], [given])
        session.carry_out(Post([(push, ending)], [None]))
    for step in ends:
        if step == 1:
            sent[step].set_exception(BusyError("busy"))
        else:
            sent[step].set_result(True)
        await world.outcomes([step])
    pull = SharedPull(Reads((Ref(0, 5),), (), (7,)), [], 0.0)
    session.carry_out(Post(pulls=[pull]))
    assert asked == [[RoundNumber(7, 4)]]
