"""Hiccups of a parameter server: few are forgiven, and old ones forgotten."""

import pytest

from zstrat.coordinator._outcomes import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STRIKES,
    WINDOW_SECONDS,
    Trouble,
)


def test_a_burst_of_reports_is_one_strike_and_all_try_again_together():
    trouble = Trouble()
    times = [1.0 + i * FIRST_PAUSE / 100 for i in range(100)]
    again = {round(now + trouble.reported(now), 9) for now in times}
    assert again == {1.0 + FIRST_PAUSE}
    assert len(trouble.strikes) == 1


def test_trouble_that_lasts_is_an_error_after_growing_pauses():
    trouble, now, pauses = Trouble(), 0.0, []
    while not trouble.lasts(now):
        pauses.append(trouble.reported(now))
        now = trouble.again_at
    assert len(pauses) == STRIKES
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE])
    assert not trouble.lasts(now + WINDOW_SECONDS)


def test_three_hiccups_in_a_month_do_not_end_a_job():
    trouble = Trouble()
    for i in range(100):
        assert trouble.reported(i * (WINDOW_SECONDS + 1)) == pytest.approx(FIRST_PAUSE)
