"""Rounds of a coordinator: when they close, with whom, and what a lost server changes.

Servers and workers are stand-ins here; those of `tests/system/test_system_rounds.py`
are real."""

import asyncio
import functools
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import zstrat as zs
from zstrat.coordinator import RestoredRounds
from zstrat.coordinator.parts import Code
from zstrat.coordinator.rounds import CoordinatorParts, RoundClosing
from zstrat.errors import (
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    PSUnavailableError,
    UnavailableError,
)
from zstrat.wire import (
    HeldRounds,
    MergedOperands,
    RoundMember,
    RoundOrder,
    StepContribution,
)

OPTIMIZER = 7


class Rig:
    """A coordinator with so many workers, and servers that fail as often as said."""

    def __init__(self, workers, policy, *, failures=0, timeout=0.0):
        self.closed, self.asked, self.raised, self.codes = [], 0, [], []
        self.failures, self.refusal = failures, None
        self.failure = PSUnavailableError("ps:0", "its connection broke")
        self.queue = SimpleNamespace(
            is_idle=False, steps=SimpleNamespace(low_water=1), suspended=False
        )
        waiters = SimpleNamespace(notify=lambda: None)
        self.engine = engine = SimpleNamespace(
            queue=self.queue,
            waiters=waiters,
            lock=threading.Lock(),
            outage_error=None,
            fail=self.fail,
            end_outage=self.end_outage,
        )
        usable = [SimpleNamespace(place=place) for place in range(workers)]
        self.sound = [*usable]
        members = SimpleNamespace(
            pace=lambda: None,
            note_rounds=lambda places: None,
            usable=usable,
            sound=self.sound,
            absent=lambda: "worker:3: it was killed",
        )
        link = SimpleNamespace(submit=self.submit)
        self.task = SimpleNamespace(is_ready=True, name="worker:0", link=link)
        channel = SimpleNamespace(task=self.task, session=1, put_code=self.put_code)
        self.closing = RoundClosing(self, timeout)
        parts = CoordinatorParts(engine, members, {0: channel}, lambda: None)
        self.attach = functools.partial(self.closing.attach, parts)
        self.attach()
        self.closing.add(OPTIMIZER, "mine", policy, Code(b"optax"))

    def fail(self, error, *, lasting=False):
        self.raised.append(error)
        if lasting:
            self.engine.outage_error = error

    def end_outage(self):
        self.engine.outage_error = None

    def put_code(self, code):
        self.codes.append(code.digest)

    async def submit(self, order):
        assert self.codes[-1] == order.code
        self.asked += 1
        if self.refusal is not None:
            raise self.refusal
        return MergedOperands((np.float32([self.asked]),))

    async def close_round(self, closed, kept, over, operands=()):
        """Of the client."""
        if self.failures:
            self.failures -= 1
            raise self.failure
        steps = [member.step for member in closed.members]
        self.closed.append((closed.number, steps, [float(x[0]) for x in operands]))

    async def held_rounds(self, deadline):
        """Of the client."""
        return self.held

    async def contribute(self, worker, step, base, *, coupled=False):
        given = StepContribution(step, 1, OPTIMIZER, base, 1.0, coupled)
        self.closing.contributed(worker, [given], self.now)
        await self.closing.settle()
        await asyncio.sleep(0)  # callbacks of what has ended

    async def look(self, later=0.0):
        self.closing.look(self.now + later)
        await self.closing.settle()

    @property
    def now(self):
        return asyncio.get_running_loop().time()


@pytest.fixture
async def make_rig():
    rigs = []

    def make(*given, **options):
        rigs.append(Rig(*given, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.closing.stop()


async def test_a_round_closes_with_all_workers_in_the_order_of_steps(make_rig):
    rig = make_rig(2, zs.Rounds())
    await rig.contribute(1, 2, 0)
    assert not rig.closed
    await rig.contribute(0, 1, 0)
    assert rig.closed == [(0, [1, 2], [])]


async def test_a_round_waits_for_no_worker_that_gets_no_closures(make_rig):
    """Worker 1 is there and cannot reach a parameter server."""
    rig = make_rig(2, zs.Rounds())
    del rig.sound[1]
    await rig.contribute(0, 1, 0)
    assert rig.closed == [(0, [1], [])]


async def test_a_new_coordinator_closes_what_is_open(make_rig):
    """Worker 1 has contributed by a step of the coordinator before, which was not told,
    and its next step waits for the end of that round."""
    rig = make_rig(2, zs.Rounds())
    await rig.contribute(0, 1, 0)
    rig.attach()
    await rig.look()
    assert rig.closed == [(0, [1], [])]
    await rig.contribute(0, 3, 1)
    await rig.contribute(1, 4, 1)
    assert rig.closed[1:] == [(1, [3, 4], [])]


async def test_operands_are_computed_once_though_the_order_comes_twice(make_rig):
    """A server that has closed the round has none of its gradients any more."""
    rig = make_rig(1, zs.Rounds(), failures=1)
    await rig.contribute(0, 1, 0, coupled=True)
    await rig.look(1.0)
    assert rig.closed == [(0, [1], [1.0])]
    assert rig.asked == 1
    assert not rig.raised


@pytest.mark.parametrize("refusal", [None, ClosedError("it left")])
async def test_operands_wait_for_a_worker_that_is_away(make_rig, refusal):
    """It is not connected; or the program lets it go meanwhile."""
    rig = make_rig(1, zs.Rounds())
    rig.task.is_ready, rig.refusal = refusal is not None, refusal
    given = StepContribution(1, 1, OPTIMIZER, 0, 1.0, True)
    rig.closing.contributed(0, [given], rig.now)
    rig.closing.look(rig.now)
    await asyncio.sleep(0)
    assert not rig.closed
    rig.task.is_ready, rig.refusal, rig.asked = True, None, 0
    await rig.look()
    assert rig.closed == [(0, [1], [1.0])]
    assert not rig.raised


async def test_a_checkpoint_waits_for_a_round_that_waits_for_a_worker(make_rig):
    rig = make_rig(1, zs.Rounds())
    rig.task.is_ready = False
    given = StepContribution(1, 1, OPTIMIZER, 0, 1.0, True)
    rig.closing.contributed(0, [given], rig.now)
    held = asyncio.ensure_future(rig.closing.hold())
    await asyncio.sleep(0)
    rig.task.is_ready = True
    rig.closing.look(rig.now)
    await held
    assert rig.closed == [(0, [1], [1.0])]


@pytest.mark.parametrize(
    "error",
    [
        PSUnavailableError("ps:0", "its connection broke"),
        UnavailableError("ps:0 is shutting down"),
    ],
)
async def test_an_order_waits_while_a_restore_waits_for_a_server(make_rig, error):
    rig = make_rig(1, zs.Rounds(), failures=3)
    rig.queue.suspended, rig.failure = True, error
    await rig.contribute(0, 1, 0)
    assert rig.failures == 2
    assert not rig.raised
    with pytest.raises(UnavailableError):  # one server may have closed it
        await rig.closing.hold()
    rig.closing.release()
    rig.queue.suspended, rig.failures = False, 0
    await rig.look(1.0)
    assert rig.closed == [(0, [1], [])]


async def test_operands_that_cannot_be_computed_are_an_error(make_rig):
    rig = make_rig(1, zs.Rounds())
    rig.refusal = InvalidArgumentError("of two trees")
    await rig.contribute(0, 1, 0, coupled=True)
    (error,) = rig.raised
    assert isinstance(error, UnavailableError)
    assert "of two trees" in str(error)
    assert not rig.closed


@pytest.mark.parametrize("coupled", [False, True])
async def test_a_member_that_a_server_lacks_is_named_with_workers(make_rig, coupled):
    """A server that has lost it refuses the order; others may have applied it, unless
    operands were to be computed first."""
    rig = make_rig(2, zs.Rounds(), failures=1)
    missing = "/job:ps/task:1 has lost what run 1 of step 2 has contributed"
    rig.failure = rig.refusal = NotFoundError(missing)
    await rig.contribute(1, 2, 0, coupled=coupled)
    await rig.contribute(0, 1, 0, coupled=coupled)
    (error,) = rig.raised
    assert isinstance(error, UnavailableError)
    for words in (missing, "step 1 of worker 0", "step 2 of worker 1", "checkpoint"):
        assert words in str(error)
    assert ("may differ" in str(error)) is not coupled
    assert not rig.closed


async def test_what_no_round_can_mend_is_raised_until_a_restore(make_rig):
    """A server whose connection heals ends its outage alone, and what servers hold that
    differ is of no model to be saved. All of them from one checkpoint are alike."""
    rig = make_rig(1, zs.Rounds(), failures=1)
    rig.failure = NotFoundError("/job:ps/task:1 has lost it")
    await rig.contribute(0, 1, 0)
    (error,) = rig.raised
    rig.engine.outage_error = None
    rig.closing.look(rig.now)
    assert rig.engine.outage_error is error
    with pytest.raises(UnavailableError) as raised:
        await rig.closing.hold()
    assert raised.value is error
    rig.closing.restart()
    assert rig.engine.outage_error is None
    await rig.closing.hold()


async def test_a_member_that_one_server_of_the_program_before_lacks(make_rig):
    """A program was killed after one server had closed the round."""
    rig = make_rig(1, zs.Rounds(), failures=1)
    missing = "/job:ps/task:1 has lost what run 1 of step 2 has contributed"
    rig.failure = NotFoundError(missing)
    order = RoundOrder(OPTIMIZER, 3, 0, [RoundMember(2, 1, 1.0)])
    rig.held = [{OPTIMIZER: HeldRounds(order, [], ())}, {}]
    with pytest.raises(UnavailableError) as raised:
        await rig.closing.inherit(0.0)
    for words in (missing, "round 3", "step 2 of the program before", "checkpoint"):
        assert words in str(raised.value)
    await rig.closing.inherit(0.0)
    assert rig.closed == [(3, [2], [])]


async def test_a_late_contribution_is_dropped_or_counts_for_the_next_round(make_rig):
    for late, second in (("drop", [3]), ("next", [2, 3])):
        rig = make_rig(2, zs.Rounds(backup=1, late=late))
        await rig.contribute(0, 1, 0)
        if late == "next":
            rig.closing.rounds.get(OPTIMIZER).is_closing = True
        await rig.contribute(1, 2, 0)
        rig.closing.rounds.get(OPTIMIZER).is_closing = False
        await rig.contribute(0, 3, 1)
        assert rig.closed == [(0, [1], []), (1, second, [])]


async def test_a_late_contribution_takes_nobodys_place(make_rig):
    """Else whose place it takes would be late in turn, for all rounds to come."""
    rig = make_rig(3, zs.Rounds(late="next"))
    await rig.contribute(0, 1, 0)
    await rig.contribute(1, 2, 0)
    rig.sound.pop()  # whose step another worker runs
    await rig.look()
    await rig.contribute(0, 3, 0)
    await rig.contribute(0, 4, 1)
    assert rig.closed == [(0, [1, 2], [])]
    await rig.contribute(1, 5, 1)
    assert rig.closed[1:] == [(1, [3, 4, 5], [])]


async def test_without_backup_workers_no_contribution_is_dropped(make_rig):
    """A worker is lost, its step runs again, and the round is closed before it ends."""
    rig = make_rig(3, zs.Rounds())
    await rig.contribute(0, 1, 0)
    await rig.contribute(1, 2, 0)
    rig.sound.pop()
    await rig.look()
    await asyncio.sleep(0)
    await rig.contribute(0, 3, 0)
    await rig.contribute(1, 4, 1)
    await rig.contribute(0, 5, 1)
    assert rig.closed == [(0, [1, 2], []), (1, [3, 4, 5], [])]
    seen = rig.closing.rounds.metrics(2, 0.0)["mine"]
    assert (seen["late"], seen["dropped"]) == ({"worker:0": 1}, {})


async def test_no_round_is_closed_while_a_checkpoint_is_taken(make_rig):
    """Its grace may end meanwhile, and one server may be saved before the other."""
    rig = make_rig(2, zs.Rounds(backup=1, grace=0.001))
    await rig.contribute(0, 1, 0)
    await rig.closing.hold()
    rig.closing.look(rig.now + 1.0)
    await rig.contribute(1, 2, 0)
    assert not rig.closed
    rig.closing.release()
    await rig.closing.settle()
    assert rig.closed == [(0, [1, 2], [])]


async def test_what_waits_is_dropped_when_a_checkpoint_is_restored(make_rig):
    rig = make_rig(2, zs.Rounds())
    rig.queue.steps.next = 3
    await rig.contribute(0, 1, 0)
    await rig.closing.hold()
    await rig.closing.drop()
    assert rig.closed == [(0, [], [])]
    await rig.closing.drop()  # nothing waits
    rig.closing.release()
    await rig.contribute(1, 2, 1)
    await rig.contribute(0, 3, 1)
    assert rig.closed == [(0, [], []), (1, [2, 3], [])]


@pytest.mark.parametrize(
    ("made", "saved", "cycle", "opens"),
    [
        (0, 0, 3, 0),  # a new program
        (0, 1, 3, 1),
        (0, 7, 3, 7),
        (5, 7, 3, 7),
        (6, 7, 3, 10),  # a worker may be in round 7 already
        (8, 2, 3, 11),
        (8, 2, 1, 10),
    ],
)
async def test_rounds_continue_those_of_a_checkpoint(
    make_rig, made, saved, cycle, opens
):
    rig = make_rig(1, zs.Rounds())
    for number in range(made):
        await rig.contribute(0, 1 + number, number)
    await rig.closing.hold()
    rig.queue.steps.next = 50
    await rig.closing.drop({OPTIMIZER: RestoredRounds(saved, cycle)})
    rig.closing.release()
    await rig.contribute(0, 100, opens)
    assert rig.closed[-1] == (opens, [100], [])
    skips = rig.closed[made:-1]
    assert skips == ([(opens - 1, [], [])] if opens > made else [])


async def test_too_few_workers_are_an_error_that_names_who_is_missing(make_rig):
    rig = make_rig(1, zs.Rounds(workers=2))
    await rig.contribute(0, 1, 0)
    (error,) = rig.raised
    assert isinstance(error, UnavailableError)
    for word in ("'mine'", "worker:3", "workers=None", "backup="):
        assert word in str(error)


async def test_without_any_worker_rounds_wait_as_closures_do(make_rig):
    rig = make_rig(2, zs.Rounds(workers=2))
    await rig.contribute(0, 1, 0)
    rig.sound.clear()
    rig.closing.look(rig.now)
    assert not rig.raised


async def test_rounds_smaller_than_the_workers_are_warned_of_once(make_rig, caplog):
    with caplog.at_level(logging.WARNING, "zstrat.coordinator"):
        rig = make_rig(4, zs.Rounds(workers=2))
        for step, worker in enumerate((0, 1, 2, 3)):
            await rig.contribute(worker, step, step // 2)
    (record,) = caplog.records
    assert "workers=4, backup=2" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": 2, "backup": 2}, "backup"),
        ({"backup": -1}, "backup"),
        ({"grace": -1.0}, "grace"),
        ({"late": "never"}, "late"),
        ({"merge": "median"}, "merge"),
        ({"weights": 1.0}, "weights"),
    ],
)
def test_bad_arguments_are_named(given, name):
    with pytest.raises(ValueError, match=f"{name}="):
        zs.Rounds(**given)
