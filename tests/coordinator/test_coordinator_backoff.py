"""Hiccups of a parameter server: few are forgiven, and old ones forgotten."""

import pytest

from zstrat.coordinator._outcomes import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STRIKES,
    WINDOW_SECONDS,
    RetryBackoff,
)


def test_a_burst_of_reports_is_one_strike_and_all_try_again_together():
    backoff = RetryBackoff()
    times = [1.0 + i * FIRST_PAUSE / 100 for i in range(100)]
    again = {round(now + backoff.delay(now), 9) for now in times}
    assert again == {1.0 + FIRST_PAUSE}
    assert len(backoff.strikes) == 1


def test_failures_that_last_are_an_error_after_growing_pauses():
    backoff, now, pauses = RetryBackoff(), 0.0, []
    while not backoff.is_exhausted(now):
        pauses.append(backoff.delay(now))
        now = backoff.pause_end
    assert len(pauses) == STRIKES
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE])
    assert not backoff.is_exhausted(now + WINDOW_SECONDS)


def test_three_hiccups_in_a_month_do_not_end_a_job():
    backoff = RetryBackoff()
    for i in range(100):
        assert backoff.delay(i * (WINDOW_SECONDS + 1)) == pytest.approx(FIRST_PAUSE)
