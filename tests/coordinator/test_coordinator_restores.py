"""Parameter servers that come back empty and are filled again, or not."""

import asyncio
import contextlib
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from coordinator_fakes import good

from zstrat.errors import DataLossError, InvalidArgumentError, PSUnavailableError
from zstrat.ps import PsClient
from zstrat.variables import VariableSpec
from zstrat.wire import OpenSession, Outcome, StepRun, UpdateOp


class Point:
    """A checkpoint; ``on_fill`` is called on the loop when servers are filled."""

    def __init__(self, path="ckpt-1", variables=(), on_check=None, on_fill=None):
        self.path, self.variables = path, frozenset(variables)
        self.optimizers, self.lacks = frozenset(), []
        self.places, self.rounds = {}, {}
        self.on_check, self.on_fill = on_check, on_fill
        self.fills = []

    async def check(self):
        if self.on_check:
            self.on_check()

    async def fill(self, client):
        assert isinstance(client, PsClient)
        self.fills.append(client.session)
        if self.on_fill:
            await self.on_fill()


@pytest.fixture
def recovering(make_world):
    def make(timeout=3600.0, reconnect=0.0):
        world = make_world(ps=2, workers=2)
        world.reconnect = reconnect
        world.connect()
        world.session.recover(timeout)
        return world

    return make


@pytest.fixture
def world(recovering):
    return recovering()


def _remember(world, point):
    restores = world.session.restores
    cut = world.on_loop(lambda: world.session.cluster.renewal.ended_steps)
    asyncio.run(world.session.remember(point, cut, restores))


async def _awaited(work):
    return await work


def _lose(world, ps):
    """Starts the server again, and waits until the program knows that it was lost."""
    world.on_loop(ps.kill)
    recovery = world.session.cluster.recovery
    world.until(lambda: recovery.is_under_way)
    world.on_loop(ps.come_back)


def _settle(world):
    """Waits until the servers are filled, or nobody tries any more."""

    async def over():
        with contextlib.suppress(PSUnavailableError):
            await world.session.cluster.recovery.over()

    world.session.run(over(), "the test")


def test_steps_under_way_run_again_in_a_session_of_their_own(world):
    coordinator, point = world.coordinator(closures_in_flight=2), Point()
    for _ in range(3):
        coordinator.schedule(good)
    coordinator.join()
    _remember(world, point)
    kept = coordinator.schedule(good)
    assert kept.fetch() == 1
    values = world.held(coordinator, 4)
    first = world.session.session
    held = sorted(step for worker in world.workers for *_, step in worker.queue)
    ran = [len(worker.ran) for worker in world.workers]
    zombie = world.workers[0]
    begun = [(step, Outcome.OK, jnp.float32(5)) for *_, step in zombie.queue]
    zombie.queue.clear()  # it works on these, and does not hear that they are dropped
    _lose(world, world.ps[1])
    _settle(world)
    stale = zombie.sessions
    zombie.sessions = [OpenSession(first, 0, 2, [], 0, False)]
    world.on_loop(zombie.tell, begun)
    zombie.sessions, zombie.described = stale, []
    world.on_loop(world.release)
    assert [value.fetch() for value in values] == [1] * 4
    coordinator.join()
    metrics = coordinator.metrics()
    assert (metrics["ps_restores"], metrics["steps_lost"]) == (1, 1)
    assert metrics["scheduled_closures"] == 8
    assert kept.fetch() == 1, "what was fetched stays"
    assert point.fills == [world.session.session] != [first]
    for task in (*world.ps, *world.workers):
        assert [opened.session for opened in task.sessions][-1] == point.fills[0]
    again = [
        step
        for worker, before in zip(world.workers, ran, strict=True)
        for step, _ in worker.ran[before:]
    ]
    assert sorted(again) == held
    # The servers of the new session know which steps are over, and no other.
    fence = world.ps[0].fences[-1]
    assert fence.over == [StepRun(0, 5)]


def test_a_server_that_was_only_away_is_not_filled(world):
    coordinator, point = world.coordinator(), Point()
    _remember(world, point)
    world.on_loop(world.ps[0].kill)
    recovery = world.session.cluster.recovery
    world.until(lambda: recovery.is_under_way)
    value = coordinator.schedule(good)
    world.on_loop(world.ps[0].come_back, same=True)
    assert value.fetch() == 1
    coordinator.join()
    assert point.fills == []
    assert coordinator.metrics()["ps_restores"] == 0
    _lose(world, world.ps[0])
    coordinator.schedule(good)
    coordinator.join()
    assert len(point.fills) == 1, "the next loss is another one"


def test_without_a_checkpoint_every_call_says_what_to_do(world, coordinator):
    _lose(world, world.ps[1])
    _settle(world)
    words = r"/job:ps/task:1.*CheckpointManager\.save"
    calls = (
        coordinator.join,
        lambda: coordinator.schedule(good),
        lambda: world.read([]),
    )
    for call in calls * 2:
        with pytest.raises(PSUnavailableError, match=words) as raised:
            call()
        assert raised.value.lost


def test_a_server_that_does_not_come_back_in_time_is_named(recovering):
    world = recovering(timeout=0.05)
    coordinator = world.coordinator()
    _remember(world, Point())
    value = coordinator.schedule(good)
    assert value.fetch() == 1
    world.on_loop(world.ps[0].kill)
    _settle(world)
    for _ in range(2):
        words = r"/job:ps/task:0.*ps_wait_timeout=0\.05"
        with pytest.raises(PSUnavailableError, match=words) as raised:
            coordinator.join()
        assert not raised.value.lost
    world.on_loop(world.ps[0].come_back, same=True)
    world.until(lambda: world.session.cluster.outage_error is None)
    assert coordinator.schedule(good).fetch() == 1, "a cut line is mended, as always"


def test_a_checkpoint_that_lacks_a_variable_is_of_no_use(world, coordinator):
    spec = VariableSpec(5, "late", (2,), "float32", 0, True)

    async def create():
        world.session.cluster.recovery.inventory.created([spec])

    _remember(world, Point("ckpt-7"))
    world.session.run(create(), "the test")
    _lose(world, world.ps[0])
    _settle(world)
    with pytest.raises(PSUnavailableError, match=r"ckpt-7.*'late'"):
        coordinator.join()


def test_a_damaged_checkpoint_is_left_out_for_the_one_before(world, caplog):
    coordinator, older = world.coordinator(), Point("ckpt-1")

    def damaged():
        raise DataLossError("part-0", "a", "a bit flipped")

    _remember(world, older)
    for _ in range(5):
        coordinator.schedule(good)
    coordinator.join()
    _remember(world, Point("ckpt-2", on_check=damaged))
    _lose(world, world.ps[0])
    coordinator.schedule(good)
    coordinator.join()
    assert len(older.fills) == 1
    assert coordinator.metrics()["steps_lost"] == 5
    assert "ckpt-2 is skipped: " in caplog.text


def test_another_loss_while_they_are_filled_fills_them_once_more(world, coordinator):

    async def lose_another():
        if len(point.fills) == 1:
            world.ps[0].kill()
            world.ps[0].come_back()
            raise PSUnavailableError("/job:ps/task:0", "killed")

    point = Point(on_fill=lose_another)
    _remember(world, point)
    _lose(world, world.ps[1])
    assert coordinator.schedule(good).fetch() == 1
    assert len(set(point.fills)) == 2, "each time in a session of its own"
    assert coordinator.metrics()["ps_restores"] == 1
    assert {ps.session for ps in world.ps} == {point.fills[1]}


def test_what_cannot_be_filled_is_told_and_stays_so(world, coordinator):

    async def refused():
        raise InvalidArgumentError("no such slot")

    point = Point(on_fill=refused)
    _remember(world, point)
    _lose(world, world.ps[0])
    _settle(world)
    for call in (coordinator.join, lambda: world.read([])) * 2:
        with pytest.raises(PSUnavailableError):
            call()
    assert len(point.fills) == 5
    world.on_loop(world.ps[1].kill)
    world.on_loop(world.ps[1].come_back, same=True)
    with pytest.raises(PSUnavailableError):
        coordinator.join()


@pytest.mark.parametrize("same", [False, True])
def test_an_update_of_the_program_has_its_effect_once(world, same):
    world.coordinator()
    _remember(world, Point())
    first, second = world.ps
    second.reads = False  # its answer is on the way when it is lost
    specs = [VariableSpec(5 + i, "v", (2,), "float32", i, True) for i in range(2)]
    updates = [(spec, UpdateOp.ASSIGN, 0, [np.ones(2, "f4")]) for spec in specs]

    async def begin():
        return world.session.portal.loop.create_task(
            world.session.servers.update(updates)
        )

    updating = world.session.run(begin(), "the test")
    world.until(lambda: second.pushes)
    before = world.session.session
    second.reads = True
    world.on_loop(second.kill)
    world.until(lambda: world.session.cluster.recovery.is_under_way)
    world.on_loop(second.come_back, same=same)
    world.session.run(_awaited(updating), "the test")
    of_first = [(push.session, push.step) for push in first.pushes]
    of_second = [(push.session, push.step) for push in second.pushes]
    if same:  # sent again under its name, where nobody knows whether it arrived
        assert of_first == [(before, of_first[0][1])]
        assert of_second == of_first * 2
    else:  # the restored values have nothing of it
        assert [session for session, _ in of_first] == [before, world.session.session]
        assert of_second == of_first


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_what_broke_waits_until_it_is_known_who_came_back(recovering, same, again):
    """Work that must not be done twice is repeated if a restore has undone it."""
    world, tries = recovering(reconnect=3600.0), []
    _remember(world, Point())
    cluster, ps = world.session.cluster, world.ps[0]

    async def ask():
        tries.append(cluster.restores)
        if len(tries) == 1:
            ps.kill()
            asyncio.get_running_loop().call_soon(partial(ps.come_back, same=same))
            raise PSUnavailableError("/job:ps/task:0", "its connection broke")

    is_repeated = again or not same
    refused = pytest.raises(PSUnavailableError)
    with contextlib.nullcontext() if is_repeated else refused:
        world.session.run(cluster.through(ask, again=again), "the test")
    assert tries == ([0, 0 if same else 1] if is_repeated else [0])


def test_a_coordinator_that_is_made_meanwhile_waits_as_well(world):
    point = Point()
    _remember(world, point)
    world.on_loop(world.ps[0].kill)
    world.until(lambda: world.session.cluster.recovery.is_under_way)
    coordinator = world.coordinator()
    value = coordinator.schedule(good)
    world.on_loop(world.ps[0].come_back)
    assert value.fetch() == 1
    assert len(point.fills) == 1


def test_the_session_may_be_closed_while_a_server_is_awaited(world, coordinator):
    world.on_loop(world.ps[0].kill)
    world.until(lambda: world.session.cluster.recovery.is_under_way)
    value = coordinator.schedule(good)
    world.session.close()
    assert value.error is not None
