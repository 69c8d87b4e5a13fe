"""When an error is raised, every step has had its effect or never will."""

import asyncio

import pytest
from coordinator_fakes import good

import zstrat.program as zs
from zstrat.errors import CancelledError, PSUnavailableError, ResultLostError


@zs.function(eager=True)
def bad(text):
    raise ValueError(text)


@pytest.fixture
def failing(make_world):
    """A world in which one worker has failed with step 1 and another one has step 2;
    two more steps wait."""
    world = make_world(ps=2, workers=2)
    coordinator = world.coordinator(closures_in_flight=1)
    world.on_loop(world.hold)
    coordinator.schedule(bad, args=("boom",))
    values = [coordinator.schedule(good) for _ in range(3)]
    world.until(lambda: world.running == 2)
    bad_one, other = sorted(world.workers, key=lambda w: w.queue[0][3])
    return world, coordinator, values, bad_one, other


def test_a_step_that_was_applied_is_not_called_cancelled(failing):
    world, coordinator, (lost, *waiting), bad_one, other = failing
    world.ps[0].applied.add(2)
    world.on_loop(other.kill)
    world.on_loop(bad_one.queue.sort, key=lambda item: item[3])
    world.on_loop(bad_one.work, 1)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    with pytest.raises(ResultLostError) as raised:
        lost.fetch()
    assert raised.value.step == 2
    words = str(raised.value)
    assert "applied on /job:ps/task:0; were not applied on /job:ps/task:1" in words
    assert f"lost with {other.link.name}" in words
    assert "again would apply them twice" in words
    for value in waiting:
        with pytest.raises(CancelledError):
            value.fetch()
    assert coordinator.metrics()["low_water"] == 5
    assert coordinator.done()


@pytest.mark.parametrize("when", ["before the error", "while all is cancelled"])
def test_one_that_was_applied_nowhere_may_be_scheduled_again(failing, when):
    world, coordinator, (lost, *_), bad_one, other = failing
    engine = coordinator._core.engine
    if when == "before the error":
        world.on_loop(other.kill)
        world.on_loop(bad_one.work, 1)
    else:
        world.on_loop(bad_one.work, 1)
        world.on_loop(_when, world, engine, other.kill)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    with pytest.raises(CancelledError):
        lost.fetch()
    for ps in world.ps:
        assert [fence.low_water for fence in ps.fences] == [5]
        assert ps.fences[0].asked == [2]


def _when(world, engine, act):
    """Acts while all is cancelled after the error; on the loop."""
    before = engine.loop.cancel_waiting

    def cancel():
        before()
        world.session.portal.call_soon(act)

    engine.loop.cancel_waiting = cancel


def test_the_error_waits_for_the_servers(failing):
    world, coordinator, (lost, *_), bad_one, other = failing
    world.ps[1].silent = True
    world.on_loop(bad_one.work, 1)
    world.on_loop(other.kill)
    engine = coordinator._core.engine
    with pytest.raises(TimeoutError):
        coordinator.join(timeout=0.05)
    assert engine.queue.phase.value == "fencing"
    assert not lost.is_ready
    world.ps[1].silent = False
    world.on_loop(world.ps[1].link.cut, "for a moment")
    world.on_loop(world.ps[1].come_back, same=True)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    with pytest.raises(CancelledError):
        lost.fetch()


def test_a_server_that_is_lost_cannot_tell(failing):
    world, coordinator, (lost, *_), bad_one, other = failing
    world.on_loop(bad_one.work, 1)
    world.on_loop(other.kill)
    world.on_loop(world.ps[1].kill)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    with pytest.raises(ResultLostError) as raised:
        lost.fetch()
    words = str(raised.value)
    assert "may have been applied on /job:ps/task:1" in words
    assert "again may apply them twice" in words


def test_a_fence_says_that_what_a_server_held_is_gone(world, coordinator):
    """It came back empty: to wait for it is not one of the remedies."""
    assert coordinator.schedule(good).fetch() == 1
    world.on_loop(world.ps[0].kill)
    world.on_loop(world.ps[0].come_back)
    world.until(lambda: world.session.cluster.ps[0].gone)

    async def rest():
        async with world.session.at_rest():
            pass

    with pytest.raises(PSUnavailableError) as raised:
        asyncio.run(rest())
    assert raised.value.lost


def test_an_error_that_left_nobody_in_doubt_is_fenced_too(world, coordinator):
    coordinator.schedule(bad, args=("boom",))
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    assert [(f.low_water, f.asked) for f in world.ps[0].fences] == [(2, [])]


def test_a_shutdown_says_what_may_have_been_applied(failing):
    _, coordinator, (running, *waiting), *_ = failing
    coordinator.shutdown()
    with pytest.raises(CancelledError):
        running.fetch()
    for value in waiting:
        with pytest.raises(CancelledError):
            value.fetch()


def test_many_doubtful_steps_are_asked_about_behind_the_fence(make_world, monkeypatch):
    monkeypatch.setattr("zstrat.coordinator._fences.STEPS_PER_MESSAGE", 2)
    world = make_world(workers=2)
    coordinator = world.coordinator(closures_in_flight=5)
    world.on_loop(world.hold)
    coordinator.schedule(bad, args=("boom",))
    values = [coordinator.schedule(good) for _ in range(9)]
    world.until(lambda: world.running == 10)
    bad_one, other = sorted(world.workers, key=lambda w: w.queue[0][3])
    lost = [item[3] for item in other.queue]
    world.ps[0].applied.update(lost[::2])
    world.on_loop(bad_one.work, 1)
    world.on_loop(other.kill)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    fences = world.ps[0].fences
    assert [f.low_water for f in fences] == [0, 0, 11]
    assert tuple(fences[0].over[0]) == (0, 11)
    said = {step: values[step - 2].error for step in lost}
    kinds = [type(said[step]) for step in lost]
    assert kinds == [ResultLostError, CancelledError] * 2 + [ResultLostError]
