"""What another clock says in our time: against clocks of which the truth is known."""

import random

import pytest

from zstrat.telemetry.timeline import ClockLine, ClockReading, RoundTrip, read_clock


def trip(asked, there, back, offset):
    """A question that takes ``there`` seconds to a clock which is ``offset`` ahead."""
    return RoundTrip(asked, asked + there + offset, asked + there + back)


def test_ways_of_one_length_tell_the_offset_itself():
    assert trip(10.0, 0.5, 0.5, offset=1000.0).offset == 1000.0
    assert trip(10.0, 0.5, 0.5, offset=1000.0).error == 0.5


@pytest.mark.parametrize(("there", "back"), [(0.0, 0.25), (0.25, 0.0), (0.125, 0.5)])
def test_the_error_is_never_exceeded_however_unlike_the_ways_are(there, back):
    found = trip(3.0, there, back, offset=-8.0)
    assert abs(found.offset - -8.0) <= found.error
    assert found.offset - -8.0 == (there - back) / 2


def test_the_shortest_of_all_round_trips_counts():
    ways = random.Random(7)
    trips = [
        trip(float(at), ways.random() / 64, ways.random() / 64, offset=5.0)
        for at in range(100)
    ]
    found = read_clock(trips)
    assert found.error == min(each.error for each in trips)
    assert abs(found.offset - 5.0) <= found.error


def test_no_round_trip_is_no_clock():
    with pytest.raises(ValueError, match="empty"):
        read_clock([])


def test_between_two_readings_the_clock_drifts_evenly():
    # Theirs is 2 s ahead at 100 (ours), and gains a millisecond per second.
    def theirs(ours):
        return ours + 2.0 + (ours - 100.0) * 1e-3

    first = ClockReading(theirs(100.0), 2.0, 0.001)
    last = ClockReading(theirs(300.0), theirs(300.0) - 300.0, 0.003)
    line = ClockLine(first, last)
    for ours in (100.0, 150.0, 300.0):
        assert line.ours(theirs(ours)) == pytest.approx(ours, abs=1e-9)
    assert line.error == 0.003


def test_one_reading_is_a_clock_that_does_not_drift():
    line = ClockLine(ClockReading(50.0, 20.0, 0.25))
    assert (line.ours(50.0), line.ours(90.0)) == (30.0, 70.0)
    assert (line.error, line.drift) == (0.25, 0.0)
