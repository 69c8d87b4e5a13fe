"""Hiccups of a parameter server: few are forgiven, and old ones forgotten."""

from zstrat.coordinator._trouble import STRIKES, WINDOW, Trouble


def test_a_burst_of_reports_is_one_strike():
    trouble = Trouble()
    assert {trouble.reported(1.0 + i * 1e-4) for i in range(500)} == {0.2}


def test_trouble_that_lasts_is_an_error_after_growing_pauses():
    trouble, now, pauses = Trouble(), 0.0, []
    while (pause := trouble.reported(now)) is not None:
        pauses.append(pause)
        now += pause
    assert len(pauses) == STRIKES - 1
    assert pauses == sorted(pauses)


def test_three_hiccups_in_a_month_do_not_end_a_job():
    trouble = Trouble()
    assert all(trouble.reported(i * (WINDOW + 1)) == 0.2 for i in range(100))
