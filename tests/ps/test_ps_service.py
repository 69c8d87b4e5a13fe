"""The service driven by messages: turns, roles, sessions, faults. No sockets."""

import asyncio
import threading

import numpy as np
import optax
import pytest
from ps_callers import SESSION, caller
from ps_trees import binding
from ps_trees import message as bind_message

from zstrat.config import Settings, Timeouts
from zstrat.errors import (
    BusyError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.ps import PsService
from zstrat.ps import _requests as requests_module
from zstrat.testing import FakeRemote
from zstrat.wire import (
    Beat,
    BindOptimizer,
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    Done,
    Fetch,
    Inspect,
    Job,
    OpenSession,
    Pull,
    Pulled,
    Push,
    Pushed,
    Read,
    SessionOpened,
    Update,
    UpdateOp,
    VariableEntry,
)


class Loader:
    """Loads optimizers by name; ``gate`` holds the compute thread up meanwhile."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, code: bytes) -> object:
        assert self.gate.wait(100), "the test never opened the gate"
        match code:
            case b"sgd":
                return optax.sgd(0.5)
            case b"global":
                return optax.clip_by_global_norm(1.0)
            case _:
                raise KeyError(code.decode())


class Rig:
    def __init__(self, **timeouts):
        self.loader, self.left, self.now = Loader(), [], 100.0
        self.service = PsService(
            load_code=self.loader,
            settings=Settings(timeouts=Timeouts(**timeouts)),
            task="/job:ps/task:0",
            incarnation=5,
            on_exit=lambda: self.left.append(True),
            clock=lambda: self.now,
        )
        self.chief, self.worker = caller(), caller(Job.WORKER, 8)

    def open(self) -> None:
        opened = self.service.handle(self.chief, OpenSession(SESSION, 0, 1, []))
        assert opened == SessionOpened("cpu", 1, resumed=False, origin=SESSION)
        values = tuple(np.zeros(4, "f4") for _ in range(3))
        entries = [VariableEntry(key, f"v{key}", True, False) for key in range(3)]
        assert self.ask(CreateVariables(SESSION, entries, values)) == Done()

    def ask(self, message, peer=None):
        return self.service.handle(peer or self.chief, message)

    def held_up(self) -> asyncio.Future:
        """The compute thread is busy with optimizer 9 until the gate opens."""
        self.loader.gate.clear()
        created = self.ask(CreateOptimizer(SESSION, 9, "sgd", b"sgd"))
        self.ask(tell(9))
        return created


@pytest.fixture
async def rig():
    rig = Rig()
    rig.open()
    yield rig
    rig.loader.gate.set()
    await rig.service.drain()


def tell(optimizer: int) -> BindOptimizer:
    """That plain descent moves all variables."""
    tree = {f"v{key}": ((key,), (4,), "f4") for key in range(3)}
    return bind_message(SESSION, optimizer, binding(optax.sgd(0.5), tree))


def add(*keys: int, step: int = -1, value: float = 1.0, session: int = SESSION) -> Push:
    updates = [Update(key, int(UpdateOp.ADD), 0, 1) for key in keys]
    return Push(
        session, step, 0, 0, updates, tuple(np.full(4, value, "f4") for _ in keys)
    )


def descend(*keys: int, optimizer: int = 9) -> Push:
    updates = [Update(key, int(UpdateOp.OPTIMIZE), optimizer, 1) for key in keys]
    return Push(SESSION, -1, 0, 0, updates, tuple(np.ones(4, "f4") for _ in keys))


def pull(*keys: int, known: int = -1, session: int = SESSION) -> Pull:
    return Pull(session, [Read(key, known) for key in keys])


async def test_small_requests_are_answered_on_the_spot(rig):
    assert rig.ask(add(0, 1, step=1), rig.worker) == Pushed(True, [1, 1])
    assert rig.ask(add(0, 1, step=1), rig.worker) == Pushed(False, [1, 1])
    pulled = rig.ask(pull(0, 2), rig.worker)
    assert isinstance(pulled, Pulled)
    assert pulled.versions == [1, 0]
    assert [array.tolist() for array in pulled.arrays] == [[1] * 4, [0] * 4]
    assert rig.ask(pull(0, known=1)) == Pulled([1], ())
    assert rig.ask(DeleteVariables(SESSION, [1])) == Done()
    with pytest.raises(NotFoundError):
        rig.ask(pull(1))


async def test_nobody_waits_for_what_others_compile_and_all_who_must_keep_their_order(
    rig,
):
    loading = rig.held_up()
    first = rig.ask(descend(0))
    second = rig.ask(add(0, 1, value=10), rig.worker)
    third = rig.ask(pull(0, 1), rig.worker)
    fourth = rig.ask(descend(1))
    assert rig.ask(add(2)) == Pushed(True, [1])
    assert rig.ask(pull(2)).arrays[0].tolist() == [1] * 4
    assert not any(later.done() for later in (loading, first, second, third, fourth))
    rig.loader.gate.set()
    async with asyncio.timeout(60):
        assert await loading == Done()
        assert await first == Pushed(True, [1])
        assert await second == Pushed(True, [2, 1])
        pulled = await third
        assert [array[0] for array in pulled.arrays] == [9.5, 10]
        assert await fourth == Pushed(True, [2])
    assert rig.ask(pull(1)).arrays[0][0] == 9.5
    assert rig.service.statistics()["waiting"] == 0


async def test_large_pushes_and_creations_go_to_the_thread(rig, monkeypatch):
    monkeypatch.setattr(requests_module, "INLINE", 8)
    entry = VariableEntry(5, "large", True, False)
    creating = rig.ask(CreateVariables(SESSION, [entry], (np.ones(100),)))
    pushing = rig.ask(
        Push(SESSION, 3, 0, 0, [Update(5, int(UpdateOp.ADD), 0, 1)], (np.ones(100),))
    )
    again = rig.ask(
        Push(SESSION, 3, 0, 0, [Update(5, int(UpdateOp.ADD), 0, 1)], (np.ones(100),))
    )
    pulling = rig.ask(pull(5))
    async with asyncio.timeout(100):
        assert await creating == Done()
        assert await pushing == Pushed(True, [1])
        assert await again == Pushed(False, [1])
        assert ((await pulling).arrays[0] == 2).all()


async def test_a_retry_that_pushes_other_variables_waits_for_the_first_try(
    rig, monkeypatch
):
    rig.held_up()
    updates = [Update(0, int(UpdateOp.OPTIMIZE), 9, 1)]
    first = rig.ask(Push(SESSION, 4, 0, 0, updates, (np.ones(4, "f4"),)))
    retry = rig.ask(add(1, step=4), rig.worker)
    rig.loader.gate.set()
    async with asyncio.timeout(60):
        assert (await first).applied
        assert await retry == Pushed(False, [0])


async def test_what_fails_on_the_thread_frees_its_names(rig):
    broken = rig.ask(CreateOptimizer(SESSION, 1, "unknown", b"unknown"))
    clips = rig.ask(CreateOptimizer(SESSION, 2, "global", b"global"))
    other = rig.ask(tell(2))
    unfit = rig.ask(descend(0, optimizer=1))
    async with asyncio.timeout(60):
        with pytest.raises(KeyError, match="unknown"):
            await broken
        assert await clips == Done()
        with pytest.raises(InvalidArgumentError, match="'global'"):
            await other
        with pytest.raises(NotFoundError):
            await unfit
    assert rig.ask(add(0)) == Pushed(True, [1])
    assert rig.service.statistics()["failed"] == 3


@pytest.mark.parametrize("role", list(Job))
async def test_every_role_may_do_what_is_its_own_and_no_more(rig, role):
    peer = caller(role)
    may = {
        Job.CHIEF: {
            OpenSession,
            CreateVariables,
            DeleteVariables,
            CreateOptimizer,
            BindOptimizer,
            Pull,
            Push,
        },
        Job.WORKER: {BindOptimizer, Pull, Push},
        Job.EVALUATOR: {Pull},
    }.get(role, set())
    some = [
        OpenSession(SESSION, 0, 1, []),
        CreateVariables(SESSION, [], ()),
        DeleteVariables(SESSION, []),
        pull(0),
        add(0),
        tell(9),
    ]
    opened = rig.held_up()
    rig.loader.gate.set()
    assert await opened == Done()
    for message in some:
        if type(message) in may:
            rig.ask(message, peer)
        else:
            with pytest.raises(
                PermissionDeniedError, match=f"takes .* from chief.*{role}:0"
            ):
                rig.ask(message, peer)
    if role is not Job.CHIEF:
        with pytest.raises(PermissionDeniedError):
            rig.ask(CreateOptimizer(SESSION, 1, "sgd", b"sgd"), peer)
        with pytest.raises(PermissionDeniedError):
            rig.ask(CloseSession(SESSION, True), peer)
    assert rig.ask(Inspect(), peer).values["task"] == "/job:ps/task:0"


@pytest.mark.parametrize("message", [Fetch(SESSION, 1), Beat(True), Done()])
async def test_what_a_parameter_server_does_not_answer_is_refused(rig, message):
    with pytest.raises(ProtocolError):
        rig.ask(message)


async def test_a_session_ends_with_its_coordinator_and_leaves_nothing_behind(rig):
    rig.ask(add(0, step=1))
    stranger = FakeRemote(Job.CHIEF, 99, pid=2)
    with pytest.raises(BusyError):
        assert not rig.ask(OpenSession(99, 0, 1, []), stranger).resumed
    rig.service.lost(rig.chief, "silent")
    assert rig.ask(pull(0), rig.worker).versions == [1]
    assert rig.service.statistics()["owner_alive"] is False
    rig.ask(OpenSession(99, 0, 1, []), stranger)
    with pytest.raises(StaleSessionError):
        rig.ask(add(0), rig.worker)
    with pytest.raises(NotFoundError):
        rig.ask(pull(0, session=99))


async def test_rates_are_those_of_the_session(rig):
    for _ in range(100):
        rig.ask(pull(0))
    rig.service.lost(rig.chief, "silent")
    rig.now += 60
    rig.ask(OpenSession(99, 0, 1, []), FakeRemote(Job.CHIEF, 99, pid=2))
    rig.now += 1
    assert rig.service.telemetry()["rates"]["pulls_per_s"] == 0


async def test_the_same_coordinator_comes_back_to_what_it_had(rig):
    rig.ask(add(0, step=1))
    back = caller()
    assert rig.ask(OpenSession(SESSION, 0, 1, []), back).resumed
    rig.service.lost(rig.chief, "its old connection timed out")
    assert rig.ask(add(0, step=1), back) == Pushed(False, [1])


async def test_what_computes_when_the_session_ends_is_not_applied_to_the_next(rig):
    loading = rig.held_up()
    waiting = rig.ask(descend(0))
    rig.ask(CloseSession(SESSION, False))
    rig.ask(OpenSession(SESSION, 0, 1, []))
    entry = VariableEntry(2, "new", True, False)
    rig.ask(CreateVariables(SESSION, [entry], (np.zeros(4, "f4"),)))
    rig.loader.gate.set()
    async with asyncio.timeout(60):
        with pytest.raises(StaleSessionError):
            await loading
        with pytest.raises(NotFoundError):
            await waiting
    assert rig.service.statistics()["optimizers"] == 0


async def test_close_with_exit_says_so_once(rig):
    with pytest.raises(StaleSessionError):
        rig.ask(CloseSession(3, True))
    assert rig.left == []
    assert rig.ask(CloseSession(SESSION, True)) == Done()
    assert rig.ask(CloseSession(SESSION, True)) == Done()
    assert rig.left == [True]
    assert rig.service.statistics()["variables"] == 0


async def test_a_close_that_comes_late_ends_nothing_that_was_opened_since(rig):
    """The coordinator has left by one connection and come back by another one, which a
    server that was frozen meanwhile hears first."""
    back = caller()
    assert rig.ask(OpenSession(SESSION, 0, 1, [], sent=3.0), back).resumed
    with pytest.raises(StaleSessionError):
        rig.ask(CloseSession(SESSION, True, sent=2.0))
    rig.service.lost(rig.chief, "it left")
    assert rig.left == []
    assert rig.ask(add(0, step=1), back) == Pushed(True, [1])
    assert rig.ask(CloseSession(SESSION, False, sent=4.0), back) == Done()
    with pytest.raises(StaleSessionError):
        rig.ask(add(0, step=2), back)


async def test_drain_finishes_what_was_accepted_and_refuses_the_rest():
    before = set(threading.enumerate())
    rig = Rig()
    rig.open()
    loading = rig.held_up()
    waiting = rig.ask(descend(0))
    draining = asyncio.ensure_future(rig.service.drain())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        rig.ask(descend(0))
    with pytest.raises(UnavailableError):
        rig.ask(OpenSession(SESSION, 0, 1, []))
    rig.loader.gate.set()
    async with asyncio.timeout(60):
        assert await draining is True
    assert loading.done()
    assert await waiting == Pushed(True, [1])
    assert set(threading.enumerate()) <= before


async def test_drain_does_not_wait_for_ever():
    rig = Rig(drain=0.01)
    rig.open()
    loading = rig.held_up()
    async with asyncio.timeout(100):
        assert await rig.service.drain() is False
    assert not loading.done()
    rig.loader.gate.set()
    async with asyncio.timeout(60):
        await loading


async def test_a_caller_that_gives_up_changes_nothing(rig):
    rig.held_up()
    pushing = rig.ask(descend(0))
    pushing.cancel()
    rig.loader.gate.set()
    async with asyncio.timeout(60):
        assert (await rig.ask(pull(0))).versions == [1]


async def test_statistics_are_plain_and_complete(rig):
    rig.now += 12.5
    values = rig.ask(Inspect()).values
    assert values == {
        "job": "ps",
        "task": "/job:ps/task:0",
        "incarnation": 5,
        "uptime": 12.5,
        "session": SESSION,
        "session_name": "",
        "owner": "chief:0 (pid 1 on here)",
        "owner_alive": True,
        "optimizers": 0,
        "programs": 0,
        "waiting": 0,
        "failed": 0,
        "replication": {"role": "primary", "view": 0, "backup": ""},
        "variables": 3,
        "bytes": 48,
        "held_bytes": 48,
        "slot_bytes": 0,
        "pulls": 0,
        "reads": 0,
        "unchanged": 0,
        "rows": 0,
        "pushes": 0,
        "updates": 0,
        "duplicates": 0,
        "contributions": 0,
        "contribution_bytes": 0,
        "remembered_steps": 0,
        "low_water": 0,
        "table_rows": 0,
        "table_id_bytes": 0,
        "table_waiting": 0,
        "table_births": 0,
        "table_removed": 0,
        "table_refused": 0,
        "snapshots": 0,
        "undo_bytes": 0,
    }
