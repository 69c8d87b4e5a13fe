"""A second strategy of one program takes the cluster over, unless there is work."""

import threading

import pytest
from coordinator_fakes import FakePs, FakeWorker, good

import zstrat.program as zs
from zstrat.cluster import ClusterSpec
from zstrat.coordinator import ClusterCoordinator, hold_session
from zstrat.errors import BusyError, ClosedError, DeadlineExceededError
from zstrat.transport import Portal


@zs.function(eager=True)
def fail():
    raise ValueError("it fell")


def numbers():
    return [1.0]


@zs.function(eager=True)
def draw(iterator):
    return next(iterator)


def test_the_newer_strategy_has_the_cluster_at_once(world, coordinator):
    strategy, session = world.strategy, world.session
    dataset = coordinator.create_per_worker_dataset(numbers)
    iterator = iter(dataset)
    value = coordinator.schedule(draw, args=(iterator,))
    assert value.fetch() == 1.0
    world.session = None
    newer = world.coordinator()
    assert newer.schedule(good).fetch() == 1
    assert all(len(task.sessions) == 2 for task in (*world.ps, *world.workers))
    assert value.fetch() == 1.0, "what is here stays here"
    uses = [
        lambda: coordinator.schedule(good),
        coordinator.join,
        coordinator.done,
        coordinator.cancel,
        lambda: iter(dataset),
        lambda: newer.schedule(draw, args=(iterator,)),
        lambda: session.run(session.servers.read([]), "reading variables"),
        lambda: ClusterCoordinator(strategy),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="coordinator_fakes"):
            use()
    coordinator.shutdown()
    session.close()
    assert newer.schedule(good).fetch() == 1


def dead_ps(world):
    world.ps.append(FakePs(world, 1))
    world.ps[1].alive = False
    world.tasks["ps1:1"] = world.ps[1]
    world.spec = ClusterSpec({**world.spec.as_dict(), "ps": ["ps0:1", "ps1:1"]})
    return pytest.raises(DeadlineExceededError, match=r"/job:ps/task:1.*\b1\b")


def dead_workers(world):
    for index in (2, 3):
        world.tasks[f"worker{index}:1"] = worker = FakeWorker(world, index)
        worker.alive = False
    jobs = {"ps": ["ps0:1"], "worker": {2: "worker2:1", 3: "worker3:1"}}
    world.spec = ClusterSpec(jobs)
    return pytest.raises(DeadlineExceededError, match=r"task:2.*task:3")


def gap(world):
    world.spec = ClusterSpec({**world.spec.as_dict(), "ps": {1: "ps0:1"}})
    return pytest.raises(ValueError, match="without gaps")


@pytest.mark.parametrize("fault", [dead_ps, dead_workers, gap])
def test_a_second_one_that_cannot_connect_leaves_the_first(world, coordinator, fault):
    first = world.session
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    with fault(world):
        world.connect(connect=0.2)
    assert world.session is first
    assert coordinator.schedule(draw, args=(iterator,)).fetch() == 1.0
    assert len(world.ps[0].sessions) == 1


def test_unfinished_work_keeps_it(world, coordinator):
    (value,) = world.held(coordinator)
    with pytest.raises(BusyError, match=r"\b1\b.*\b0\b.*strategy\.close"):
        world.connect()
    world.on_loop(world.release)
    assert value.fetch() == 1
    coordinator.join()
    world.session = None
    assert world.coordinator().schedule(good).fetch() == 1


def test_an_error_that_was_never_raised_is_logged(world, coordinator, caplog):
    world.on_loop(world.hold)
    coordinator.schedule(fail)
    value = coordinator.schedule(good)
    world.until(lambda: world.running == 2)
    world.on_loop(world.release)
    assert value.fetch() == 1
    world.connect()
    (words,) = (text for text in caplog.messages if "ValueError: it fell" in text)
    assert "step 1 (fail, scheduled at" in words


async def test_a_checkpoint_keeps_it(world):
    session = world.connect()
    async with session.at_rest():
        with pytest.raises(BusyError, match="coordinator_fakes"):
            world.connect()
    assert world.connect() is not session


def test_who_has_lost_a_parameter_server_has_nothing_to_finish(world, coordinator):
    world.on_loop(world.hold)
    coordinator.schedule(good)
    world.on_loop(world.ps[0].kill)
    world.until(lambda: coordinator._core.engine.outage_error)
    world.ps[0].born()
    world.ps[0].alive = True
    world.session = None
    for worker in world.workers:
        worker.held = False
    assert world.coordinator().schedule(good).fetch() == 1


def test_of_two_threads_one_is_told_of_the_other(world, monkeypatch, in_thread):
    world.ps[0].busy = True
    opening = threading.Event()
    run = Portal.run

    def told(portal, *args):
        opening.set()
        return run(portal, *args)

    monkeypatch.setattr(Portal, "run", told)
    connecting = in_thread(world.connect)
    assert opening.wait(100)
    with pytest.raises(BusyError, match="coordinator_fakes"):
        world.connect()
    world.ps[0].busy = False
    assert connecting.result(100) is world.session


def test_one_that_cannot_connect_does_not_stay_in_the_way(world):
    world.ps[0].alive = False
    with pytest.raises(TimeoutError):
        world.connect(connect=0.05, turn=0.0)
    world.ps[0].alive = True
    assert world.coordinator().schedule(good).fetch() == 1


def test_programs_that_share_parameter_servers_do_not_replace_each_other(world):
    def hold():
        return hold_session(world.spec, settings, make_link=world.make_link)

    settings = world.connect().settings
    world.session.close()
    first = hold()
    second = hold()
    assert first.portal.is_closed
    second.close()
