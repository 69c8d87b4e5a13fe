"""A result names the run that it is of."""

import pytest
from coordinator_fakes import good

import zstrat.program as zs


@zs.function(eager=True)
def bad():
    raise ValueError("boom")


def test_the_first_run(world):
    coordinator = world.coordinator()
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


def test_another_run(world):
    coordinator = world.coordinator()
    world.on_loop(world.hold)
    values = [coordinator.schedule(good) for _ in range(2)]
    world.until(lambda: world.running == 2)
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
