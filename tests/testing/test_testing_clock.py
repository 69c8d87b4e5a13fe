"""A clock that moves when it is told to."""

import pytest

from zstrat.testing import FakeClock


def test_time_passes_only_when_it_is_told_to():
    clock = FakeClock(100.0)
    assert clock() == clock.time() == 100.0
    clock.advance(2.5)
    assert clock() == 102.5
    with pytest.raises(ValueError, match="seconds=-1"):
        clock.advance(-1)


def test_calls_are_made_in_the_order_in_which_they_are_due_each_at_its_time():
    clock, seen = FakeClock(), []
    clock.call_later(3.0, lambda: seen.append(("late", clock())))
    clock.call_at(1.0, lambda word: seen.append((word, clock())), "early")
    clock.call_later(9.0, seen.append, "never")
    clock.advance(3.0)
    assert seen == [("early", 1.0), ("late", 3.0)]
    assert [timer.due for timer in clock.timers] == [9.0]


def test_a_call_that_sets_a_timer_again_is_made_as_often_as_it_is_due():
    clock, seen = FakeClock(), []

    def beat():
        seen.append(clock())
        clock.call_later(1.0, beat)

    beat()
    clock.advance(3.5)
    assert seen == [0.0, 1.0, 2.0, 3.0]
    assert clock() == 3.5


def test_a_cancelled_call_is_not_made():
    clock, seen = FakeClock(), []
    clock.call_later(1.0, seen.append, "never").cancel()
    assert clock.timers == ()
    clock.advance(2.0)
    assert seen == []


def test_the_next_timer_says_how_long_it_was_waited_for():
    clock, seen = FakeClock(), []
    clock.call_later(2.0, seen.append, "a")
    clock.advance(0.5)
    assert clock.advance_to_next() == 1.5
    assert (seen, clock()) == (["a"], 2.0)
    with pytest.raises(LookupError):
        clock.advance_to_next()
