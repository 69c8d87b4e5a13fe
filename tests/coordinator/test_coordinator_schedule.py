"""Scheduling through the whole shell, on fakes: results, refusals, bounds, the end."""

import contextlib
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coordinator_fakes import alone

import zstrat.program as zs
from zstrat.coordinator import (
    AsyncClusterCoordinator,
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValueStatus,
)
from zstrat.errors import (
    CancelledError,
    ClosedError,
    DeadlineExceededError,
    ProtocolError,
)


@zs.function
def add(a, b):
    return {"sum": a + b, "parts": (a, [b]), "none": None}


@zs.function
def constant():
    return jnp.float32(7)


def test_a_result_comes_back_in_its_structure(coordinator):
    value = coordinator.schedule(add, args=(np.float32(1.5), np.arange(3.0)))
    result = value.fetch()
    np.testing.assert_array_equal(result["sum"], [1.5, 2.5, 3.5])
    assert result["parts"][0] == np.float32(1.5)
    assert result["none"] is None
    assert isinstance(result["parts"][0], np.float32)
    assert not result["sum"].flags.writeable
    assert value.state is RemoteValueStatus.READY
    coordinator.join()
    assert coordinator.done()


def test_a_known_call_in_a_step_is_refused_before_it_is_queued(coordinator):
    coordinator.schedule(constant).fetch()
    before = coordinator.metrics()["scheduled_closures"]

    @zs.function
    def step():
        coordinator.schedule(constant)

    for use in (step, lambda: coordinator.schedule(step)):
        with pytest.raises(RuntimeError, match=r"coordinator\.schedule"):
            use()
    assert coordinator.metrics()["scheduled_closures"] == before


def test_get_gives_jax_arrays(world):
    value = world.coordinator().schedule(add, kwargs={"a": 1, "b": np.ones(2)})
    assert isinstance(value.get()["sum"], jax.Array)


def test_fetch_maps_nested_structures(coordinator):
    values = {"x": [coordinator.schedule(constant)], "y": 3, "z": "text"}
    assert coordinator.fetch(values) == {"x": [np.float32(7)], "y": 3, "z": "text"}


def test_all_workers_work_and_steps_are_unique(world, coordinator):
    for _ in range(500):
        coordinator.schedule(constant)
    coordinator.join()
    steps = [step for worker in world.workers for step, _ in worker.ran]
    assert sorted(steps) == list(range(1, 501))
    assert all(worker.ran for worker in world.workers)
    for worker in world.workers:
        assert worker.low_waters == sorted(worker.low_waters)
        assert len(worker.code) == 1


def test_plain_functions_are_refused(coordinator):
    for plain in (lambda: 1, print, 3):
        with pytest.raises(TypeError, match=r"`ClusterCoordinator\.schedule`"):
            coordinator.schedule(plain)


def test_remote_values_are_no_arguments(coordinator):
    value = coordinator.schedule(constant)
    with pytest.raises(ValueError, match="RemoteValue"):
        coordinator.schedule(add, args=(1, {"deep": [value]}))


def test_args_are_a_tuple(world):
    with pytest.raises(TypeError, match="args="):
        world.coordinator().schedule(add, args=np.ones(3))


def test_mistakes_in_the_function_are_raised_by_schedule(coordinator):
    @zs.function
    def wrong(x):
        return x @ jnp.ones((7, 7))

    with pytest.raises(TypeError):
        coordinator.schedule(wrong, args=(np.ones((2, 2)),))
    assert coordinator.done()


def test_what_cannot_be_pickled_is_refused_by_schedule(world):
    lock = threading.Lock()

    @zs.function
    def locked(x):
        return x + bool(lock)

    with pytest.raises(TypeError, match="'lock'"):
        world.coordinator().schedule(locked, args=(1,))


def test_other_strategies_are_refused():
    for kind in (ClusterCoordinator, AsyncClusterCoordinator):
        with pytest.raises(ValueError, match="ParameterServerStrategy"):
            kind(object())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_queued", "10"),
        ("max_queued", 0),
        ("max_attempts", 0),
        ("max_attempts", True),
        ("closures_in_flight", 1.5),
        ("worker_wait_timeout", "5"),
        ("worker_wait_timeout", -1),
        ("worker_wait_timeout", float("nan")),
        ("errors_once", "yes"),
    ],
)
def test_options_are_checked_when_they_are_given(world, option, value):
    """A wrong timeout was noticed when no worker was left, by a loop that then hung."""
    with pytest.raises(ValueError, match=f"{option}={value!r}: expected"):
        world.coordinator(**{option: value})
    with pytest.raises(ValueError, match=f"{option}={value!r}: expected"):
        AsyncClusterCoordinator(world.strategy, **{option: value})
    world.coordinator(worker_wait_timeout=math.inf)


def test_there_is_one_coordinator_per_strategy(world):
    coordinator = world.coordinator(max_queued=10)
    assert ClusterCoordinator(world.strategy) is coordinator
    assert ClusterCoordinator(world.strategy, max_queued=10) is coordinator
    assert coordinator.strategy is world.strategy
    with pytest.raises(ValueError, match="'max_queued'"):
        ClusterCoordinator(world.strategy, max_queued=11)


def test_threads_that_make_it_at_once_get_the_same(world, in_thread):
    world.coordinator().shutdown()
    start, made = threading.Barrier(8), []

    def make():
        start.wait()
        made.append(ClusterCoordinator(world.strategy))

    for future in [in_thread(make) for _ in range(8)]:
        future.result(100)
    assert len({id(coordinator) for coordinator in made}) == 1


def test_per_worker_values_are_made_of_remote_values(world):
    value = world.coordinator().schedule(constant)
    assert PerWorkerValues([value]).values == (value,)
    with pytest.raises(AssertionError, match="PerWorkerValues"):
        PerWorkerValues([value, 3])


def test_schedule_waits_while_the_queue_is_full(world, in_thread):
    coordinator = world.coordinator(max_queued=3, closures_in_flight=1)
    world.on_loop(world.hold)
    scheduled = []

    def schedule_many():
        for _ in range(10):
            coordinator.schedule(constant)
            scheduled.append(1)

    scheduling = in_thread(schedule_many)
    world.until(lambda: coordinator._core.engine.waiters.watchers)
    assert 3 <= len(scheduled) <= 5, "three wait, and two are in flight"
    assert not scheduling.done()
    world.on_loop(world.release)
    scheduling.result(100)
    coordinator.join()
    assert sum(len(worker.ran) for worker in world.workers) == 10


def test_join_and_fetch_take_a_timeout_and_lose_nothing(world, coordinator):
    world.on_loop(world.hold)
    value = coordinator.schedule(constant)
    world.until(lambda: world.running)
    held = r"\b1\b.*\b0\b.*\b1\b"
    with pytest.raises(DeadlineExceededError, match=held):
        coordinator.join(timeout=0.01)
    with pytest.raises(DeadlineExceededError, match="RemoteValue"):
        value.fetch(timeout=0.01)
    for call in (coordinator.join, value.fetch):
        with pytest.raises(ValueError, match="timeout=nan"):
            call(timeout=float("nan"))
        with pytest.raises(TypeError, match="timeout='5'"):
            call(timeout="5")
    assert not coordinator.done()
    world.on_loop(world.release)
    assert value.fetch() == 7
    coordinator.join(timeout=100)


def test_a_join_does_not_hold_up_other_threads(world, coordinator, in_thread):
    world.on_loop(world.hold)
    coordinator.schedule(constant)
    joining = in_thread(coordinator.join)
    world.until(lambda: coordinator._core.engine.waiters.watchers)
    later = coordinator.schedule(constant)
    world.until(lambda: sum(len(w.queue) for w in world.workers) == 2)
    first = next(w for w in world.workers if any(s == 1 for *_, s in w.queue))
    world.on_loop(first.work, 1)
    joining.result(100)  # it waits for what was scheduled before it alone
    assert not later.is_ready
    world.on_loop(world.release)
    assert later.fetch() == 7


def test_shutdown_cancels_and_a_new_coordinator_goes_on(world, coordinator):
    world.on_loop(world.hold)
    values = [coordinator.schedule(constant) for _ in range(50)]
    coordinator.shutdown()
    coordinator.shutdown()
    for value in values:
        with pytest.raises(CancelledError):
            value.fetch()
    with pytest.raises(ClosedError):
        coordinator.schedule(constant)
    world.on_loop(world.release)
    again = ClusterCoordinator(world.strategy)
    assert again is not coordinator
    assert again.schedule(constant).fetch() == 7
    (step,) = [s for w in world.workers for s, _ in w.ran if s > 50]
    assert step == 51, "a session never uses a step twice"


def test_shutdown_of_the_cluster_ends_the_daemons(world, coordinator):
    coordinator.shutdown(cluster=True)
    assert all(task.exited for task in world.tasks.values())
    coordinator.shutdown(cluster=True)
    with pytest.raises(ClosedError):
        world.read([])


def test_leaving_the_block_joins(world):
    with world.coordinator() as coordinator:
        value = coordinator.schedule(constant)
    assert value.is_ready
    assert value.fetch() == 7


def test_leaving_the_block_with_an_error_does_not_wait(world):
    with contextlib.suppress(KeyError), world.coordinator() as coordinator:
        world.on_loop(world.hold)
        value = coordinator.schedule(constant)
        raise KeyError
    with pytest.raises(CancelledError):
        value.fetch()


def test_metrics_are_plain_numbers(coordinator):
    coordinator.schedule(constant).fetch()
    coordinator.join()
    metrics = coordinator.metrics()
    assert metrics["scheduled_closures"] == 1
    assert metrics["inflight_closures"] == 0
    assert metrics["fetches"] == 1
    assert 0 < metrics["steps_per_s"] <= 1
    workers = metrics["workers"]
    assert sum(worker["completed"] for worker in workers.values()) == 1
    assert {worker["state"] for worker in workers.values()} == {"open"}


def test_a_join_that_is_cut_short_by_a_shutdown_says_so(world, coordinator, in_thread):
    coordinator.schedule(constant).fetch()
    coordinator.join()
    world.on_loop(world.hold)
    coordinator.schedule(constant)
    joining = in_thread(coordinator.join)
    world.until(lambda: coordinator._core.engine.waiters.watchers)
    coordinator.shutdown()
    with pytest.raises(ClosedError):
        joining.result(100)


def test_a_closed_session_has_no_coordinator(world):
    world.coordinator().shutdown()
    world.session.close()
    with pytest.raises(ClosedError):
        ClusterCoordinator(world.strategy)


def test_a_coordinator_that_follows_another_reads_what_is_described_already(world):
    first = world.coordinator()
    assert first.schedule(add, args=(1.0, 2.0)).fetch()["sum"] == 3.0
    first.shutdown()
    second = ClusterCoordinator(world.strategy)
    assert second.schedule(add, args=(3.0, 4.0)).fetch()["sum"] == 7.0


def test_what_is_described_when_a_coordinator_has_stopped_is_not_lost(make_world):
    world = make_world(workers=1)
    (worker,) = world.workers
    worker.held = True
    first = world.coordinator()
    first.schedule(add, args=(1.0, 2.0))
    world.until(lambda: worker.queue)
    begun = list(worker.queue)
    first.shutdown()
    world.until(lambda: not worker.queue)

    def finish():
        worker.queue, worker.held = begun, False
        worker.work()

    world.on_loop(finish)
    second = ClusterCoordinator(world.strategy)
    assert second.schedule(add, args=(3.0, 4.0)).fetch()["sum"] == 7.0


@alone
def test_a_result_that_was_never_described_is_an_error(world, coordinator):
    assert coordinator.schedule(constant).fetch() == 7
    world.on_loop(world.session.cluster.workers[0].layouts.clear)
    value = coordinator.schedule(constant)
    with pytest.raises(ProtocolError, match="task:0"):
        value.fetch()


class StruckLock:
    """A lock; Ctrl-C strikes when it is let go for the first time."""

    def __init__(self):
        self._lock, self.is_due = threading.Lock(), True

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        is_due, self.is_due = self.is_due, False
        if is_due:
            raise KeyboardInterrupt


def strike_wake(engine, monkeypatch, before):
    wake, left = engine.loop.wake, [1]

    def struck():
        is_due = bool(left and left.pop())
        if not (is_due and before):
            wake()
        if is_due:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine.loop, "wake", struck)


@pytest.mark.parametrize("where", ["before waking", "after waking", "unlocking"])
def test_ctrl_c_in_schedule_loses_no_closure(coordinator, monkeypatch, where):
    coordinator.schedule(constant).fetch()
    engine = coordinator._core.engine
    coordinator.join()
    if where == "unlocking":
        lock = engine.lock
        engine.lock = StruckLock()
    else:
        strike_wake(engine, monkeypatch, where == "before waking")
    with pytest.raises(KeyboardInterrupt):
        coordinator.schedule(constant)
    if where == "unlocking":
        engine.lock = lock
    assert engine.queue.steps.next == 3, "it is in the queue"
    coordinator.join(timeout=100)
    assert coordinator.done()
    assert coordinator.schedule(constant).fetch(timeout=100) == 7


def test_done_wakes_those_who_were_forgotten(coordinator, monkeypatch):
    coordinator.schedule(constant).fetch()
    strike_wake(coordinator._core.engine, monkeypatch, True)
    with pytest.raises(KeyboardInterrupt):
        coordinator.schedule(constant)
    while not coordinator.done():
        pass  # as a program would that does something else meanwhile


@pytest.mark.parametrize(
    "use",
    [
        float,
        int,
        abs,
        len,
        lambda value: value + 1,
        lambda value: 1 - value,
        lambda value: np.float32(1) * value,
        lambda value: jnp.float32(1) / value,
        lambda value: value < 1,
        lambda value: value[0],
        lambda value: f"{value:.3f}",
        np.asarray,
        np.mean,
        np.exp,
        jnp.asarray,
        lambda value: sum([value, value]),
    ],
)
def test_what_takes_a_number_asks_for_fetch(world, use):
    value = world.coordinator().schedule(zs.function(lambda: jnp.float32(3)))
    with pytest.raises(TypeError, match=r"RemoteValue.*value\.fetch\(\)"):
        use(value)
    assert value.fetch() == 3


def test_what_an_array_has_a_remote_value_has_after_fetch(world):
    value = world.coordinator().schedule(zs.function(lambda: jnp.float32(3)))
    with pytest.raises(AttributeError, match=r"'item'.*value\.fetch\(\)"):
        value.item()
    with pytest.raises(AttributeError, match="'itm'"):
        _ = value.itm
    assert value
    assert value == value  # by identity
    assert f"{value}".startswith("<RemoteValue")
