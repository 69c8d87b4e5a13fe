"""What a program keeps of its run never comes in the way of the run."""

import logging

import pytest
from coordinator_fakes import good


def logs_of(coordinator):
    return [line[1:] for line in coordinator.metrics()["logs"]]


def test_a_line_whose_arguments_do_not_fit_is_kept_and_raises_nothing(
    make_world, monkeypatch
):
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


def test_a_time_line_that_cannot_end_keeps_nothing_from_being_closed(
    make_world, tmp_path, caplog
):
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
