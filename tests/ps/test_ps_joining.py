"""Workers that are programs of their own join a session, and wait for what is created
in it. No sockets."""

import numpy as np
import optax
import pytest

from zstrat.config import Settings
from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    InvalidArgumentError,
    PermissionDeniedError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.ps import PsService, _joining
from zstrat.testing import FakeRemote
from zstrat.wire import (
    Awaited,
    AwaitedOptimizer,
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    Done,
    InitialEntry,
    InitializeVariables,
    Job,
    JoinSession,
    OpenSession,
    SessionOpened,
    VariableEntry,
)

SESSION = 7


def loaded(code):
    if code == b"sgd":
        return optax.sgd(0.5)

    def ones(shape, dtype, partition_shape, partition_offset):
        del shape, partition_offset
        return np.ones(partition_shape, dtype)

    return ones


class Rig:
    def __init__(self):
        self.service = PsService(
            load_code=loaded, settings=Settings(), task="/job:ps/task:0"
        )
        self.chief, self.worker = (
            FakeRemote(Job.CHIEF, SESSION),
            FakeRemote(Job.WORKER, 3),
        )

    def open(self, session=SESSION, chief=None):
        opening = OpenSession(session, 0, 0, [], is_shared=True)
        assert isinstance(
            self.service.handle(chief or self.chief, opening), SessionOpened
        )

    def ask(self, message, peer=None):
        return self.service.handle(peer or self.chief, message)

    def join(self, *keys, session=SESSION, optimizers=(), peer=None):
        variables = [Awaited(key, f"v{key}", "float32", [2]) for key in keys]
        named = [AwaitedOptimizer(number, "sgd") for number in optimizers]
        message = JoinSession(session, variables, named, 60.0)
        return self.service.handle(peer or self.worker, message)

    def create(self, *keys):
        entries = [VariableEntry(key, f"v{key}", True, False) for key in keys]
        arrays = tuple(np.zeros(2, "f4") for _ in keys)
        assert self.ask(CreateVariables(SESSION, entries, arrays)) == Done()


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    await rig.service.drain()


def joined(session=SESSION):
    return SessionOpened("cpu", 1, resumed=True, session=session)


async def test_a_session_is_waited_for(rig):
    first, second = rig.join(session=0), rig.join(session=SESSION)
    other = rig.join(session=9)
    rig.open()
    assert await first == await second == joined()
    assert not other.done()
    assert rig.join(session=0) == joined()
    rig.service.lost(rig.chief, "ended")
    rig.open(9, FakeRemote(Job.CHIEF, 9))
    assert await other == joined(9)


@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_session_that_its_program_does_not_share_is_not_joined(rig, replicas):
    """Whether that is asked before it is there, or later."""
    early = rig.join(session=0)
    rig.ask(OpenSession(SESSION, 0, 1, [], replicas=replicas))
    with pytest.raises(InvalidArgumentError, match="BetweenGraphStrategy"):
        await early
    for session in (0, SESSION):
        with pytest.raises(InvalidArgumentError):
            rig.join(session=session)
    rig.service.lost(rig.chief, "ended")
    waiting = rig.join(session=0)  # for another program
    other = FakeRemote(Job.CHIEF, 9)
    rig.open(9, other)
    assert await waiting == joined(9)


async def test_of_a_program_that_is_gone_nobody_waits_for_the_session(rig):
    rig.open()
    rig.service.lost(rig.chief, "ended")
    waiting = rig.join(session=0)
    # Who is in it stays in it.
    assert rig.join(session=SESSION) == joined()
    rig.open(8, FakeRemote(Job.CHIEF, 8))
    assert await waiting == joined(8)


async def test_variables_and_optimizers_are_waited_for(rig):
    rig.open()
    one, both, optimizer = rig.join(1), rig.join(1, 2), rig.join(optimizers=[4])
    assert not any(each.done() for each in (one, both, optimizer))
    rig.create(1)
    assert await one == joined()
    assert not both.done()
    entry = InitialEntry(2, "v2", True, False, "float32", [2], [2], [0])
    assert await rig.ask(InitializeVariables(SESSION, [entry], b"ones")) == Done()
    assert await both == joined()
    assert not optimizer.done()
    assert await rig.ask(CreateOptimizer(SESSION, 4, "sgd", b"sgd")) == Done()
    assert await optimizer == joined()
    assert rig.join(1, 2, optimizers=[4]) == joined()


async def test_who_waits_for_variables_of_a_session_that_ended_is_told(rig):
    rig.open()
    waiting = rig.join(1)
    rig.ask(CloseSession(SESSION, False))
    with pytest.raises(StaleSessionError):
        await waiting
    with pytest.raises(StaleSessionError):
        rig.join(1)
    rig.open(8, FakeRemote(Job.CHIEF, 8))
    with pytest.raises(StaleSessionError):
        rig.join(optimizers=[1])


async def test_only_workers_join(rig):
    rig.open()
    for role in (Job.CHIEF, Job.EVALUATOR, Job.OBSERVER):
        with pytest.raises(
            PermissionDeniedError, match="takes JoinSession from worker"
        ):
            rig.join(peer=FakeRemote(role, 3))


async def test_a_worker_that_is_lost_is_forgotten(rig, monkeypatch):
    monkeypatch.setattr(_joining, "MAX_WAITING_REQUESTS", 2)
    lost = FakeRemote(Job.WORKER, 5)
    first, second = rig.join(session=0, peer=lost), rig.join(session=0)
    with pytest.raises(BusyError):
        rig.join(session=0)
    rig.service.lost(lost, "ended")
    assert first.cancelled()
    third = rig.join(session=0)
    rig.open()
    assert await second == await third == joined()


async def test_who_waits_hears_that_the_server_ends(rig):
    waiting = rig.join(session=0)
    assert await rig.service.drain()
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        rig.join(session=0)


CHIEF, WORKER = FakeRemote(Job.CHIEF, SESSION), FakeRemote(Job.WORKER, SESSION)
HERE = SessionOpened("cpu", 1, resumed=True, session=SESSION)


@pytest.fixture
def ps(rig):
    """A server whose session is open: a worker that waits for variables gets those that
    it meant, or words."""
    rig.open(chief=CHIEF)
    return rig.service


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
    assert await ps.handle(CHIEF, CreateOptimizer(SESSION, 4, "sgd", b"sgd")) == Done()
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
