"""A worker that waits for variables gets those that it meant, or words. No sockets."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from zstrat.config import Settings
from zstrat.errors import BusyError, DeadlineExceededError, InvalidArgumentError
from zstrat.ps import PsService, _joining
from zstrat.testing import FakeRemote
from zstrat.wire import (
    Awaited,
    AwaitedOptimizer,
    CreateOptimizer,
    CreateVariables,
    Done,
    Job,
    JoinSession,
    OpenSession,
    SessionOpened,
    VariableEntry,
)

SESSION = 7


CHIEF, WORKER = FakeRemote(Job.CHIEF, SESSION), FakeRemote(Job.WORKER, SESSION)
HERE = SessionOpened("cpu", 1, resumed=True, session=SESSION)


@pytest.fixture
async def ps():
    service = PsService(
        load_code=lambda code: optax.sgd(0.5),
        settings=Settings(),
        task="/job:ps/task:0",
    )
    service.handle(CHIEF, OpenSession(SESSION, 0, 0, [], is_shared=True))
    yield service
    await service.drain()


def create(ps, key, name, value):
    entry = VariableEntry(key, name, True, False)
    message = CreateVariables(SESSION, [entry], (np.asarray(value),))
    assert ps.handle(CHIEF, message) == Done()


def join(ps, *variables, optimizers=(), patience=60.0):
    named = [AwaitedOptimizer(*each) for each in optimizers]
    wishes = [Awaited(*each) for each in variables]
    return ps.handle(WORKER, JoinSession(SESSION, wishes, named, patience))


A = (1, "a", "float32", [2])


async def test_the_variable_that_was_meant_is_there(ps):
    create(ps, 1, "a", np.zeros(2, "f4"))
    assert join(ps, A) == HERE


@pytest.mark.parametrize(
    ("name", "value", "there"),
    [
        ("b", np.zeros(2, "f4"), r"variable 'b' \(float32\[2\]\)"),
        ("a", np.zeros(3, "f4"), r"variable 'a' \(float32\[3\]\)"),
        ("a", np.zeros((2, 1), "f4"), r"variable 'a' \(float32\[2, 1\]\)"),
        ("a", np.zeros(2, "i4"), r"variable 'a' \(int32\[2\]\)"),
    ],
)
async def test_another_variable_in_its_place_is_refused(ps, name, value, there):
    words = (
        r"/job:ps/task:0: this program creates variable 'a' \(float32\[2\]\) where "
        rf"the chief has created {there}: all programs .* in the same order"
    )
    waiting = join(ps, (9, "z", "float32", []), A)  # of which one is not there yet
    create(ps, 1, name, value)
    with pytest.raises(InvalidArgumentError, match=words):
        await waiting
    with pytest.raises(InvalidArgumentError, match=words):
        join(ps, A)


async def test_another_optimizer_in_its_place_is_refused(ps):
    waiting = join(ps, optimizers=[(4, "adam")])
    right = join(ps, optimizers=[(4, "sgd")])
    assert await ps.handle(CHIEF, CreateOptimizer(SESSION, 4, "sgd", b"")) == Done()
    assert await right == HERE
    with pytest.raises(InvalidArgumentError, match=r"'adam'.*'sgd'"):
        await waiting


async def test_who_waited_long_enough_hears_what_is_missing(ps, monkeypatch):
    create(ps, 1, "a", np.zeros(2, "f4"))
    monkeypatch.setattr(_joining, "MAX_WAITING_REQUESTS", 2)
    some = [A] + [(n, f"v{n}", "int32", []) for n in range(2, 8)]
    several = join(ps, *some, patience=0.0)
    optimizer = join(ps, optimizers=[(4, "sgd")], patience=0.0)
    with pytest.raises(BusyError):
        join(ps, *some)
    words = r"/job:ps/task:0.*'v2'.*\[\]"
    with pytest.raises(DeadlineExceededError, match=words):
        await several
    with pytest.raises(DeadlineExceededError, match="'sgd'"):
        await optimizer
    # They are forgotten, and others may wait.
    later = join(ps, *some)
    for n in range(2, 8):
        create(ps, n, f"v{n}", np.zeros((), "i4"))
    assert await later == HERE


async def test_a_chief_that_is_gone_is_called_so(ps):
    ps.lost(CHIEF, "ended")
    with pytest.raises(DeadlineExceededError):
        await join(ps, A, patience=0.0)


async def test_what_a_chief_that_is_gone_has_left_is_there_for_who_comes_later(ps):
    create(ps, 1, "a", np.zeros(2, "f4"))
    ps.lost(CHIEF, "ended")
    assert await ps.handle(WORKER, JoinSession(0, [], [], 0.0)) == HERE
    assert join(ps, A) == HERE


async def test_a_session_is_not_waited_for_longer_either(ps):
    message = JoinSession(SESSION + 1, [], [], 0.0)
    with pytest.raises(DeadlineExceededError):
        await ps.handle(WORKER, message)


@pytest.mark.parametrize("patience", [-1.0, float("nan"), float("inf"), 1e300])
async def test_any_patience_can_be_taken(ps, patience):
    waiting = join(ps, A, patience=patience)
    create(ps, 1, "a", np.zeros(2, "f4"))
    assert await waiting == HERE
