"""What waits is cancelled, by `cancel` or by Ctrl-C, and the queue goes on."""

import signal

import pytest
from coordinator_fakes import alone, good

import zstrat.program as zs
from zstrat.coordinator import (
    AsyncClusterCoordinator,
    ClusterCoordinator,
    RemoteValue,
    _waiting,
)
from zstrat.coordinator._values import Result
from zstrat.errors import CancelledError, ClosedError, DeadlineExceededError
from zstrat.threads import ThreadBell


@zs.function(eager=True)
def bad(text):
    raise ValueError(text)


@pytest.fixture
def begun(make_world):
    """A world whose worker has begun the first of 30 closures, the coordinator, the
    values, and what lets the worker end."""
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=4)
    world.on_loop(world.hold)
    values = [coordinator.schedule(good) for _ in range(30)]
    (worker,) = world.workers
    world.until(lambda: len(worker.queue) == 4)
    world.on_loop(worker.begin)

    def finish():
        worker.finish()
        world.release()

    return world, coordinator, values, finish


def test_cancel_ends_what_waits_and_lets_what_runs_end(begun, in_thread):
    world, coordinator, (first, *others), finish = begun
    cancelling = in_thread(coordinator.cancel)
    for value in others:
        with pytest.raises(CancelledError, match=r"coordinator\.cancel"):
            value.fetch(timeout=100)
    assert not cancelling.done(), "one still runs"
    world.on_loop(finish)
    assert cancelling.result(100) == 29
    assert first.fetch() == 1, "its result counts"
    assert world.ps[0].fences[-1].low_water == 31, "no zombie may push"
    coordinator.join()
    assert coordinator.schedule(good).fetch() == 1, "it is usable again"
    assert coordinator.cancel() == 0


async def test_the_awaited_one_does_the_same(world):
    blocking = world.coordinator(closures_in_flight=2)
    coordinator = AsyncClusterCoordinator(world.strategy)
    world.on_loop(world.hold)
    values = [await coordinator.schedule(good) for _ in range(30)]
    assert await coordinator.cancel() == 30
    with pytest.raises(CancelledError):
        await values[0]
    world.on_loop(world.release)
    assert await (await coordinator.schedule(good)) == 1
    assert blocking.cancel() == 0


def test_a_cancel_that_is_late_is_ended_by_the_next_call(begun):
    world, coordinator, values, finish = begun
    with pytest.raises(DeadlineExceededError):
        coordinator.cancel(timeout=0.01)
    with pytest.raises(CancelledError):
        values[-1].fetch(timeout=100)
    world.on_loop(finish)
    coordinator.join()
    assert values[0].fetch() == 1


def test_cancel_raises_no_error_and_loses_none(coordinator):
    value = coordinator.schedule(bad, args=("boom",))
    coordinator._core.engine.waiters.wait_value(value, 20.0)
    assert coordinator.cancel() == 0
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    coordinator.join()


@alone
def test_without_any_worker_cancel_ends_all_the_same(world, coordinator):
    (value,) = world.held(coordinator)
    world.on_loop(world.workers[0].kill)
    assert coordinator.cancel() == 1
    with pytest.raises(CancelledError):
        value.fetch()


def test_after_the_end_there_is_nothing_to_cancel(coordinator):
    coordinator.shutdown()
    with pytest.raises(ClosedError):
        coordinator.cancel()


@pytest.fixture
def ctrl_c(monkeypatch):
    """Strikes when this thread is about to wait for the first time."""
    strikes = iter([signal.SIGINT])

    class StruckBell(ThreadBell):
        def wait(self, timeout):
            for number in strikes:
                signal.raise_signal(number)
            return super().wait(timeout)

    def begin():
        monkeypatch.setattr(_waiting, "ThreadBell", StruckBell)

    return begin


@pytest.mark.parametrize("call", ["join", "fetch", "schedule"])
def test_ctrl_c_cancels_what_waits_and_says_how_much(make_world, ctrl_c, call):
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=1, max_queued=10)
    world.on_loop(world.hold)
    (worker,) = world.workers
    values = [coordinator.schedule(good)]
    world.until(lambda: worker.queue)
    world.on_loop(worker.begin)
    values += [coordinator.schedule(good) for _ in range(10)]
    calls = {
        "join": coordinator.join,
        "fetch": lambda: coordinator.fetch(values),
        "schedule": lambda: coordinator.schedule(good),
    }
    ctrl_c()
    with pytest.raises(KeyboardInterrupt) as raised:
        calls[call]()
    (note,) = raised.value.__notes__
    assert note.startswith("10 closures that waited for a worker were cancelled;")
    assert "workers have 1 more" in note
    assert not coordinator._core.engine.waiters.watchers
    for value in values[1:]:
        with pytest.raises(CancelledError):
            value.fetch(timeout=0.0)

    world.on_loop(worker.finish)
    world.on_loop(world.release)
    assert coordinator.schedule(good).fetch() == 1, "the next cell does not wait long"
    assert values[0].fetch() == 1
    coordinator.shutdown()
    assert ClusterCoordinator(world.strategy) is not coordinator


def test_ctrl_c_while_a_fence_is_raised_does_not_lose_the_fence(coordinator):
    loop = coordinator._core.engine.loop
    raised = loop.fence

    def struck(*_):
        loop.fence = raised
        raise KeyboardInterrupt

    loop.fence = struck
    coordinator.schedule(bad, args=("boom",))
    with pytest.raises(KeyboardInterrupt):
        coordinator.join()
    with pytest.raises(ValueError, match="boom"):
        coordinator.join(timeout=100)
    assert coordinator.schedule(good).fetch() == 1


def test_ctrl_c_when_nothing_waits_says_nothing(coordinator, ctrl_c):
    coordinator.schedule(good).fetch()
    late = coordinator._core.engine
    ctrl_c()
    with pytest.raises(KeyboardInterrupt) as raised:
        coordinator.fetch(RemoteValue(late, Result("never", None)))
    assert not hasattr(raised.value, "__notes__")
    assert coordinator.schedule(good).fetch() == 1
