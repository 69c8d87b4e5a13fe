"""A program goes on with the session that a lost one has left under a name."""

import numpy as np
import optax
import pytest
from ps_callers import Gated, caller
from ps_trees import message, of_values

from zstrat.errors import AlreadyExistsError, BusyError, StaleSessionError, ZstratError
from zstrat.wire import (
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    Done,
    Fence,
    Job,
    OpenSession,
    Pull,
    Push,
    Read,
    Update,
    UpdateOp,
    VariableEntry,
    Withdraw,
)

ZEROS, ONES = np.zeros((4, 2), "f4"), np.ones((4, 2), "f4")
ADAM = {b"adam": optax.adam(0.5), b"slower": optax.adam(0.25), b"sgd": optax.sgd(1.0)}


class Programs(Gated):
    """Programs that come one after the other to one server, each in a session of its
    own, which it calls "run"."""

    def __init__(self):
        super().__init__(ADAM)
        self.session = 0
        self.ask(CloseSession(7, False))

    async def come(self, session, name="run", origin=0):
        """The program before is lost, and this one opens its session."""
        if self.session:
            self.service.lost(self.chief, "it was killed")
        self.session, self.chief = session, caller(Job.CHIEF, session)
        opening = OpenSession(session, 0, 1, [], name=name, origin=origin)
        answer = self.ask(opening)
        return await answer if hasattr(answer, "__await__") else answer

    def new(self, key, name="w", value=ZEROS):
        entry = VariableEntry(key, name, True, False)
        return self.ask(CreateVariables(self.session, [entry], (value,)))

    async def push(self, step, op=UpdateOp.ADD, optimizer=0, session=None, key=1):
        update = Update(key, int(op), optimizer, 1)
        session = self.session if session is None else session
        return await self.answer(Push(session, step, 0, 0, [update], (ONES,)))

    async def optimizer(self, code=b"adam", name="mine"):
        await self.answer(CreateOptimizer(self.session, 1, name, code))
        told = of_values(ADAM[code], {1: ZEROS})
        await self.answer(message(self.session, 1, told))

    def value(self, key=1):
        return self.ask(Pull(self.session, [Read(key, -1)])).arrays[0]


@pytest.fixture
async def programs():
    made = Programs()
    yield made
    await made.service.drain()


async def test_values_stay_and_steps_are_counted_from_the_start(programs):
    first = await programs.come(11)
    assert (first.resumed, first.origin) == (False, 11)
    programs.new(1)
    assert (await programs.push(1)).applied
    next_ = await programs.come(12)
    assert (next_.resumed, next_.origin) == (True, 11)
    assert programs.new(1) == Done()  # the same again keeps what is there
    assert np.array_equal(programs.value(), ONES)
    assert (await programs.push(1)).applied  # its own first step
    assert not (await programs.push(1)).applied
    third = await programs.come(13)
    assert third.origin == 11
    assert np.array_equal(programs.value(), 2 * ONES)


async def test_what_the_lost_program_still_sends_is_refused(programs):
    await programs.come(11)
    programs.new(1)
    await programs.come(12)
    for asked in (Fence(11, 5, [], []), Pull(11, [Read(1, -1)])):
        with pytest.raises(StaleSessionError):
            programs.ask(asked)
    with pytest.raises(StaleSessionError):
        await programs.push(3, session=11)
    with pytest.raises(StaleSessionError):
        programs.ask(CloseSession(11, False))
    assert np.array_equal(programs.value(), ZEROS)


async def test_a_program_that_is_alive_keeps_its_session(programs):
    await programs.come(11)
    other = caller(Job.CHIEF, 12)
    with pytest.raises(BusyError):
        programs.ask(OpenSession(12, 0, 1, [], name="run"), other)
    again = programs.ask(OpenSession(11, 0, 1, [], name="run"))  # its line was cut
    assert (again.resumed, again.origin) == (True, 11)


@pytest.mark.parametrize("name", ["", "another"])
async def test_without_the_name_all_is_new(programs, name):
    await programs.come(11)
    programs.new(1)
    answer = await programs.come(12, name)
    assert (answer.resumed, answer.origin) == (False, 12)
    assert programs.service.statistics()["variables"] == 0
    assert programs.service.statistics()["session_name"] == name


async def test_a_session_anew_keeps_what_its_keys_are_counted_from(programs):
    await programs.come(11)
    await programs.come(12)
    programs.ask(CloseSession(12, False))  # as recovery does, to fill it again
    answer = await programs.come(13, origin=11)
    assert (answer.resumed, answer.origin) == (False, 11)
    assert (await programs.come(14)).origin == 11


async def test_a_step_that_is_computed_when_the_next_program_comes_is_none_of_its(
    programs,
):
    await programs.come(11)
    programs.new(1)
    programs.gate.clear()
    loading = programs.ask(CreateOptimizer(11, 2, "slow", b"sgd"))  # holds the thread
    large = np.zeros(2**21, "f4")
    creating = programs.new(2, "large", large)
    update = Update(2, int(UpdateOp.ADD), 0, 1)
    pushing = programs.ask(Push(11, 1, 0, 0, [update], (large + 1,)))
    programs.service.lost(programs.chief, "it was killed")
    programs.session, programs.chief = 12, caller(Job.CHIEF, 12)
    opening = programs.ask(OpenSession(12, 0, 1, [], name="run"))
    programs.gate.set()
    assert (await opening).resumed
    await loading
    with pytest.raises(StaleSessionError):  # its turn came when the session was over
        await pushing
    assert await creating == Done()
    assert (await programs.push(1)).applied


async def test_slots_go_on_under_the_optimizer_that_the_next_program_ships(programs):
    await programs.come(11)
    programs.new(1)
    await programs.optimizer()
    for step in (1, 2):
        await programs.push(step, UpdateOp.OPTIMIZE, 1)
    await programs.come(12)
    await programs.optimizer(b"slower")
    await programs.push(1, UpdateOp.OPTIMIZE, 1)
    value, state = ZEROS, ADAM[b"adam"].init(ZEROS)
    for code in (b"adam", b"adam", b"slower"):
        updates, state = ADAM[code].update(ONES, state)
        value = optax.apply_updates(value, updates)
    np.testing.assert_allclose(programs.value(), value, rtol=1e-6)


async def test_another_program_is_refused_and_changes_nothing(programs):
    await programs.come(11)
    programs.new(1, value=ONES)
    await programs.optimizer()
    await programs.push(1, UpdateOp.OPTIMIZE, 1)
    await programs.come(12)
    with pytest.raises(AlreadyExistsError, match=r"'w'.*'v'"):
        programs.new(1, "v")
    with pytest.raises(AlreadyExistsError):
        programs.new(1, value=np.zeros(4, "f4"))
    with pytest.raises(AlreadyExistsError, match="'mine'"):
        await programs.optimizer(name="yours")
    # What a creation that failed takes back is not what was there before it.
    assert programs.ask(Withdraw(12, [1], [1])) == Done()
    before = programs.value().copy()
    await programs.optimizer(b"sgd")
    with pytest.raises(ZstratError, match="'mine'"):
        await programs.push(1, UpdateOp.OPTIMIZE, 1)
    assert np.array_equal(programs.value(), before)
