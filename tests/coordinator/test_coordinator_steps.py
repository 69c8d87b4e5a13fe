"""The low water against a set that remembers everything."""

from hypothesis import given
from hypothesis import strategies as st

from zstrat.coordinator._steps import Steps


@given(st.permutations(range(1, 30)))
def test_low_water_is_the_lowest_unfinished(order):
    steps = Steps()
    unfinished = {steps.issue() for _ in order}
    for step in order:
        steps.end(step)
        unfinished.discard(step)
        assert steps.low_water == min(unfinished, default=steps.next)
        assert steps.runs <= len(unfinished) + 1
    assert steps.low_water == steps.next
    assert steps.runs == 0


def test_one_slow_step_does_not_make_the_quick_ones_be_remembered():
    steps = Steps()
    slow = steps.issue()
    for _ in range(10_000):
        steps.end(steps.issue())
    assert (steps.low_water, steps.runs) == (slow, 1)
    steps.end(slow)
    assert steps.low_water == steps.next


def test_numbers_go_on_where_an_earlier_coordinator_stopped():
    steps = Steps(first=100)
    assert steps.issue() == 100
    assert steps.low_water == 100
