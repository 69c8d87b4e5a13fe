"""Workers that go, come back, hang on, and change hands."""

import logging

import jax.numpy as jnp
import pytest
from coordinator_fakes import alone, good

import zstrat.program as zs
from zstrat.coordinator import _dispatch, _shipping
from zstrat.errors import BusyError, UnavailableError, WorkerLostError
from zstrat.wire import Dispatch, Outcome


@zs.function
def poison():
    return jnp.float32(2)


def test_the_closures_of_a_lost_worker_go_to_the_others(world):
    coordinator = world.coordinator(closures_in_flight=4)
    values = world.held(coordinator, 20, running=8)
    first, second = world.workers
    lost = [step for *_, step in first.queue]

    def lose():
        first.kill()
        second.held = False
        second.work()

    world.on_loop(lose)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 20
    assert sorted(step for step, _ in second.ran) == list(range(1, 21))
    assert {step for step, attempt in second.ran if attempt == 2} == set(lost)
    assert [s for s, a in second.ran if a == 2] == lost, "in their order"
    assert coordinator.metrics()["recoverable_worker_failures"] == 1


@pytest.mark.parametrize("same", [True, False])
@alone
def test_a_worker_that_returns_works_again(world, coordinator, same):
    coordinator.schedule(good).fetch()
    (worker,) = world.workers
    world.on_loop(worker.kill)
    value = coordinator.schedule(good)
    world.on_loop(worker.come_back, same=same)
    assert value.fetch() == 1
    assert len(worker.sessions) == 2, "it had to be taken anew"
    assert worker.sessions[0].session == worker.sessions[1].session


def test_what_a_lost_worker_reports_late_changes_nothing(world, coordinator):
    (value,) = world.held(coordinator)
    owner = next(w for w in world.workers if w.queue)
    other = next(w for w in world.workers if w is not owner)
    ((*_, step),) = owner.queue

    def lose_and_return():
        owner.kill()
        other.held = False
        other.work()

    world.on_loop(lose_and_return)
    assert value.fetch() == 1

    world.on_loop(owner.come_back, same=True)
    world.until(lambda: world.session.cluster.workers[owner.index].is_ready)

    def zombie():
        owner.tell([(step, Outcome.OK, jnp.float32(99))])
        owner.tell([(step, Outcome.FAILED, ValueError("late"))])

    world.on_loop(zombie)
    coordinator.schedule(good)
    world.on_loop(world.release)
    coordinator.join()
    assert value.fetch() == 1
    # The two, and the cancellation of what the worker still held when it returned.
    assert coordinator.metrics()["stale_completions"] == 3


def test_duplicate_completions_count_once(world, coordinator):
    value = coordinator.schedule(good)
    coordinator.join()
    (worker,) = [w for w in world.workers if w.ran]
    world.on_loop(worker.tell, [(1, Outcome.OK, jnp.float32(5))])
    coordinator.schedule(good).fetch()
    assert value.fetch() == 1
    coordinator.join()


def test_a_closure_that_kills_workers_is_reported_and_bystanders_are_spared(world):
    coordinator = world.coordinator(closures_in_flight=4, max_attempts=3)
    for worker in world.workers:
        worker.dies_of = ("poison",)
    world.on_loop(world.hold)
    deadly = coordinator.schedule(poison)
    bystanders = [coordinator.schedule(good) for _ in range(6)]
    world.until(lambda: world.running == 7)

    def back():
        for worker in world.workers:
            if not worker.alive:
                worker.come_back()

    world.on_loop(world.release)
    # Every crash is followed by a return; in the end the poison is found.
    for _ in range(3):
        world.until(lambda: deadly.is_ready or not all(w.alive for w in world.workers))
        world.on_loop(back)
    with pytest.raises(WorkerLostError) as raised:
        deadly.fetch()
    assert raised.value.peer.count("/job:worker/task:") == 3
    with pytest.raises(WorkerLostError):
        coordinator.join()
    errors = [value.error for value in bystanders]
    assert not any(isinstance(error, WorkerLostError) for error in errors)


def test_a_closure_is_not_blamed_for_connections_that_break(make_world):
    world = make_world(workers=1)
    coordinator = world.coordinator(max_attempts=2)
    world.on_loop(world.hold)
    value = coordinator.schedule(good)
    (worker,) = world.workers
    for turn in range(1, 8):
        world.until(lambda turn=turn: [a for *_, a, _ in worker.queue] == [turn])
        world.on_loop(worker.queue.clear)
        world.on_loop(worker.come_back, same=True)
    world.on_loop(world.release)
    assert value.fetch() == 1
    coordinator.join()


def test_a_worker_that_shuts_down_gets_nothing_more(world):
    coordinator = world.coordinator(closures_in_flight=2)
    values = world.held(coordinator, 4)
    leaving, staying = world.workers

    def shut_down():
        queue, leaving.queue = leaving.queue, []
        why = WorkerLostError("/job:worker/task:0", "it is shutting down")
        leaving.tell([(step, Outcome.CANCELLED, why) for *_, step in queue])
        staying.held = False
        staying.work()

    world.on_loop(shut_down)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 4
    assert leaving.ran == []
    assert not leaving.queue
    assert coordinator.metrics()["workers"]["/job:worker/task:0"]["state"] == "leaving"
    world.on_loop(leaving.kill)
    world.on_loop(leaving.come_back)
    leaving.held = False
    for _ in range(10):
        coordinator.schedule(good)
    coordinator.join()
    assert leaving.ran


def test_join_waits_for_a_worker_only_so_long(world):
    coordinator = world.coordinator(worker_wait_timeout=0.05)
    world.on_loop(world.kill_workers, "power cut")
    value = coordinator.schedule(good)
    with pytest.raises(UnavailableError, match=r"task:0.*task:1"):
        coordinator.join()
    assert value.error is not None
    again = coordinator.schedule(good)
    with pytest.raises(UnavailableError):
        coordinator.join()
    assert again.error is not None
    world.on_loop(world.workers[1].come_back)
    assert coordinator.schedule(good).fetch() == 1


def test_a_fetch_waits_for_a_worker_only_so_long(world):
    coordinator = world.coordinator(worker_wait_timeout=0.05)
    world.on_loop(world.kill_workers, "power cut")
    value = coordinator.schedule(good)
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"task:0.*task:1"):
            value.fetch()
    world.on_loop(world.workers[1].come_back)
    world.until(lambda: world.workers[1].ran)
    assert value.fetch() == 1


def test_with_errors_once_what_a_fetch_has_said_of_workers_is_said(world):
    coordinator = world.coordinator(worker_wait_timeout=0.05, errors_once=True)
    world.on_loop(world.kill_workers, "power cut")
    value = coordinator.schedule(good)
    for _ in range(2):  # each time a worker is waited for again
        with pytest.raises(UnavailableError, match="worker_wait_timeout"):
            value.fetch()
    world.on_loop(world.workers[0].come_back)
    assert value.fetch() == 1
    assert coordinator.schedule(good).fetch() == 1


def test_a_trace_waits_for_a_worker_only_so_long(world):
    coordinator = world.coordinator(worker_wait_timeout=0.05)
    world.on_loop(world.kill_workers, "power cut")
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [jnp.ones(3)]))

    @zs.function
    def step(iterator):
        return next(iterator)

    with pytest.raises(UnavailableError, match="worker_wait_timeout"):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()


def test_an_idle_coordinator_does_not_mind_that_nobody_is_there(world):
    coordinator = world.coordinator(worker_wait_timeout=0.0)
    world.on_loop(world.kill_workers)
    coordinator.join()
    assert coordinator.done()


def test_a_late_worker_joins(make_world):
    world = make_world(workers=2)
    world.workers[1].alive = False
    coordinator = world.coordinator(closures_in_flight=1)
    world.workers[0].held = True
    first = coordinator.schedule(good)
    second = coordinator.schedule(good)
    world.until(lambda: world.running == 1)
    world.on_loop(world.workers[1].come_back)
    assert second.fetch() == 1
    assert not first.is_ready
    world.on_loop(world.release)
    coordinator.join()


def test_a_worker_that_serves_another_coordinator_joins_when_it_is_free(make_world):
    world = make_world(workers=2)
    world.workers[1].busy = True
    coordinator = world.coordinator()
    assert coordinator.schedule(good).fetch() == 1
    states = coordinator.metrics()["workers"]
    assert states["/job:worker/task:1"]["state"] == "connecting"
    world.workers[1].busy = False
    world.until(lambda: bool(world.workers[1].sessions))


def scheduled_at_once(world, coordinator, count):
    """All of them wait for the worker and go to it in one turn."""
    (worker,) = world.workers
    world.on_loop(worker.kill)
    values = [coordinator.schedule(good) for _ in range(count)]
    world.on_loop(worker.come_back)
    return values


def wrap_notify(worker, monkeypatch, refuse):
    """``refuse`` is called with each `Dispatch`, and may raise."""
    notify = worker.link.notify

    def wrapped(message):
        if isinstance(message, Dispatch):
            refuse(message)
        notify(message)

    monkeypatch.setattr(worker.link, "notify", wrapped)


def test_many_closures_go_in_several_messages(make_world, monkeypatch):
    monkeypatch.setattr(_shipping, "CLOSURES_PER_MESSAGE", 4)
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=10)
    (worker,) = world.workers
    values = scheduled_at_once(world, coordinator, 10)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 10
    assert [step for step, _ in worker.ran] == list(range(1, 11))
    assert len(worker.low_waters) == 3


def test_only_what_a_worker_did_not_take_is_tried_again(make_world, monkeypatch):
    monkeypatch.setattr(_shipping, "CLOSURES_PER_MESSAGE", 4)
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=10)
    (worker,) = world.workers
    seen = []

    def refuse(message):
        seen.append(message)
        if len(seen) == 2:
            raise BusyError("it does not read")

    wrap_notify(worker, monkeypatch, refuse)
    scheduled_at_once(world, coordinator, 10)
    coordinator.join()
    assert sorted(worker.ran) == [(i, 1) for i in range(1, 11)], "each ran once"
    (member,) = coordinator._core.dispatcher.members.members
    assert member.finished == member.completed == 10, "the clock of bounded staleness"


def test_what_came_back_is_tried_again_after_an_early_timer(
    make_world, monkeypatch, hasty
):
    monkeypatch.setattr(_dispatch, "asyncio", hasty)
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=10)
    (worker,) = world.workers
    left = [BusyError("it does not read")]

    def refuse_once(_):
        if left:
            raise left.pop()

    wrap_notify(worker, monkeypatch, refuse_once)
    coordinator.schedule(good)
    coordinator.join(timeout=100)
    assert worker.ran == [(1, 1)]
    assert hasty.came is not None
    assert hasty.again == hasty.came  # it was set again for the same time


@alone
def test_closures_that_cannot_be_sent_fail(world, coordinator, monkeypatch):
    left = [1]

    def refuse(message):
        if left and left.pop():
            raise ValueError("the header is too large")

    wrap_notify(world.workers[0], monkeypatch, refuse)
    value = coordinator.schedule(good)
    with pytest.raises(ValueError, match="header is too large"):
        coordinator.join(timeout=100)
    assert value.error is not None
    assert coordinator.schedule(good).fetch() == 1


def test_tasks_that_are_shut_down_on_purpose_are_no_warning(world, caplog):
    caplog.set_level(logging.INFO, "zstrat.coordinator")
    coordinator = world.coordinator()
    coordinator.schedule(good).fetch()

    def end_all():
        for task in (*world.workers, *world.ps):
            task.leave()

    world.on_loop(end_all)
    world.on_loop(lambda: None)  # the turn that follows the loss is over
    words = "lost /job:worker", "no contact with /job:ps"
    told = [r for r in caplog.records if r.message.startswith(words)]
    assert [record.levelname for record in told] == ["INFO"] * 3
    assert all(record.levelno <= logging.INFO for record in caplog.records)


def test_a_task_that_is_cut_off_is_a_warning_and_so_is_its_return(world, caplog):
    world.coordinator()
    assert not caplog.records
    world.on_loop(world.workers[0].kill)
    world.on_loop(world.workers[0].come_back)
    world.on_loop(lambda: None)  # its answer is there
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "lost /job:worker/task:0 at worker0:1: killed" in caplog.messages[0]
    assert "/job:worker/task:0 at worker0:1 is back" in caplog.messages[1]


def test_work_without_workers_is_a_warning(world, coordinator, caplog):
    (value,) = world.held(coordinator)
    world.on_loop(lambda: [worker.leave() for worker in world.workers])
    world.on_loop(lambda: None)
    assert "waiting for one: /job:worker/task:0" in caplog.text

    def come_back():
        world.release()
        world.workers[0].come_back()

    world.on_loop(come_back)
    assert value.fetch() == 1


def test_a_worker_lost_as_it_gets_steps_of_a_round_keeps_none(world, coordinator):
    """Rounds deal closures out in turn, so it gets two of one turn."""
    dispatcher = coordinator._core.dispatcher
    world.on_loop(dispatcher.members.pace)
    lost, _ = world.workers

    def suspend(is_so):
        dispatcher.queue.suspended = is_so
        dispatcher.turn_soon()
        if not is_so:  # the first message to it shows it, in the turn
            lost.link.peer = None

    world.on_loop(suspend, True)
    values = [coordinator.schedule(good) for _ in range(4)]
    world.on_loop(suspend, False)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 4
