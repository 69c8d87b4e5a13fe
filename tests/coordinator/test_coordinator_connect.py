"""Connecting: who is waited for and said so, and workers that are not alike."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.coordinator import _cluster
from zstrat.coordinator.connecting import _arrival, _task_links
from zstrat.errors import BusyError, DeadlineExceededError, HeldError
from zstrat.testing import FakeClock
from zstrat.wire import OpenSession


def task(name, *, ready=False):
    return SimpleNamespace(
        name=name, address=f"{name}.example:1", is_ready=ready, state="no answer"
    )


def test_awaited_tasks_are_named_in_growing_intervals_until_all_are_there(caplog):
    ps, workers, clock = [task("p0"), task("p1")], [task("w0"), task("w1")], FakeClock()
    arrival = _arrival.Arrival(ps, workers, clock.call_later)
    arrival.start()
    assert clock.advance_to_next() == 2.0
    (first,) = caplog.messages
    assert all(f"{x.name} at {x.address} (no answer)" in first for x in (*ps, *workers))
    ps[0].is_ready = workers[1].is_ready = True
    assert clock.advance_to_next() == 10.0
    assert "p1" in caplog.messages[1]
    assert not any(name in caplog.messages[1] for name in ("p0", "w0", "w1"))
    ps[1].is_ready = True
    assert clock.advance_to_next() == 10.0
    assert len(caplog.messages) == 2
    arrival.stop()
    assert clock.timers == ()


def test_what_was_said_already_is_not_said_again_at_length(caplog):
    ps, workers, clock = [task("p0")], [task("w0")], FakeClock()
    _arrival.Arrival(ps, workers, clock.call_later).start()
    for _ in range(3):
        clock.advance_to_next()
    ps[0].state = "another trouble"
    clock.advance_to_next()
    first, second, third, last = caplog.messages
    assert "p0.example:1 (no answer)" in first
    assert second == third == "connecting: still waiting for p0, w0, as before"
    assert "p0.example:1 (another trouble)" in last


def test_a_program_that_waits_for_a_ps_says_so(make_world, caplog, monkeypatch):
    monkeypatch.setattr(_arrival, "FIRST_WARNING", 0.0)
    world = make_world(ps=2)
    world.ps[1].alive = False
    with pytest.raises(DeadlineExceededError):
        world.connect(connect=0.1, turn=0.0)
    words = [text for text in caplog.messages if "still waiting for" in text]
    assert "/job:ps/task:1 at ps1:1 (no answer)" in words[0]


def test_workers_with_different_numbers_of_devices_are_refused(make_world):
    world = make_world(workers=3)
    world.workers[1].devices = 4
    with pytest.raises(
        ValueError,
        match=r"/job:worker/task:0.*\b2\b.*/job:worker/task:1",
    ):
        world.connect()


def test_a_late_worker_with_another_number_of_devices_is_refused(world, caplog):
    late = world.workers[0]
    late.alive, late.devices = False, 8
    session = world.connect()
    assert session.devices == 2
    assert "devices" not in caplog.text
    world.on_loop(late.come_back)
    world.until(lambda: late.closed)
    assert not session.cluster.workers[0].is_ready
    assert (
        "/job:worker/task:0 at worker0:1 does not join: it has 8 devices, expected 2 "
        in caplog.text
    )
    assert session.devices == 2

    late.devices = 2
    world.on_loop(late.kill)
    world.on_loop(late.come_back)
    world.until(lambda: session.cluster.workers[0].is_ready)


def test_metrics_count_the_traces_of_scheduled_functions(coordinator):
    @zs.function
    def step(x):
        return x + jnp.float32(1)

    assert coordinator.metrics()["traces"] == 0
    for shape in (1, 2, 2):
        coordinator.schedule(step, args=(np.zeros(shape, np.float32),))
    coordinator.join()
    assert coordinator.metrics()["traces"] == 2


@pytest.mark.parametrize(("workers", "expected"), [(1, 0), (5, 0), (1, 1), (5, 2)])
def test_workers_learn_how_many_steps_to_prefetch(make_world, workers, expected):
    world = make_world(workers=workers)
    world.connect(prefetch=expected)
    world.until(lambda: all(worker.sessions for worker in world.workers))
    openings = [opening for worker in world.workers for opening in worker.sessions]
    assert [opening.prefetch for opening in openings] == [expected] * workers
    # Told again to one that comes back.
    (first, *_) = world.workers
    world.on_loop(first.kill)
    world.on_loop(first.come_back)
    world.until(lambda: len(first.sessions) == 2)
    assert first.sessions[1].prefetch == expected


def test_whoever_does_not_answer_is_named(make_world):
    world = make_world(ps=3)
    world.ps[0].alive = world.ps[2].alive = False
    with pytest.raises(DeadlineExceededError, match=r"task:0.*\b1\b.*task:2") as raised:
        # In which task 1 answers, however busy we are.
        world.connect(connect=1.0, turn=0.0)
    assert "task:1" not in str(raised.value)


def test_without_any_worker_there_is_no_session(make_world):
    world = make_world(workers=2)
    for worker in world.workers:
        worker.alive = False
    with pytest.raises(DeadlineExceededError, match=r"task:0.*task:1"):
        world.connect(connect=0.05, turn=0.0)


def test_a_cluster_of_another_coordinator_is_busy(world):
    world.ps[0].busy = True
    with pytest.raises(BusyError, match="taken"):
        world.connect(turn=0.05)


def test_a_cluster_that_another_program_holds_is_refused_at_once(world):
    world.ps[0].busy = True
    with pytest.raises(HeldError, match="taken"):
        world.connect(connect=1e6, turn=0.0, patience=1e6)


def test_who_may_be_gone_is_waited_for_and_who_is_heard_again_is_not(world):
    (ps,) = world.ps
    said = [BusyError("who was killed"), BusyError("again")]

    @ps.wrap
    def held(handle, message):
        if isinstance(message, OpenSession) and said:
            raise said.pop(0)
        return handle(message)

    world.connect(turn=0.0, patience=1e3)
    assert not said
    world.session.close()
    said += [BusyError("who was stopped"), HeldError("who goes on")]
    with pytest.raises(HeldError, match="who goes on"):
        world.connect(connect=1e6, turn=0.0, patience=1e6)


def test_a_cluster_that_becomes_free_is_taken(world):
    (ps,) = world.ps
    ps.busy = True

    @ps.wrap
    def once(handle, message):
        try:
            return handle(message)
        finally:
            ps.busy = False

    world.connect()
    assert ps.sessions


def restart_when_asked_again(worker, ps):
    """Restarts the server while the worker opens the session, when all servers have."""
    asked = []

    @worker.wrap
    def restarted(handle, message):
        asked.append(message)
        if len(asked) == 1:  # the servers have not joined yet
            raise BusyError("asked again a moment later")
        if len(asked) == 2:
            ps.kill()
            ps.come_back()
        return handle(message)


def test_a_server_that_restarts_in_the_opening_is_taken_empty(make_world, caplog):
    """Nothing was created yet, so nothing is lost: all tasks enter another session."""
    world = make_world(ps=2, workers=1)
    (worker,), (lost, other) = world.workers, world.ps
    restart_when_asked_again(worker, lost)
    with caplog.at_level("WARNING"):
        session = world.connect()
    first, second = (message.session for message in other.sessions)
    assert lost.session == other.session == worker.session == second
    assert session.session == second != first
    assert lost.hello.incarnation == session.cluster.ps[0].hello.incarnation
    assert session.cluster.outage_error is None
    assert "task:0 was lost before anything was created" in caplog.text
    assert "restore" not in caplog.text, "the program need not do anything"
    world.on_loop(session.cluster.renewal.renew_servers)
    world.until(lambda: all(task.is_ready for task in session.cluster.ps))
    assert {ps.sessions[-1].origin for ps in world.ps} == {session.origin}, (
        "keys are counted from it in later sessions, too"
    )


def test_a_silent_worker_holds_up_no_session_that_starts_again(make_world, monkeypatch):
    """It joins later, as it would if no server had been lost."""
    monkeypatch.setattr(_cluster, "WORKERS_JOIN_SECONDS", 0.01)
    world = make_world(ps=1, workers=2)
    (worker, silent), (lost,) = world.workers, world.ps
    restart_when_asked_again(worker, lost)
    silent.handle = lambda message: None
    session = world.connect(connect=1e6)  # which it would wait for
    assert len({opening.session for opening in lost.sessions}) == 2
    assert session.cluster.outage_error is None


def test_the_session_tells_tasks_who_they_are(make_world):
    world = make_world(ps=2, workers=3)
    world.connect()
    world.until(lambda: all(task.sessions for task in world.tasks.values()))
    assert [w.sessions[0].index for w in world.workers] == [0, 1, 2]
    assert {w.sessions[0].worker_count for w in world.workers} == {3}
    assert world.workers[0].sessions[0].ps == ["ps0:1", "ps1:1"]
    session = world.session
    assert (len(session.cluster.ps), session.worker_count) == (2, 3)
    assert (session.platform, session.devices) == ("cpu", 2)


@pytest.mark.parametrize(("longest", "warnings"), [(5.0, 0), (0.1, 1)])
def test_a_task_that_is_still_held_is_an_alarm_only_if_that_lasts(
    world, caplog, monkeypatch, longest, warnings
):
    monkeypatch.setattr(_task_links, "LONGEST_PAUSE_SECONDS", longest)
    caplog.set_level("WARNING")
    (ps,) = world.ps
    refused = []

    @ps.wrap
    def held_at_first(handle, message):
        if isinstance(message, OpenSession) and not refused:
            refused.append(message)
            raise BusyError("ps:0 serves a coordinator that has died")
        return handle(message)

    world.connect()
    assert refused
    assert len(caplog.messages) == warnings
