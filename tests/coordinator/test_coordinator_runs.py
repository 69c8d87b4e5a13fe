"""A result names the run that it is of; and what a program keeps of its run never comes
in the way of the run."""

import logging

import pytest
from coordinator_fakes import good

import zstrat.program as zs


@zs.function(eager=True)
def bad():
    raise ValueError("boom")


def test_the_first_run(world, coordinator):
    world.on_loop(world.hold)
    value = coordinator.schedule(good)
    assert value.run is None
    world.until(lambda: world.running)
    assert value.run is None
    world.on_loop(world.release)
    assert value.fetch() == 1
    assert value.run.step == value.run.attempt == 1
    assert value.run.worker in {worker.link.name for worker in world.workers}
    assert repr(value).endswith("good READY>")


def test_another_run(world, coordinator):
    values = world.held(coordinator, 2)
    lost, other = world.workers
    step = lost.queue[0][3]
    world.on_loop(lost.kill)
    world.until(lambda: world.workers[1].queue[1:])
    world.on_loop(other.work)
    coordinator.join()
    again, first = sorted(values, key=lambda v: -v.run.attempt)
    assert again.run == (step, other.link.name, 2)
    assert first.run.attempt == 1
    assert f"of attempt 2 on {other.link.name}" in repr(again)


def test_errors_have_one_too_and_what_never_ran_has_none(world):
    coordinator = world.coordinator(closures_in_flight=1)
    world.on_loop(world.hold)
    failing = coordinator.schedule(bad)
    waiting = [coordinator.schedule(good) for _ in range(3)]
    world.until(lambda: world.running == 2)
    world.on_loop(next(w for w in world.workers if w.queue[0][3] == 1).work, 1)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    assert failing.run.attempt == 1
    assert waiting[-1].run is None


def logs_of(coordinator):
    return [line[1:] for line in coordinator.metrics()["logs"]]


def test_a_line_whose_arguments_do_not_fit_is_kept(make_world, monkeypatch):
    coordinator = make_world(ps=1, workers=1).coordinator()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("zstrat.coordinator").warning("%d of %d", "one")
    words = "%d of %d (with arguments that do not fit: ('one',))"
    assert ["program", "WARNING", words] in logs_of(coordinator)


def test_a_task_that_came_back_was_lost(make_world):
    world = make_world(ps=1, workers=2)
    coordinator = world.coordinator()

    def told():
        task = coordinator.metrics()["tasks"]["worker:0"]
        return task["state"], task["last_error"]

    coordinator.schedule(good).fetch()
    world.on_loop(world.workers[0].kill, "the machine is gone")
    world.until(lambda: told()[0] == "lost")
    assert "the machine is gone" in told()[1]
    world.on_loop(world.workers[0].come_back)
    world.until(lambda: told()[0] == "open")
    assert told()[1].startswith("was lost, and has returned: ")


def test_a_time_line_that_cannot_end_keeps_nothing_open(make_world, tmp_path, caplog):
    world = make_world(ps=1, workers=1)
    profile = world.coordinator().profile(tmp_path / "line.json")

    async def fails(timeout):
        raise OSError("a defect")

    def ends():
        world.session.cluster.timeline.close = fails
        world.session.close()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), profile:
        ends()
    assert "ending the time line" in caplog.text
    assert all(task.is_closed for task in world.session.cluster.workers)
