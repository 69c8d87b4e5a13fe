"""A server drops what a failed creation has left, and its numbers are free again."""

from __future__ import annotations

import asyncio

import numpy as np
import optax
import pytest
from ps_trees import binding, message

from zstrat.config import Settings
from zstrat.errors import NotFoundError, PermissionDeniedError, StaleSessionError
from zstrat.ps import PsService
from zstrat.testing import FakeRemote
from zstrat.wire import (
    CreateOptimizer,
    CreateVariables,
    Done,
    InitialEntry,
    InitializeVariables,
    Job,
    OpenSession,
    Pull,
    Pulled,
    Push,
    Read,
    Update,
    UpdateOp,
    VariableEntry,
    Withdraw,
)

SESSION = 7


CHIEF = FakeRemote(Job.CHIEF, SESSION)


def ones(shape, dtype, partition_shape, partition_offset):
    del shape, partition_offset
    return np.ones(partition_shape, dtype)


def loaded(code):
    return {
        b"adam": optax.adam(0.5),
        b"sgd": optax.sgd(0.5),
        b"ones": ones,
    }[code]


@pytest.fixture
async def ps():
    service = PsService(load_code=loaded, settings=Settings(), task="/job:ps/task:0")
    service.handle(CHIEF, OpenSession(SESSION, 0, 0, []))
    yield service
    await service.drain()


async def ask(ps, message):
    answer = ps.handle(CHIEF, message)
    return await answer if asyncio.isfuture(answer) else answer


async def create(ps, key, value):
    entry = VariableEntry(key, "v", True, False)
    arrays = (np.asarray(value, "f4"),)
    assert await ask(ps, CreateVariables(SESSION, [entry], arrays)) == Done()


async def value(ps, key):
    answer = await ask(ps, Pull(SESSION, [Read(key, -1)]))
    assert isinstance(answer, Pulled)
    return answer.arrays[0].tolist(), answer.versions[0]


async def test_what_is_there_goes_and_what_is_not_does_not_matter(ps):
    await create(ps, 1, [1, 1])
    await create(ps, 2, [2, 2])
    (_, before) = await value(ps, 2)
    assert await ask(ps, Withdraw(SESSION, [2, 3], [4])) == Done()
    with pytest.raises(NotFoundError):
        await value(ps, 2)
    assert (await value(ps, 1))[0] == [1, 1]
    # The key is another variable's now, and no version that anybody knows returns.
    await create(ps, 2, [3, 3])
    now, version = await value(ps, 2)
    assert (now, version > before) == ([3, 3], True)


async def test_what_is_still_being_made_goes_when_it_is_there(ps):
    entry = InitialEntry(5, "v", True, False, "float32", [2], [2], [0])
    making = ps.handle(CHIEF, InitializeVariables(SESSION, [entry], b"ones"))
    withdrawn = ps.handle(CHIEF, Withdraw(SESSION, [5], []))
    assert await making == await withdrawn == Done()
    with pytest.raises(NotFoundError):
        await value(ps, 5)


async def test_an_optimizer_makes_room_for_another_and_leaves_no_slots(ps):
    await create(ps, 1, [1, 1])

    async def optimize(transformation):
        told = binding(transformation, {"w": ((1,), (2,), "f4")})
        assert await ask(ps, message(SESSION, 9, told)) == Done()
        gradient = (np.ones(2, "f4"),)
        update = Update(1, UpdateOp.OPTIMIZE, 9, 1)
        await ask(ps, Push(SESSION, -1, 0, 0, [update], gradient))

    assert await ask(ps, CreateOptimizer(SESSION, 9, "adam", b"adam")) == Done()
    await optimize(optax.adam(0.5))
    (moved, _) = await value(ps, 1)
    assert ps.statistics()["slot_bytes"] > 0
    assert await ask(ps, Withdraw(SESSION, [], [9])) == Done()
    assert ps.statistics()["optimizers"] == 0
    assert ps.statistics()["slot_bytes"] == 0
    assert await ask(ps, CreateOptimizer(SESSION, 9, "sgd", b"sgd")) == Done()
    await optimize(optax.sgd(0.5))
    # Plain gradient descent: half of a gradient of one.
    np.testing.assert_allclose((await value(ps, 1))[0], np.subtract(moved, 0.5))


async def test_only_the_program_of_the_session_withdraws(ps):
    with pytest.raises(PermissionDeniedError):
        ps.handle(FakeRemote(Job.WORKER, SESSION), Withdraw(SESSION, [1], []))
    with pytest.raises(StaleSessionError):
        ps.handle(CHIEF, Withdraw(8, [1], []))
