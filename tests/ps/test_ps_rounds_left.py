"""A program goes on with the rounds that a lost one has left on its servers."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from ps_callers import caller
from ps_copies import OPTIMIZERS, Copies
from ps_rounds import Server, close, contribute, contribution, create_messages, members
from ps_trees import message, of_values

from zstrat.errors import NotFoundError, PermissionDeniedError, StaleSessionError
from zstrat.wire import (
    AskRounds,
    AttachBackup,
    CloseSession,
    CreateOptimizer,
    Done,
    HeldRounds,
    Job,
    OpenSession,
    PromoteBackup,
    Pull,
    Read,
    RoundOrder,
)

ADAM, SLOWER = optax.adam(0.5), optax.adam(0.25)
CODES = {b"mine": ADAM, b"slower": SLOWER}
ZEROS = np.zeros(3, "f4")


class Left(Server):
    """A server of a session called "run", which one program after the other holds."""

    def __init__(self):
        super().__init__(ADAM)
        self.service.handle(self.chief, CloseSession(7, False))
        self.session = 7

    async def come(self, session):
        """The program before is lost, and this one opens its session."""
        self.service.lost(self.chief, "it was killed")
        self.session = session
        self.chief, self.worker = caller(incarnation=session), caller(Job.WORKER, 8)
        await super().ask(OpenSession(session, 0, 1, [], name="run"), self.chief)

    async def ask(self, asked, peer=None):
        return await super().ask(replace(asked, session=self.session), peer)

    async def held(self, after=0):
        return await self.ask(AskRounds(0, after))

    async def begin(self, session, code=b"mine"):
        """The program comes, and creates everything."""
        await self.come(session)
        self.transformation = CODES[code]
        for asked in create_messages({0: ZEROS}, self.transformation):
            changed = {"code": code} if isinstance(asked, CreateOptimizer) else {}
            assert await self.ask(replace(asked, **changed)) == Done()


@pytest.fixture
async def servers():
    made = [Left(), Left()]
    for each in made:
        await each.begin(11)
    yield made
    for each in made:
        assert await each.service.drain()


def moved(*steps):
    """What optax makes of updates: pairs of a transformation and a gradient."""
    value, state = ZEROS, ADAM.init(ZEROS)
    for transformation, gradient in steps:
        updates, state = jax.jit(transformation.update)(gradient, state)
        value = optax.apply_updates(value, updates)
    return value


async def test_what_waits_and_the_last_round_stay(servers):
    server, _ = servers
    assert (await server.held()).closed.optimizer == 0
    for step in (1, 2, 3):
        await server.contribute(step, {0: ZEROS})
    none = RoundOrder(1, -1, 0, [])
    waiting = [contribution(step) for step in (1, 2, 3)]
    assert await server.held() == HeldRounds(none, waiting, ())
    operands = (np.ones(1, "f4"),)  # for servers that have not closed it
    order = close(0, members(1), kept=[2], operands=operands)
    await server.ask(order)
    await server.come(12)
    held = HeldRounds(order.order, waiting[1:], operands)
    assert await server.held() == held
    await server.come(13)
    assert await server.held() == held
    assert (await server.held(after=1)).closed.optimizer == 0
    with pytest.raises(PermissionDeniedError):
        await server.ask(AskRounds(0, 0), server.worker)
    server.session = 12
    with pytest.raises(StaleSessionError):
        await server.held()


async def test_a_round_that_one_server_has_closed_is_the_same_on_the_others(servers):
    """With the optimizer of the program that has begun to close it."""
    ahead, behind = servers
    gradients = {step: np.float32([step, 1, -step]) for step in (1, 2, 5)}
    for server in servers:
        for step in (1, 2):
            await server.contribute(step, {0: gradients[step]})
    assert await ahead.ask(close(0, members(1), kept=[2], over=2)) == Done()
    for server in servers:
        await server.come(12)
    held = await ahead.held()
    assert (await behind.held()).closed.number == -1
    for server in servers:
        again = close(0, held.closed.members)
        assert await server.ask(again) == Done()
        assert await server.held() == held
        np.testing.assert_allclose(
            await server.value(), moved((ADAM, gradients[1])), rtol=1e-5
        )
        # From here on the optimizer is the next program's.
        for asked in create_messages({0: ZEROS}, SLOWER):
            changed = {"code": b"slower"} if isinstance(asked, CreateOptimizer) else {}
            server.transformation = SLOWER
            assert await server.ask(replace(asked, **changed)) == Done()
        await server.contribute(5, {0: gradients[5]})
        assert await server.ask(close(1, members(2, 5))) == Done()
        mean = (gradients[2] + gradients[5]) / 2
        wanted = moved((ADAM, gradients[1]), (SLOWER, mean))
        np.testing.assert_allclose(await server.value(), wanted, rtol=1e-5)
        assert await server.waiting() == 0


async def test_a_session_that_ends_leaves_no_rounds(servers):
    server, _ = servers
    await server.contribute(1, {0: ZEROS})
    await server.ask(CloseSession(0, False))
    await server.come(12)
    assert (await server.held()).closed.optimizer == 0


async def test_a_contribution_to_an_optimizer_that_is_not_there_is_refused(servers):
    server, _ = servers
    with pytest.raises(NotFoundError):
        await server.ask(contribute(1, {}, optimizer=5), server.worker)
    assert await server.waiting() == 0


async def test_a_copy_that_is_made_in_between_is_alike():
    """The optimizers are those of the program before, until the next one sends its."""
    rig = Copies("run")
    rig.shipped[b"quick"] = optax.sgd(0.5, momentum=0.9)
    values = {0: ZEROS}
    made, _, bound = create_messages(values, OPTIMIZERS[b"momentum"]())
    for asked in (made, CreateOptimizer(7, 1, "mine", b"momentum"), bound):
        await rig.ask(asked)
    for step in (1, 2):
        await rig.ask(contribute(step, {0: np.full(3, step, "f4")}))
    assert await rig.ask(close(0, members(1))) == Done()
    rig.primary.lost(rig.chief, "it was killed")
    rig.chief = caller(incarnation=12)
    await rig.ask(OpenSession(12, 0, 1, [], name="run", replicas=1))
    rig.host()
    await rig.ask(AttachBackup(12, 1, "nowhere:1", rig.incarnation))
    await rig.ask(CreateOptimizer(12, 1, "mine", b"quick"))
    bound = message(12, 1, of_values(rig.shipped[b"quick"], values))
    await rig.ask(bound)
    assert await rig.ask(replace(close(1, members(2)), session=12)) == Done()
    assert await rig.ask(PromoteBackup(12, 2), rig.backup) == Done()
    pulled = await rig.ask(Pull(12, [Read(0, -1)]), rig.backup)
    # 0.1 * 1, and then 0.5 * (2 + 0.9 * 1)
    np.testing.assert_allclose(pulled.arrays[0], np.full(3, -0.1 - 1.45), rtol=1e-6)
    held = await rig.ask(AskRounds(12, 0), rig.backup)
    assert held == HeldRounds(close(1, members(2)).order, [], ())
    await rig.close()


async def test_a_backup_makes_rounds_that_the_thread_closes(monkeypatch):
    """The thread merges the gradients, and then applies the update."""
    monkeypatch.setattr("zstrat.ps._requests.INLINE", 0)
    rig = Copies()
    made, _, bound = create_messages({0: ZEROS}, OPTIMIZERS[b"momentum"]())
    for asked in (made, CreateOptimizer(7, 1, "mine", b"momentum"), bound):
        await rig.ask(asked)
    await rig.attach()
    await rig.ask(contribute(1, {0: np.ones(3, "f4")}))
    assert await rig.ask(close(0, members(1))) == Done()
    await rig.promote()
    pulled = await rig.ask(Pull(7, [Read(0, -1)]), rig.backup)
    np.testing.assert_allclose(pulled.arrays[0], np.full(3, -0.1), rtol=1e-6)
    await rig.close()
