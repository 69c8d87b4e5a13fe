"""Pushes that are added while they arrive: whole or not at all, once, and never seen
half done, whoever else does what to the variable meanwhile. Two peers, no sockets."""

import asyncio
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ps_callers import SESSION, Gated, caller
from ps_trees import binding, message
from tiers import examples

from zstrat.config import Limits, Timeouts
from zstrat.errors import InvalidArgumentError, NotFoundError, StaleSessionError
from zstrat.ps.store import _fold as fold_module
from zstrat.transport import Pool
from zstrat.wire import (
    PROTOCOL,
    CloseSession,
    CreateOptimizer,
    DeleteVariables,
    Exchange,
    Exchanged,
    Hello,
    Job,
    Pull,
    Pulled,
    Push,
    Pushed,
    Read,
    Update,
    UpdateOp,
)
from zstrat.wire.connection import Answered, Carried, Failed, Requested, failure
from zstrat.wire.connection import Peer as Connection

KEY, SIZE = 1, 96
ADD, SUB, ASSIGN = (int(op) for op in (UpdateOp.ADD, UpdateOp.SUB, UpdateOp.ASSIGN))
SPARSE, OPTIMIZE = int(UpdateOp.SCATTER_ADD), int(UpdateOp.OPTIMIZE)
CHUNKS = Limits(chunk=64, window=4)


@pytest.fixture(autouse=True)
def _small_arrays_fold(monkeypatch):
    monkeypatch.setattr(fold_module, "MIN_FOLDED_BYTES", 1)


class Ps(Gated):
    """With one variable of float32, zeros."""

    def __init__(self, shape=(SIZE,), dtype="f4"):
        super().__init__()
        self.pool = Pool()
        self.create({KEY: np.zeros(shape, dtype)})

    def read(self):
        """The value as readers get it, and a copy: the two must stay equal."""
        pulled = self.ask(Pull(SESSION, [Read(KEY, -1)]))
        assert isinstance(pulled, Pulled)
        return pulled.arrays[0], pulled.arrays[0].copy()

    @property
    def value(self):
        return self.read()[1]


class Sender:
    """A worker's connection to it; ``trips`` counts whole bodies that arrived."""

    def __init__(self, ps, role=Job.WORKER, limits=CHUNKS):
        self.ps, self.trips, self.folds, self.waiting = ps, 0, 0, []
        self.caller = caller(role)
        carrier = SimpleNamespace(carried=Carried)  # the system says nothing of it
        common = {
            "timeouts": Timeouts(),
            "limits": limits,
            "now": 0.0,
            "carrier": carrier,
        }
        me, it = self.caller.hello, Hello(PROTOCOL, "ps", 0, 5, "there", 12)
        self.client = Connection(
            "ps",
            me,
            initiator=True,
            mismatch=lambda _: None,
            allocate=ps.pool.allocate,
            **common,
        )
        self.server = Connection(
            "worker",
            it,
            initiator=False,
            mismatch=lambda _: None,
            allocate=ps.pool.allocate,
            absorb=partial(ps.service.absorb, self.caller),
            **common,
        )
        (greeted,) = self.server.received(self.client.transmit(0.0), 0.0)
        self.server.accept(greeted.hello, 0.0)
        self.outcomes = {}
        self.back()

    def push(self, array, op=ADD, step=-1, key=KEY, token="it", session=SESSION):
        update = [Update(key, op, 0, 1)]
        self.request(Push(session, step, 0, 0, update, (array,)), token)

    def request(self, message, token="it"):
        self.client.request(message, token, 60.0)

    def carry(self, count=10**6):
        """Some messages to the server, and all that come back for them."""
        for _ in range(count):
            frames = self.client.transmit(0.0)
            if frames is None:
                break
            for order in self.server.received([bytes(f) for f in frames], 0.0):
                self.serve(order)
            self.back()

    def serve(self, order):
        assert isinstance(order, Requested)
        self.trips += 1
        self.folds += order.sink is not None
        number, message, sink = order
        try:
            if sink is None:
                answer = self.ps.service.handle(self.caller, message)
            else:
                assert message.arrays == ()
                answer = sink.finish()
        except Exception as error:
            answer = failure(error)
        if asyncio.isfuture(answer):
            self.waiting.append((number, answer))
        else:
            self.server.reply(number, answer)

    async def wait(self):
        """Until nothing waits for its turn, there and back."""
        async with asyncio.timeout(60):
            while self.waiting:
                number, answer = self.waiting.pop(0)
                self.server.reply(number, await answer)
                self.back()
                self.carry()

    def back(self):
        while (frames := self.server.transmit(0.0)) is not None:
            for order in self.client.received([bytes(f) for f in frames], 0.0):
                if isinstance(order, Answered):
                    self.outcomes[order.token] = order.message
                elif isinstance(order, Failed):
                    self.outcomes[order.token] = order.error

    @property
    def outcome(self):
        return self.outcomes["it"]


@pytest.fixture
def ps():
    return Ps()


@pytest.fixture
def sender(ps):
    return Sender(ps)


def ramp(start=1, dtype="f4"):
    return np.arange(start, start + SIZE).astype(dtype)


@pytest.mark.parametrize("op", [ADD, SUB])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u8"])
def test_chunks_are_added_as_they_come_in_the_memory_that_becomes_the_value(op, dtype):
    ps = Ps((4, 24), dtype)
    sender = Sender(ps)
    first, second = (ramp(k, dtype).reshape(4, 24) for k in (1, 50))
    sender.push(first)
    sender.carry()
    sender.push(second, op)
    sender.carry()
    assert sender.outcome == Pushed(applied=True, versions=[2])
    want = first + second if op == ADD else first - second
    np.testing.assert_array_equal(ps.value, want)
    assert sender.folds == sender.trips == 2
    # One body is the value; the one before it has gone back, for the next.
    assert ps.pool.statistics()["leases"] == 1
    assert ps.pool.statistics()["idle_bytes"] > 0


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "f2", "c8"])
def test_what_adds_more_slowly_than_it_copies_is_added_when_it_is_there(dtype):
    ps = Ps((SIZE,), dtype)
    sender = Sender(ps)
    sender.push(np.ones(SIZE, dtype))
    sender.carry()
    assert sender.folds == 0
    np.testing.assert_array_equal(ps.value, np.ones(SIZE, dtype))


def test_nothing_is_seen_of_a_push_until_all_of_it_is_there(ps, sender):
    before, copy = ps.read()
    sender.push(ramp())
    for _ in range(6):
        sender.carry(1)
        np.testing.assert_array_equal(ps.value, np.zeros(SIZE))
    sender.carry()
    np.testing.assert_array_equal(ps.value, ramp())
    np.testing.assert_array_equal(before, copy)


def test_a_variable_that_changed_meanwhile_gets_the_push_again(ps, sender):
    sender.push(ramp())
    sender.carry(4)
    update = [Update(KEY, ASSIGN, 0, 1)]
    ps.ask(Push(SESSION, -1, 0, 0, update, (np.full(SIZE, 100, "f4"),)))
    sender.carry()
    assert sender.outcome == Pushed(applied=True, versions=[2])
    np.testing.assert_array_equal(ps.value, 100 + ramp())
    assert (sender.trips, sender.folds) == (2, 1)


def test_senders_who_cross_each_other_are_left_alone_for_a_while(ps, sender):
    other = Sender(ps)
    sender.push(ramp())
    sender.carry(4)
    other.push(ramp())  # the variable is being folded: this one is taken as it is
    other.carry()
    sender.carry()
    assert (other.folds, sender.folds, sender.trips) == (0, 1, 2)
    # It was met at version 1, and is folded again from version 17 on.
    for version in range(3, 20):
        sender.push(ramp())
        sender.carry()
        assert sender.outcome.versions == [version]
        assert sender.folds == (1 if version < 18 else version - 16)
    np.testing.assert_array_equal(ps.value, 19 * ramp())


def test_a_sender_that_dies_leaves_no_trace(ps):
    sender = Sender(ps)
    sender.push(ramp(), step=3)
    sender.carry(5)
    assert ps.pool.statistics()["leases"] == 1
    sender.server.leave("its machine burnt")
    assert ps.pool.statistics()["leases"] == 0
    np.testing.assert_array_equal(ps.value, np.zeros(SIZE))
    retry = Sender(ps)
    retry.push(ramp(), step=3)
    retry.carry()
    assert retry.outcome == Pushed(applied=True, versions=[1])
    assert retry.folds == 1


def test_a_step_that_comes_twice_is_applied_once(ps, sender):
    other = Sender(ps)
    for each in (sender, other):
        each.push(ramp(), step=3)
        each.carry(4)
    other.carry()
    sender.carry()
    assert other.outcome == Pushed(applied=True, versions=[1])
    assert sender.outcome == Pushed(applied=False, versions=[1])
    np.testing.assert_array_equal(ps.value, ramp())


def test_chunks_that_cut_elements_are_taken_as_they_are(ps):
    sender = Sender(ps, limits=Limits(chunk=61, window=4))
    sender.push(ramp())
    sender.carry()
    assert sender.outcome == Pushed(applied=True, versions=[1])
    assert (sender.folds, sender.trips) == (1, 2)
    np.testing.assert_array_equal(ps.value, ramp())


REFUSED = {
    "another shape": ({"array": np.ones(SIZE + 1, "f4")}, InvalidArgumentError),
    "another dtype": ({"array": np.ones(SIZE, "f8")}, InvalidArgumentError),
    "another key": ({"array": np.ones(SIZE, "f4"), "key": 9}, NotFoundError),
    "an old session": ({"array": np.ones(SIZE, "f4"), "session": 3}, StaleSessionError),
    "no operation": ({"array": np.ones(SIZE, "f4"), "op": 77}, InvalidArgumentError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_when_it_is_there(ps, sender, what):
    changes, error = REFUSED[what]
    sender.push(**changes)
    sender.carry()
    assert type(sender.outcome) is error
    assert sender.folds == 0
    np.testing.assert_array_equal(ps.value, np.zeros(SIZE))


def test_who_may_not_push_has_nothing_folded(ps):
    evaluator = Sender(ps, Job.EVALUATOR)
    evaluator.push(ramp())
    evaluator.carry()
    assert evaluator.folds == 0
    assert type(evaluator.outcome).__name__ == "PermissionDeniedError"


def test_a_variable_that_is_deleted_meanwhile_does_not_come_back(ps, sender):
    sender.push(ramp())
    sender.carry(4)
    ps.ask(DeleteVariables(SESSION, [KEY]))
    ps.create({KEY: np.zeros(SIZE, "f4")})
    sender.carry()
    np.testing.assert_array_equal(ps.value, ramp())
    sender.push(ramp())
    sender.carry(4)
    ps.ask(DeleteVariables(SESSION, [KEY]))
    sender.carry()
    assert type(sender.outcome) is NotFoundError


def test_a_session_that_ends_meanwhile_takes_the_push_with_it(ps, sender):
    sender.push(ramp())
    sender.carry(4)
    ps.ask(CloseSession(SESSION, exit=False))
    sender.carry()
    assert type(sender.outcome) is StaleSessionError
    assert ps.pool.statistics()["leases"] == 0
    assert ps.service.statistics()["failed"] == 1


def test_an_exchange_reads_what_was_folded(ps, sender):
    update, reads = [Update(KEY, ADD, 0, 1)], [Read(KEY, -1)]
    message = Exchange(SESSION, 4, 0, 0, update, reads, [], (ramp(),))
    sender.request(message)
    sender.carry(4)
    ps.ask(Push(SESSION, -1, 0, 0, update, (ramp(),)))
    sender.carry()
    answer = sender.outcome
    assert isinstance(answer, Exchanged)
    assert (answer.applied, answer.push_error, answer.versions) == (True, None, [2])
    np.testing.assert_array_equal(answer.arrays[0], 2 * ramp())
    assert (sender.folds, sender.trips) == (1, 2)


async def test_who_came_before_has_his_turn_before(ps, sender):
    ps.gate.clear()
    making = ps.ask(CreateOptimizer(SESSION, 9, "sgd", b"sgd"))
    tree = {"w": ((KEY,), ramp().shape, "f4")}
    ps.ask(message(SESSION, 9, binding(optax.sgd(0.5), tree)))
    sender.push(ramp())
    sender.carry(4)
    # It waits for its optimizer, and holds the variable meanwhile.
    gradient = Push(SESSION, -1, 0, 0, [Update(KEY, OPTIMIZE, 9, 1)], (ramp(),))
    descending = ps.ask(gradient)
    sender.carry()
    assert sender.waiting
    ps.gate.set()
    async with asyncio.timeout(60):
        await making
        await descending
    await sender.wait()
    assert sender.outcome == Pushed(applied=True, versions=[2])
    np.testing.assert_array_equal(ps.value, ramp() - 0.5 * ramp())
    await ps.service.drain()


def test_a_pinned_value_stays_what_it_was(ps, sender):
    (held,) = ps.service._store.variables.find([KEY])
    sender.push(ramp())
    sender.carry()
    pin = held.cell.pin()
    sender.push(ramp())
    sender.carry()
    assert sender.folds == 2
    pinned = np.empty(SIZE, "f4")
    pin.copy(0, pinned.view("u1"))
    np.testing.assert_array_equal(pinned, ramp())
    np.testing.assert_array_equal(ps.value, 2 * ramp())


class Folding(RuleBasedStateMachine):
    """Three senders whose pushes arrive piece by piece, in any order, and may be cut
    off and tried again; others change the variable. Whole numbers, so that sums do not
    depend on the order of what is added."""

    def __init__(self):
        super().__init__()
        self.least, fold_module.MIN_FOLDED_BYTES = fold_module.MIN_FOLDED_BYTES, 1
        self.ps = Ps()
        self.want = np.zeros(SIZE, "f4")
        self.leases, self.steps = [], 0
        self.senders = [Sender(self.ps) for _ in range(3)]
        self.open = [None] * 3

    def teardown(self):
        for which in range(3):
            self.carry(which, 10**6)
        self.nothing_is_lost_or_twice()
        assert not any(self.open)
        fold_module.MIN_FOLDED_BYTES = self.least

    @rule(
        which=st.integers(0, 2),
        number=st.integers(-50, 50),
        op=st.sampled_from([ADD, SUB]),
    )
    def push(self, which, number, op):
        if self.open[which] is None:
            self.steps += 1
            array = np.full(SIZE, number, "f4") + np.arange(SIZE, dtype="f4")
            self.open[which] = (array, op, self.steps)
            self.send(which)

    def send(self, which):
        array, op, step = self.open[which]
        self.senders[which].outcomes.clear()
        self.senders[which].push(array, op, step)

    @rule(which=st.integers(0, 2), count=st.integers(1, 9))
    def carry(self, which, count):
        sender = self.senders[which]
        sender.carry(count)
        if self.open[which] is not None and "it" in sender.outcomes:
            array, op, _ = self.open[which]
            assert sender.outcome.applied
            self.want = self.want + array if op == ADD else self.want - array
            self.open[which] = None

    @rule(which=st.integers(0, 2))
    def cut_off(self, which):
        self.senders[which].server.leave("cut off")
        self.senders[which] = Sender(self.ps)
        if self.open[which] is not None:
            self.send(which)

    @rule(number=st.integers(-50, 50))
    def assign(self, number):
        self.want = np.full(SIZE, number, "f4")
        update = [Update(KEY, ASSIGN, 0, 1)]
        self.ps.ask(Push(SESSION, -1, 0, 0, update, (self.want.copy(),)))

    @rule(row=st.integers(0, SIZE - 1))
    def scatter(self, row):
        self.want = self.want.copy()
        self.want[row] += 1
        update, rows = [Update(KEY, SPARSE, 0, 2)], (np.array([row]), np.ones(1, "f4"))
        self.ps.ask(Push(SESSION, -1, 0, 0, update, rows))

    @rule()
    def read(self):
        self.leases.append(self.ps.read())

    @rule()
    def forget(self):
        self.leases.clear()

    @invariant()
    def nothing_is_lost_or_twice(self):
        np.testing.assert_array_equal(self.ps.value, self.want)

    @invariant()
    def readers_see_no_change(self):
        for seen, copy in self.leases:
            np.testing.assert_array_equal(seen, copy)

    @invariant()
    def memory_is_bounded(self):
        assert self.ps.pool.statistics()["leases"] <= 3 + 1 + len(self.leases)


TestFolding = Folding.TestCase
TestFolding.settings = examples(60, stateful_step_count=40)
