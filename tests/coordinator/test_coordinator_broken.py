"""Parameter servers that go, come back, and change hands; and hiccups on the way."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from coordinator_fakes import alone, good

from zstrat.coordinator import _outcomes
from zstrat.errors import BusyError, PSUnavailableError, StaleSessionError
from zstrat.variables import VariableSpec
from zstrat.wire import Outcome


def test_a_lost_ps_is_raised_for_as_long_as_it_is_gone(world, coordinator):
    (value,) = world.held(coordinator)
    ps = world.lose_ps()
    calls = (coordinator.join, coordinator.done, lambda: coordinator.schedule(good))
    for call in calls * 2:
        with pytest.raises(PSUnavailableError, match="/job:ps/task:0"):
            call()
    with pytest.raises(PSUnavailableError, match="/job:ps/task:0"):
        world.read([])
    assert value.error is not None
    world.on_loop(ps.come_back, same=True)
    world.on_loop(world.release)
    assert coordinator.schedule(good).fetch() == 1, "a cut line is mended"


def fetch(value):
    return value.fetch()


def await_it(value):
    async def awaited():
        return await value

    return asyncio.run(awaited())


@pytest.mark.parametrize("fetched", [fetch, await_it])
def test_a_fetch_of_what_waits_says_that_a_ps_is_lost(make_world, fetched):
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=1)
    values = world.held(coordinator, 2, running=1)
    with ThreadPoolExecutor() as threads:
        fetching = threads.submit(fetched, values[1])
        (ps,) = world.ps
        world.on_loop(ps.kill, "killed")
        world.until(lambda: world.session.cluster.outage_error)
        world.on_loop(world.release)
        with pytest.raises(PSUnavailableError, match="/job:ps/task:0"):
            fetching.result(100)
    for _ in range(2):
        with pytest.raises(PSUnavailableError, match="/job:ps/task:0"):
            fetched(values[1])
    assert fetched(values[0]) == 1, "that one ran"
    world.on_loop(ps.come_back, same=True)
    world.until(lambda: world.session.cluster.outage_error is None)
    assert fetched(values[1]) == 1, "it was cut off, and the step has waited"


def test_with_errors_once_what_a_fetch_has_said_of_a_ps_is_said(make_world):
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=1, errors_once=True)
    values = world.held(coordinator, 2, running=1)
    ps = world.lose_ps()
    world.on_loop(world.release)
    try:
        raise KeyError("of somebody else")
    except KeyError:
        with pytest.raises(PSUnavailableError):
            values[1].fetch()
    with pytest.raises(PSUnavailableError) as raised:
        values[1].fetch()
    assert raised.value.__context__ is None
    world.on_loop(ps.come_back, same=True)
    world.until(lambda: world.session.cluster.outage_error is None)
    assert values[1].fetch() == 1
    assert coordinator.schedule(good).fetch() == 1


@alone
def test_a_value_is_not_kept_by_who_awaited_it_on_a_closed_loop(world, coordinator):
    world.on_loop(world.hold)
    value = coordinator.schedule(good)
    loop = asyncio.new_event_loop()

    async def awaited(value):
        await value

    async def begin(value):
        task = asyncio.ensure_future(awaited(value))
        await asyncio.sleep(0)
        return task

    task = loop.run_until_complete(begin(value))
    loop.close()
    world.on_loop(world.release)
    coordinator.join()
    task._log_destroy_pending = False  # the point: nobody has cancelled it
    gone = weakref.ref(value)
    del value, task
    gc.collect()
    assert gone() is None


def test_an_error_of_a_read_shows_no_frames_of_the_machinery(world):
    world.coordinator()
    world.lose_ps()
    with pytest.raises(PSUnavailableError) as raised:
        world.read([VariableSpec(1, "v", (), "float32", 0)])
    last = raised.traceback[-1].path.name
    assert last == "coordinator_fakes.py", "which asks the session"


def test_a_coordinator_made_after_the_loss_knows_it(world):
    world.connect()
    world.lose_ps()
    coordinator = world.coordinator()
    with pytest.raises(PSUnavailableError):
        coordinator.schedule(good)


@pytest.mark.parametrize("told", [False, True])
def test_a_ps_that_returns_in_time_with_all_it_held_was_never_lost(world, told):
    world.reconnect = 3600.0
    coordinator = world.coordinator()
    (ps,) = world.ps
    (line,) = world.session.cluster.ps
    lost = []

    def blip():
        line._events = SimpleNamespace(task_lost=lambda *a: lost.append(a))
        if told:  # the link gave it up: the program was stopped, say
            ps.kill()
        ps.come_back(same=True)

    world.on_loop(blip)
    world.until(lambda: len(ps.sessions) == 2)
    assert world.on_loop(lambda: line.is_ready)
    assert coordinator.schedule(good).fetch() == 1
    coordinator.join()
    assert lost == []


def test_a_ps_that_says_it_will_be_back_is_waited_for(world, coordinator, caplog):
    (ps,) = world.ps
    world.on_loop(ps.link.cut, "it left", left=True, returns=3600.0)
    value = coordinator.schedule(good)
    world.on_loop(ps.come_back, same=True)
    world.until(lambda: len(ps.sessions) == 2)
    assert value.fetch() == 1
    coordinator.join()
    assert "ps/task:0 at ps0:1 is to be back within 3600 s" in caplog.text


def is_started_again(ps):
    ps.kill()
    ps.come_back()


def has_served_another(ps, told=False):
    if told:
        ps.kill()
    ps.session += 1
    ps.come_back(same=True)


def serves_another(ps):
    ps.busy = True
    ps.come_back(same=True)


@pytest.mark.parametrize(
    "fault",
    [
        is_started_again,
        has_served_another,
        partial(has_served_another, told=True),
        serves_another,
    ],
)
def test_a_ps_that_has_lost_the_variables_is_not_taken_again(world, fault):
    world.reconnect = 3600.0
    coordinator, (ps,) = world.coordinator(), world.ps
    world.on_loop(fault, ps)
    world.until(lambda: world.session.cluster.outage_error)
    sessions = len(ps.sessions)
    for _ in range(2):
        with pytest.raises(PSUnavailableError) as raised:
            coordinator.join()
        assert raised.value.lost
    world.on_loop(ps.come_back, same=True)
    with pytest.raises(PSUnavailableError):
        coordinator.join()
    assert fault is not is_started_again or len(ps.sessions) == sessions == 1


def test_all_steps_of_a_lost_ps_say_so_whatever_the_workers_say(world):
    """Those that ask one that was started again hear of a session that it never had."""
    coordinator = world.coordinator(closures_in_flight=3)
    values = world.held(coordinator, 6)
    (ps,) = world.ps
    errors = [StaleSessionError("it serves no session")] * 4
    errors += [PSUnavailableError("/job:ps/task:0", "second-hand")] * 2

    def fail(worker):
        worker._run = lambda *_: (Outcome.FAILED, errors.pop())
        worker.held = False
        worker.work()

    def restart():
        fail(world.workers[0])
        ps.kill()
        ps.come_back()
        fail(world.workers[1])

    world.on_loop(restart)
    world.until(lambda: world.session.cluster.outage_error and not errors)
    with pytest.raises(PSUnavailableError, match="/job:ps/task:0"):
        coordinator.join()
    for value in values:
        assert isinstance(value.error, PSUnavailableError), value.error
        assert "it was started again" in str(value.error)


def test_a_cut_line_is_not_said_to_be_the_end_of_the_variables(world, coordinator):
    world.lose_ps("silent for 5 s")
    with pytest.raises(PSUnavailableError) as raised:
        coordinator.join()
    assert not raised.value.lost
    assert "lost" not in str(raised.value)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(_outcomes, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(_outcomes, "LONGEST_PAUSE", 0.001)


def failing_ps(world, times, error=None):
    """Workers report, so often, that they do not reach the parameter server."""
    left = [times]
    for worker in world.workers:
        run = worker._run

        def flaky(*given, run=run):
            if left[0]:
                left[0] -= 1
                unreachable = PSUnavailableError("/job:ps/task:0", "second-hand")
                return Outcome.FAILED, error or unreachable
            return run(*given)

        worker._run = flaky


def test_a_hiccup_of_a_ps_is_tried_again(world):
    coordinator = world.coordinator()
    failing_ps(world, 3)
    values = [coordinator.schedule(good) for _ in range(10)]
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 10


def test_a_worker_that_alone_does_not_reach_a_ps_ends_no_job(world):
    coordinator = world.coordinator(closures_in_flight=1)
    cut_off, good_one = world.workers
    failures = []

    def fail(function, *given):
        failures.append(function)
        return Outcome.FAILED, PSUnavailableError("/job:ps/task:0", "second-hand")

    cut_off._run = fail
    good_one.held = True
    values = [coordinator.schedule(good) for _ in range(2)]
    world.until(lambda: len(failures) >= _outcomes.STRIKES)
    world.on_loop(world.release)
    coordinator.join()
    assert [value.fetch() for value in values] == [1, 1]


def test_a_busy_ps_is_given_time(world):
    coordinator = world.coordinator()
    failing_ps(world, 5 * _outcomes.STRIKES, BusyError("too many requests are open"))
    assert coordinator.schedule(good).fetch() == 1
    coordinator.join()


def test_a_step_that_always_raises_that_something_is_busy_fails(world, monkeypatch):
    coordinator = world.coordinator()
    monkeypatch.setattr(_outcomes, "BUSY_SECONDS", 0.01)
    failing_ps(world, -1, BusyError("another writer is at work in the folder"))
    value = coordinator.schedule(good)
    with pytest.raises(BusyError):
        value.fetch()


def test_outages_that_pass_end_no_job_however_many(make_world):
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=1)
    for _ in range(2 * _outcomes.STRIKES):
        failing_ps(world, 1)
        assert coordinator.schedule(good).fetch() == 1
    coordinator.join()


def test_failures_that_last_are_raised(world):
    coordinator = world.coordinator()
    failing_ps(world, -1)
    coordinator.schedule(good)
    with pytest.raises(PSUnavailableError):
        coordinator.join()
