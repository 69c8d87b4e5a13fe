"""The low water against a set that remembers everything."""

from coordinator_fakes import good
from hypothesis import given
from hypothesis import strategies as st

from zstrat.coordinator import _fences
from zstrat.coordinator._steps import Steps
from zstrat.wire import RaiseMark


@given(st.permutations(range(1, 30)))
def test_low_water_is_the_lowest_unfinished(order):
    steps = Steps()
    unfinished = {steps.issue() for _ in order}
    for step in order:
        steps.end(step)
        unfinished.discard(step)
        assert steps.low_water == min(unfinished, default=steps.next)
        assert len(steps.above) <= len(unfinished) + 1
    assert steps.low_water == steps.next
    assert not steps.above


def test_one_slow_step_does_not_make_the_quick_ones_be_remembered():
    steps = Steps()
    slow = steps.issue()
    for _ in range(10_000):
        steps.end(steps.issue())
    assert (steps.low_water, len(steps.above)) == (slow, 1)
    steps.end(slow)
    assert steps.low_water == steps.next


def test_numbers_go_on_where_an_earlier_coordinator_stopped():
    steps = Steps(first=100)
    assert steps.issue() == 100
    assert steps.low_water == 100


def test_the_servers_hear_how_far_steps_are_over(make_world, monkeypatch):
    monkeypatch.setattr(_fences, "INTERVAL", 0.0)
    world = make_world(ps=2, workers=1)
    told = [ps.heard(RaiseMark, answers=False) for ps in world.ps]
    coordinator = world.coordinator(closures_in_flight=4)
    for _ in range(50):
        coordinator.schedule(good)
    coordinator.join()
    coordinator.schedule(good)
    coordinator.join()
    for marks in told:
        assert {mark.session for mark in marks} == {world.session.session}
        numbers = [mark.low_water for mark in marks]
        assert numbers == sorted(numbers)
        assert numbers[-1] == 51, "all before the last one were over when that went out"
