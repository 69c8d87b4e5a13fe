"""Parameter servers that are added and drained: what is asked of whom, and refused."""

import asyncio
import contextlib
from functools import partial

import pytest
from cancels import cancelled_everywhere
from coordinator_fakes import cancelled, good
from coordinator_stores import connected, drops, kinds, served
from coordinator_stores import world as world

from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PSUnavailableError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.wire import (
    AttachBackup,
    CloseSession,
    DetachBackup,
    Done,
    HostStore,
    MoveServer,
    OpenSession,
    PromoteBackup,
)


def test_all_of_a_server_moves_to_a_newcomer_and_it_is_let_go(world):
    servers, third = connected(world), world.newcomer(2)
    coordinator = world.coordinator()
    assert served(world) == ["/job:ps/task:0", "/job:ps/task:1"]
    assert servers.add("ps2:1") == 2
    assert kinds(third) == []  # no other serves two more than it
    closed = world.ps[0].heard(CloseSession)
    servers.drain("ps0:1")
    (copy,) = third.copies
    assert (kinds(third), kinds(copy)) == ([HostStore], [PromoteBackup])
    assert (kinds(world.ps[0]), drops(world.ps[0])[-1]) == ([AttachBackup], 0)
    asked = [order for order in third.orders if isinstance(order, HostStore)]
    views = [order.view for order in (*asked, *copy.orders)]
    assert views == sorted(set(views))
    assert world.moves() == [(0, "ps2.0.2:1")]
    assert [message.exit for message in closed] == [False]
    assert servers.addresses == {1: "ps1:1", 2: "ps2:1"}
    assert repr(servers) == "<zstrat parameter servers: 1 at ps1:1, 2 at ps2:1>"
    assert served(world) == ["/job:ps/task:2", "/job:ps/task:1"]
    assert coordinator.schedule(good).fetch() == 1
    assert coordinator.metrics()["stores_moved"] == 1
    assert "failovers" not in coordinator.metrics()


def test_what_is_no_new_parameter_server_is_not_added(world):
    servers = connected(world)
    for address in ("nowhere", "h:0", 7, "", "*:1", "0.0.0.0:1"):
        with pytest.raises(ValueError, match=r"HOST.*PORT"):
            servers.add(address)
    with pytest.raises(AlreadyExistsError):
        servers.add("ps1:1")
    with pytest.raises(InvalidArgumentError, match=r"\b1\b.*worker 0"):
        servers.add("worker0:1")
    with pytest.raises(AlreadyExistsError, match=r"ps 1.*\b1\b"):
        servers.add("ps2:1", index=1)
    with pytest.raises(InvalidArgumentError, match="index="):
        servers.add("ps2:1", index=-1)
    with pytest.raises(InvalidArgumentError, match="timeout="):
        servers.add("ps2:1", timeout=float("nan"))
    world.tasks["alias:1"] = world.ps[1]
    with pytest.raises(AlreadyExistsError, match="/job:ps/task:1"):
        servers.add("alias:1")
    third = world.newcomer(2)
    third.busy = True
    with pytest.raises(BusyError, match="ps:2 is taken"):
        servers.add("ps2:1")
    third.busy, third.alive = False, False
    with pytest.raises(DeadlineExceededError):
        servers.add("ps2:1", timeout=0.1)
    assert servers.addresses == {0: "ps0:1", 1: "ps1:1"}
    third.alive = True
    assert servers.add("ps2:1") == 2


def test_who_cannot_be_drained_is_named(world):
    servers = connected(world)
    with pytest.raises(NotFoundError, match="'ps7:1'"):
        servers.drain("ps7:1")
    with pytest.raises(NotFoundError, match=r"strategy\.workers\.remove"):
        servers.drain("worker0:1")
    servers.drain("ps0:1")
    with pytest.raises(NotFoundError, match="'ps0:1'"):
        servers.drain("ps0:1")
    with pytest.raises(InvalidArgumentError):
        servers.drain("ps1:1")
    assert servers.add("ps0:1") == 0  # with the number that it had
    servers.drain("ps1:1")
    assert served(world) == ["/job:ps/task:0"] * 2


@pytest.mark.parametrize("name", ["ps:0", "/job:ps/task:0"])
def test_a_ps_is_drained_by_its_name(world, name):
    servers = connected(world)
    for unknown in ("ps:7", "worker:0"):
        with pytest.raises(NotFoundError, match=r"ps0:1 \(ps:0\), ps1:1 \(ps:1\)"):
            servers.drain(unknown)
    servers.drain(name)
    assert servers.addresses == {1: "ps1:1"}
    assert served(world) == ["/job:ps/task:1"] * 2


def test_an_address_that_looks_like_a_name_is_an_address(world):
    servers, third = connected(world), world.newcomer(2)
    world.tasks["ps:1"] = third
    assert servers.add("ps:1") == 2
    servers.drain("ps:1")
    assert servers.addresses == {0: "ps0:1", 1: "ps1:1"}


def test_a_session_that_others_may_go_on_with_stays_where_they_look(world):
    servers = connected(world, resume="run", replicas=0)
    with pytest.raises(InvalidArgumentError):
        servers.add("ps2:1")
    servers.drain("ps0:1")
    assert served(world) == ["/job:ps/task:1"] * 2
    servers.add("ps0:1")
    assert sorted(served(world)) == ["/job:ps/task:0", "/job:ps/task:1"]


def test_who_does_not_take_a_store_is_passed_over(world):
    servers, third = connected(world), world.newcomer(2)
    third.refuses = (HostStore,)
    servers.add("ps2:1")
    servers.drain("ps0:1")
    assert served(world) == ["/job:ps/task:1"] * 2


@pytest.mark.parametrize("refused", [HostStore, PromoteBackup])
def test_a_store_that_nobody_takes_stays(world, refused, caplog):
    servers, coordinator = connected(world), world.coordinator()
    first, second = world.ps
    if refused is HostStore:
        second.refuses = (HostStore,)
    else:
        world.refusing = (PromoteBackup,)
    with pytest.raises(UnavailableError, match="/job:ps/task:0"):
        servers.drain("ps0:1")
    assert servers.addresses == {0: "ps0:1", 1: "ps1:1"}
    assert served(world)[0] == "/job:ps/task:0"
    assert coordinator.schedule(good).fetch() == 1
    assert (DetachBackup in kinds(first)) == (refused is PromoteBackup)
    second.refuses = world.refusing = ()
    servers.drain("ps0:1")
    assert served(world) == ["/job:ps/task:1"] * 2
    assert "no memory" in caplog.text


def test_a_move_that_takes_too_long_is_undone(world):
    servers = connected(world)
    first, second = world.ps
    first.slow = (AttachBackup,)
    with pytest.raises(DeadlineExceededError, match=r"\b0\.1\b.*\b0\b"):
        servers.drain("ps0:1", timeout=0.1)
    world.until(lambda: 0 in drops(second))
    assert kinds(first) == [AttachBackup, DetachBackup]
    assert served(world)[0] == "/job:ps/task:0"
    assert not world.moves()


def test_one_change_at_a_time_and_none_twice(world):
    servers, _ = connected(world), world.newcomer(2)
    world.ps[0].slow = (AttachBackup,)

    async def change():
        draining = asyncio.ensure_future(servers.drain_async("ps0:1"))
        await asyncio.to_thread(world.until, lambda: AttachBackup in kinds(world.ps[0]))
        with pytest.raises(BusyError):
            await servers.drain_async("ps0:1")
        adding = asyncio.ensure_future(servers.add_async("ps2:1"))
        await cancelled(draining)
        return await adding

    assert asyncio.run(change()) == 2
    assert servers.addresses == {0: "ps0:1", 1: "ps1:1", 2: "ps2:1"}
    assert served(world) == ["/job:ps/task:0", "/job:ps/task:1"]


def test_a_drain_waits_no_longer_for_another_change_than_for_its_stores(world):
    servers, _ = connected(world), world.newcomer(2)
    servers.add("ps2:1")
    world.ps[0].slow = (AttachBackup,)

    async def change():
        draining = asyncio.ensure_future(servers.drain_async("ps0:1"))
        await asyncio.to_thread(world.until, lambda: AttachBackup in kinds(world.ps[0]))
        with pytest.raises(DeadlineExceededError, match=r"\b0\.1\b"):
            await asyncio.to_thread(servers.drain, "ps1:1", timeout=0.1)
        await cancelled(draining)

    asyncio.run(asyncio.wait_for(change(), 10.0))
    servers.drain("ps1:1", timeout=10.0)
    assert servers.addresses == {0: "ps0:1", 2: "ps2:1"}


@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_change_that_is_cancelled_anywhere_was_made_or_not(world, replicas):
    servers = connected(world, replicas=replicas)
    world.newcomer(2)
    await servers.add_async("ps2:1")
    world.newcomer(3)
    coordinator = world.coordinator()
    for change, back in (
        (partial(servers.add_async, "ps3:1"), partial(servers.drain_async, "ps3:1")),
        (partial(servers.drain_async, "ps0:1"), partial(servers.add_async, "ps0:1")),
    ):
        before = servers.addresses
        async for was_cancelled in cancelled_everywhere(change):
            if was_cancelled:
                with contextlib.suppress(AlreadyExistsError, NotFoundError):  # made
                    await change()
            assert servers.addresses != before
            await back()
            assert servers.addresses == before
            assert await asyncio.to_thread(coordinator.schedule(good).fetch) == 1
    async for _ in cancelled_everywhere(servers.rebalance_async):
        await servers.rebalance_async()
    assert await asyncio.to_thread(coordinator.schedule(good).fetch) == 1


@pytest.mark.parametrize("silent", ["worker", "ps"])
def test_a_drain_that_is_cancelled_at_its_end_leaves_nothing_half_done(world, silent):
    """The worker does not say that it knows where stores are, or the ps no goodbye."""
    servers, _ = connected(world), world.newcomer(2)
    servers.add("ps2:1")
    task, kind = world.workers[0], MoveServer
    if silent == "ps":
        task, kind = world.ps[0], CloseSession
    handle, asked = task.handle, task.heard(kind, answers=False)

    async def change():
        draining = asyncio.ensure_future(servers.drain_async("ps0:1"))
        await asyncio.to_thread(world.until, lambda: asked)
        await cancelled(draining)

    asyncio.run(change())
    task.handle = handle
    world.on_loop(_answer_all, task)
    assert served(world) == ["/job:ps/task:2", "/job:ps/task:1"]
    if silent == "ps":
        assert servers.addresses == {1: "ps1:1", 2: "ps2:1"}
        assert servers.add("ps0:1") == 0
        with pytest.raises(StaleSessionError):  # it was frozen, and hears it late
            handle(asked[0])
    assert servers.addresses == {0: "ps0:1", 1: "ps1:1", 2: "ps2:1"}
    for address in ("ps2:1", "ps1:1"):  # it takes what they have
        servers.drain(address)
    assert served(world) == ["/job:ps/task:0"] * 2


def test_a_worker_that_does_not_hear_of_it_holds_a_drain_no_longer_than_is_said(world):
    servers, worker = connected(world), world.workers[0]
    handle = worker.handle
    worker.heard(MoveServer, answers=False)
    with pytest.raises(DeadlineExceededError):
        servers.drain("ps0:1", timeout=1.0)
    assert served(world) == ["/job:ps/task:1"] * 2
    worker.handle = handle
    world.on_loop(_answer_all, worker)
    servers.drain("ps0:1")
    assert servers.addresses == {1: "ps1:1"}


def _answer_all(task):
    for answer in task.link.requests:
        if not answer.done():
            answer.set_result(Done())


def test_a_source_that_is_soon_back_goes_on_to_move(world):
    servers, (source, target) = connected(world), world.ps
    cuts = iter(range(2))

    @target.wrap
    def cut(hosts, message):
        if isinstance(message, HostStore) and next(cuts, None) is not None:
            source.kill("no way", returns=30.0)
            back = partial(source.come_back, same=True)
            asyncio.get_running_loop().call_soon(back)
        return hosts(message)

    servers.drain("ps0:1", timeout=10.0)
    assert kinds(target).count(HostStore) == 3
    assert served(world) == ["/job:ps/task:1"] * 2


@pytest.mark.parametrize("last", ["its store", "the process"])
@pytest.mark.parametrize("phase", [HostStore, AttachBackup])
def test_a_source_that_is_lost_is_lost_as_without_moves(world, phase, last):
    """Whichever of its lines is lost last, and however far the copy is."""
    servers, coordinator = connected(world), world.coordinator()
    slow = world.ps[0] if phase is AttachBackup else world.ps[1]
    slow.slow = (phase,)

    async def lost():
        draining = asyncio.ensure_future(servers.drain_async("ps0:1"))
        await asyncio.to_thread(world.until, lambda: phase in kinds(slow))
        if last == "its store":
            world.ps[0].links.reverse()
        world.on_loop(world.ps[0].kill)
        with pytest.raises(PSUnavailableError, match="task:0"):
            await draining

    asyncio.run(lost())
    world.until(lambda: world.session.cluster.outage_error is not None)
    with pytest.raises(PSUnavailableError, match="task:0"):
        coordinator.schedule(good)
    with pytest.raises(PSUnavailableError):
        servers.drain("ps1:1")
    world.on_loop(world.ps[0].come_back, same=True)
    world.until(lambda: world.session.cluster.outage_error is None)
    assert coordinator.schedule(good).fetch() == 1


def test_a_source_that_is_lost_between_two_moves_is_lost(world):
    servers, (source, target) = connected(world, stores_per_ps=2), world.ps
    copies = len(target.copies)

    def lost_behind(promotes, message):
        answer = promotes(message)
        if isinstance(message, PromoteBackup):
            source.kill()
        return answer

    @target.wrap
    def hosted(hosts, message):
        answer = hosts(message)
        for copy in target.copies[copies:]:
            copy.wrap(lost_behind)
        return answer

    with pytest.raises(PSUnavailableError, match="task:2"):
        servers.drain("ps0:1", timeout=10.0)


class Checkpoint:
    """What stores are filled from, when the test lets it."""

    path, variables, optimizers, lacks = "ckpt-1", frozenset(), frozenset(), []
    places = {}  # noqa: RUF012
    rounds = {}  # noqa: RUF012

    def __init__(self):
        self.may_fill = asyncio.Event()

    async def check(self):
        pass

    async def fill(self, _):
        await self.may_fill.wait()


def test_a_first_change_that_meets_a_restore_starts_nothing_before_its_end(world):
    servers, _ = connected(world), world.newcomer(2)
    coordinator, (first, second) = world.coordinator(), world.ps[:2]
    world.session.recover(3600.0)
    cut = world.on_loop(lambda: world.session.cluster.renewal.ended_steps)
    asyncio.run(world.session.remember(point := Checkpoint(), cut, 0))
    greets = first.handle  # its process is awaited when another one is lost
    asked = first.heard(OpenSession, answers=False)

    async def change():
        adding = asyncio.ensure_future(servers.add_async("ps2:1"))
        await asyncio.to_thread(world.until, lambda: asked)
        world.on_loop(second.kill)
        first.handle = greets
        world.on_loop(second.come_back)
        with pytest.raises(PSUnavailableError):
            await adding

    asyncio.run(change())
    assert not world.replication.is_started
    world.on_loop(point.may_fill.set)
    assert coordinator.schedule(good).fetch() == 1
    assert servers.add("ps2:1") == 2
    servers.drain("ps0:1")
    assert served(world) == ["/job:ps/task:2", "/job:ps/task:1"]
