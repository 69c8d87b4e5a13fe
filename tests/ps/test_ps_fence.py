"""A fence: steps that are over have no effect any more, and what they had is told."""

import asyncio

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ps_callers import SESSION, Gated, caller
from ps_trees import message, of_values

from zstrat.errors import PermissionDeniedError, StaleSessionError
from zstrat.ps.store import Ledger
from zstrat.wire import (
    AskParts,
    CreateOptimizer,
    Exchange,
    Fence,
    Job,
    OpenSession,
    Pull,
    Push,
    PushPart,
    Read,
    StepRun,
    Update,
    UpdateOp,
    encode,
)

WORKER = caller(Job.WORKER, 8)
ADD = [Update(0, int(UpdateOp.ADD), 0, 1)]
LEARN = [Update(0, int(UpdateOp.OPTIMIZE), 9, 1)]


@pytest.fixture
async def rig():
    rig = Gated()
    rig.create({0: np.zeros(1, "f4")})
    yield rig
    rig.gate.set()
    await rig.service.drain()


def add(rig, step):
    push = Push(SESSION, step, 0, 0, ADD, (np.ones(1, "f4"),))
    return rig.ask(push, WORKER).applied


def value(rig):
    return rig.ask(Pull(SESSION, [Read(0, -1)])).arrays[0].item()


async def bind(rig):
    told = of_values(optax.sgd(0.5), {0: np.zeros(1, "f4")})
    await rig.answer(message(SESSION, 9, told))


async def fence(rig, low_water, over=(), asked=()):
    runs = [StepRun(*run) for run in over]
    answer = await rig.ask(Fence(SESSION, low_water, runs, list(asked)))
    return answer.applied


async def test_behind_a_fence_pushes_have_no_effect(rig):
    assert add(rig, 3)
    assert await fence(rig, 5, asked=[2, 3]) == [3]
    assert not add(rig, 2)
    exchange = Exchange(SESSION, 4, 0, 0, ADD, [Read(0, -1)], [], (np.ones(1, "f4"),))
    exchanged = rig.ask(exchange, WORKER)
    assert not exchanged.applied
    assert exchanged.arrays[0] == 1.0, "it may read on"
    part = PushPart(SESSION, 4, 0, 0, 1, ["a"], ADD, (np.ones(1, "f4"),))
    assert not rig.ask(part, WORKER).applied
    assert add(rig, 5)
    assert value(rig) == 2.0


async def test_steps_above_the_mark_are_over_one_by_one(rig):
    assert await fence(rig, 3, [(4, 6), (8, 9)]) == []
    assert [add(rig, step) for step in range(2, 10)] == [
        False, True, False, False, True, True, False, True,
    ]  # fmt: skip
    assert await fence(rig, 10) == []
    assert value(rig) == 4.0


async def test_it_waits_for_what_is_under_way(rig):
    rig.gate.clear()
    loading = rig.ask(CreateOptimizer(SESSION, 9, "sgd", b""))
    busy = rig.ask(CreateOptimizer(SESSION, 8, "sgd", b""))
    rig.gate.set()
    await asyncio.gather(loading, busy)
    await bind(rig)
    # An optimizer that was never used compiles first: that takes the thread.
    push = Push(SESSION, 1, 0, 0, LEARN, (np.ones(1, "f4"),))
    pushing = rig.ask(push, WORKER)
    fencing = asyncio.ensure_future(fence(rig, 2, asked=[1]))
    assert await fencing == [1]
    assert pushing.done(), "its effect was there when the fence was up"
    assert value(rig) == -0.5


async def test_a_push_that_waits_for_its_turn_is_late(rig):
    rig.gate.clear()
    loading = rig.ask(CreateOptimizer(SESSION, 9, "sgd", b""))
    # It needs the optimizer, which is being loaded.
    push = Push(SESSION, 1, 0, 0, LEARN, (np.ones(1, "f4"),))
    pushing = rig.ask(push, WORKER)
    assert not pushing.done()
    fencing = asyncio.ensure_future(fence(rig, 2, asked=[1]))
    await asyncio.sleep(0)
    rig.gate.set()
    assert await fencing == []
    await loading
    assert not (await pushing).applied
    assert value(rig) == 0.0


async def test_asking_for_parts_waits_for_what_is_under_way(rig):
    await rig.answer(CreateOptimizer(SESSION, 9, "sgd", b""))
    await bind(rig)
    part = PushPart(SESSION, 1, 0, 0, 1, ["a"], LEARN, (np.ones(1, "f4"),))
    pushing = rig.ask(part, WORKER)
    answer = await rig.ask(AskParts(SESSION, 1, 2, 0), WORKER)
    assert [tuple(entry) for entry in answer.parts] == [(0, ["a"])]
    assert pushing.done()
    with pytest.raises(StaleSessionError):
        rig.ask(part, WORKER)


async def test_what_is_told_of_many_parts_fits_into_messages(rig):
    await rig.answer(CreateOptimizer(SESSION, 9, "sgd", b""))
    await bind(rig)
    names = [["a" * 2000], ["ä" * 1000], 5 * [""]]
    for number in range(200):
        told = names[number % 3]
        part = PushPart(SESSION, 1, number, 0, 1, told, LEARN, (np.ones(1, "f4"),))
        await rig.answer(part, WORKER)
    found, first = [], 0
    while first or not found:
        answer = await rig.ask(AskParts(SESSION, 1, 2, first), WORKER)
        assert len(encode(answer)[0]) < 128 * 1024
        found += answer.parts
        first = answer.more
    assert [tuple(each) for each in found] == [(n, names[n % 3]) for n in range(200)]


async def test_only_the_coordinator_of_the_session_may_say_so(rig):
    with pytest.raises(PermissionDeniedError):
        rig.ask(Fence(SESSION, 5, [], []), WORKER)
    with pytest.raises(StaleSessionError):
        rig.ask(Fence(SESSION + 1, 5, [], []))
    assert add(rig, 1)


async def test_a_new_session_begins_without_one(rig):
    await fence(rig, 5, [(7, 9)])
    rig.service.lost(rig.chief, "it ended")
    later = caller(incarnation=SESSION + 1)
    rig.ask(OpenSession(SESSION + 1, 0, 1, []), later)
    assert rig.service.statistics()["low_water"] == 0


runs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@given(st.lists(runs, max_size=4), st.integers(0, 30), st.sets(st.integers(0, 30)))
def test_the_ledger_knows_what_is_over_and_what_was_applied(closed, mark, applied):
    ledger, over = Ledger(), set()
    for step in applied:
        ledger.record(step, 0)
    for some in closed:
        ledger.close_steps([StepRun(*run) for run in some])
        over |= {step for first, end in some for step in range(first, end)}
        assert {s for s in range(31) if ledger.is_duplicate(s, 1)} == over
    assert {s for s in range(31) if ledger.has_applied(s)} == applied
    ledger.raise_to(mark)
    known = over | set(range(mark))
    assert {s for s in range(31) if ledger.is_duplicate(s, 1)} == known
