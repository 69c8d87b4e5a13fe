"""What a recorder makes of the times of steps: phases, rates, shares, captures."""

import pytest

from zstrat.telemetry import (
    PS_PHASES,
    WORKER_PHASES,
    EagerNotes,
    EagerTimes,
    Histogram,
    Phase,
    PhaseSpan,
    Rate,
    Recorder,
    SpanCapture,
    StepTimes,
    StepUnderWay,
    TimeShares,
)


def full(number, at=0.0):
    """It waits 1 s, is drawn in 2, pulled for 3, and runs for 4."""
    at = float(at)
    return (number, at, at + 3, 4.0, at + 10, 2.0, at + 3, at + 6, 3.0, 32)


def recent(plain, phase):
    return Histogram.from_plain(plain["phases"][phase]["recent"])


def test_each_phase_is_what_the_times_say():
    recorder = Recorder(WORKER_PHASES)
    recorder.ran(StepTimes(full=[*full(1), *full(2, 1)]), 11.0)
    recorder.spent(Phase.PUSH, 1, 10.0, 15.0)
    plain = recorder.plain(15.5)
    took = {phase: recent(plain, phase).summary() for phase in WORKER_PHASES}
    wanted = {"wait": 1.0, "draw": 2.0, "pull": 3.0, "compute": 4.0, "push": 5.0}
    assert {phase: each["mean"] for phase, each in took.items()} == wanted
    assert {phase: each["max"] for phase, each in took.items()} == wanted
    counts = {phase: each["count"] for phase, each in took.items()}
    assert counts == dict.fromkeys(("wait", "draw", "pull", "compute"), 2) | {"push": 1}


def test_steps_that_were_prepared_together_neither_draw_nor_pull():
    recorder = Recorder(WORKER_PHASES)
    # Each of the two waits for a second, and runs for three.
    recorder.ran(StepTimes(quick=[1.0, 3.0, 1.0, 3.0]), 8.0)
    plain = recorder.plain(8.0)
    counted = {phase: recent(plain, phase).count for phase in WORKER_PHASES}
    assert counted == {"wait": 2, "draw": 0, "pull": 0, "compute": 2, "push": 0}
    assert recent(plain, Phase.WAIT).total == 2.0
    assert recent(plain, Phase.COMPUTE).total == 6.0


def test_what_is_noted_is_digested_in_bulk_and_never_lost():
    recorder = Recorder(WORKER_PHASES)
    for number in range(10_000):
        times = StepTimes(quick=[1.0, 0.5])
        recorder.ran(times, 2.0)
        assert len(recorder._steps.quick) <= 4097 * 2
        recorder.spent(Phase.PUSH, number, 2.0, 3.0)
        recorder.stale("ps:0", number % 4)
    plain = recorder.plain(3.0)
    assert recent(plain, Phase.COMPUTE).count == recent(plain, Phase.PUSH).count == 1e4
    stale = Histogram.from_plain(plain["staleness"]["ps:0"]["total"])
    assert stale.buckets() == [[0, 2500], [1, 2500], [2, 2500], [3, 2500]]


def test_the_shares_of_a_thread_add_up_to_its_time():
    recorder = Recorder(WORKER_PHASES)
    for second in range(20):
        now = second + 0.5
        # 0.25 s drawn and 0.5 s run in each second, a tenth stalled, a tenth idle.
        step = (1, now - 1, now - 0.6, 0.5, now, 0.25, now - 0.6, now - 0.5, 0.1, 8)
        recorder.ran(StepTimes(list[float](), [*step], 0.1, 0.1, {1: 0.1}), now)
    shares = recorder.plain(19.75)["time"]
    wanted = {"draw": 0.25, "compute": 0.5, "pull": 0.1, "idle": 0.1}
    assert shares == pytest.approx(wanted, rel=0.1)
    assert sum(shares.values()) <= 1
    assert recorder.plain(19.75)["stalls"] == pytest.approx({"ps:1": 0.1}, rel=0.1)
    rates = recorder.plain(19.75)["rates"]
    assert rates["steps_per_s"] == pytest.approx(1.0, rel=0.15)
    assert rates["examples_per_s"] == pytest.approx(8.0, rel=0.15)


def test_an_eager_step_computes_while_it_does_nothing_else():
    recorder = Recorder(WORKER_PHASES)
    recorder.begin_capture(SpanCapture(10, 100.0, lambda: (0, 0)), 0.0)
    phases = [(Phase.DRAW, 2, 2.5), (Phase.PULL, 3, 4), (Phase.PULL, 5, 6)]
    notes = EagerNotes([*phases, (Phase.PUSH, 6, 7.5)], 32, [(1, 3)])
    recorder.ran(StepTimes(eager=[EagerTimes(7, 0.0, 1.0, 7.0, 8.0, notes)]), 8.0)
    plain = recorder.plain(8.0)
    counts = {phase: recent(plain, phase).count for phase in WORKER_PHASES}
    assert counts == {"wait": 1, "draw": 1, "pull": 2, "compute": 1, "push": 1}
    assert recent(plain, Phase.COMPUTE).total == 7.0
    # Of the seven seconds of its body four and a half were spent with waiting.
    parts = {"draw": 0.5, "pull": 2.0, "push": 1.5, "compute": 3.0}
    assert plain["time"] == {name: part / 7 for name, part in parts.items()}
    stale = Histogram.from_plain(plain["staleness"]["ps:1"]["total"])
    assert stale.buckets() == [[3, 1]]
    spans = set(recorder.end_capture(8.0).spans)
    assert {PhaseSpan(7, *span) for span in phases} < spans
    assert {PhaseSpan(7, Phase.COMPUTE, 1.0, 8.0)} < spans


def test_what_took_longer_than_the_window_fills_it():
    shares = TimeShares()
    shares.add("compute", 60.0, 100.0)
    shares.add("idle", 20.0, 100.0)
    assert shares.shares(100.5) == {"compute": 0.75, "idle": 0.25}
    assert shares.shares(200.0) == {}


def test_a_rate_is_that_of_the_last_ten_seconds():
    rate = Rate(0.0)
    for tenth in range(1, 200):
        rate.add(3, tenth / 10)
    assert rate.per_second(20.0) == pytest.approx(30.0, rel=0.1)
    assert 0 < rate.per_second(28.0) < 10
    assert rate.per_second(40.0) == 0.0
    assert rate.total == 3 * 199


@pytest.mark.parametrize("seconds", [3.0, 15.0, 600.0])
def test_steps_of_any_length_have_a_rate_while_they_run(seconds):
    recorder = Recorder(WORKER_PHASES)
    recorder.start({"pulls": 0.0}, 0.0)
    for number in range(1, 5):
        ended = number * seconds
        recorder.ran(StepTimes(full=[*full(number, ended - 10)]), ended)
        recorder.reach({"pulls": number}, ended)
        if number < 2:
            continue
        for part in (0.0, 0.3, 0.6, 0.9):
            told = recorder.plain(ended + part * seconds)
            assert told["rates"]["steps_per_s"] == pytest.approx(1 / seconds)
            assert told["rates"]["pulls"] == pytest.approx(1 / seconds)
            assert told["rates"]["examples_per_s"] == pytest.approx(32 / seconds)
            assert number < 3 or recent(told, Phase.COMPUTE).count >= 2
    assert recorder.plain(ended + 5 * seconds)["rates"]["steps_per_s"] == 0.0


def test_steps_that_end_together_on_eight_workers_are_a_steady_rate():
    rate = Rate(0.0)
    for round_ in range(1, 6):
        for worker in range(8):
            rate.add(1, 20.0 * round_ + 0.5 * worker)
    for moment in (104.0, 109.0, 115.0, 119.0):
        assert rate.per_second(moment) == pytest.approx(8 / 20, rel=0.2)
    assert rate.per_second(200.0) == 0.0


def test_a_pause_is_no_long_step():
    rate = Rate(0.0)
    for second in (*range(1, 20), *range(1000, 1006)):
        rate.add(100, float(second))
    assert rate.per_second(1005.0) == pytest.approx(60.0)  # of ten seconds
    assert rate.per_second(1016.0) == 0.0


@pytest.mark.parametrize("pause", [30.0, 60.0, 600.0])
def test_pauses_between_epochs_are_no_long_steps(pause):
    rate, now = Rate(0.0), 0.0
    for _ in range(3):
        now += pause
        for _ in range(130):
            now += 0.1
            rate.add(5, now)
        assert rate.per_second(now) == pytest.approx(50.0, rel=0.1)


def test_two_programs_that_are_made_first_are_no_long_steps():
    rate = Rate(0.0)
    rate.add(1, 30.0)
    rate.add(1, 60.0)
    for step in range(1500):
        rate.add(1, 60.0 + step / 100)
    assert rate.per_second(75.0) == pytest.approx(100.0, rel=0.1)


def test_what_an_eager_step_notes_is_bounded():
    notes = EagerNotes()
    for number in range(12_000):
        notes.spent(Phase.PUSH, float(number), number + 0.5)
        notes.aged(0, number)
    assert len(notes.spans) == len(notes.stale) == 4096


def test_what_is_under_way_has_its_share():
    recorder = Recorder(WORKER_PHASES)
    recorder.ran(StepTimes(full=[*full(1)]), 10.0)  # drawn in 2, ran for 4
    under_way = StepUnderWay(Phase.COMPUTE, 2, 10.0)
    told = recorder.plain(16.0, under_way)
    assert told["time"] == pytest.approx({"draw": 2 / 12, "compute": 10 / 12})
    assert told["now"] == {"phase": "compute", "step": 2, "seconds": 6.0}
    assert recorder.plain(60.0, under_way)["time"] == {"compute": 1.0}
    assert recorder.plain(60.0)["now"] == {}


def test_a_capture_has_each_phase_of_the_steps_behind_its_begin():
    recorder = Recorder(WORKER_PHASES)
    recorder.ran(StepTimes(full=[*full(1)]), 10.0)
    told = []
    recorder.on_capture = told.append
    recorder.begin_capture(SpanCapture(100, 100.0, lambda: (0, 0)), 10.0)
    quick = (3, 1.0, 2.0, 3.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0)
    recorder.ran(StepTimes(full=[*full(2), *quick]), 10.1)
    recorder.spent(Phase.PUSH, 2, 10.0, 12.0)
    assert sorted(recorder.end_capture(12.0).spans) == [
        PhaseSpan(2, Phase.COMPUTE, 6.0, 10.0),
        PhaseSpan(2, Phase.DRAW, 1.0, 3.0),
        PhaseSpan(2, Phase.PULL, 3.0, 6.0),
        PhaseSpan(2, Phase.PUSH, 10.0, 12.0),
        PhaseSpan(2, Phase.WAIT, 0.0, 1.0),
        PhaseSpan(3, Phase.COMPUTE, 2.0, 5.0),
        PhaseSpan(3, Phase.WAIT, 1.0, 2.0),
    ]
    assert told == [True, False], "those who give numbers are told to"


def test_a_capture_that_nobody_ends_costs_nothing_for_long():
    recorder = Recorder(WORKER_PHASES)
    told = []
    recorder.on_capture = told.append
    recorder.begin_capture(SpanCapture(100, 15.0, lambda: (0, 0)), 10.0)
    recorder.spent(Phase.PUSH, 1, 14.0, 14.5)
    recorder.spent(Phase.PUSH, 2, 16.0, 16.5)
    recorder.digest(17.0)
    assert told == [True, False]
    kept = recorder.end_capture(30.0).spans
    assert list(kept) == [PhaseSpan(1, Phase.PUSH, 14.0, 14.5)]


def test_a_parameter_server_is_as_busy_as_it_applies():
    recorder = Recorder(PS_PHASES)
    for second in range(12):
        recorder.spent(Phase.APPLY, second, second, second + 0.5)
        recorder.digest(second + 0.5)
    assert recorder.plain(11.6)["time"]["apply"] == pytest.approx(0.5, rel=0.1)


def test_pushes_that_wait_for_one_thread_keep_it_busy_once():
    recorder = Recorder(PS_PHASES)
    for began, ended in ((0.0, 2.0), (1.0, 2.0), (0.5, 3.0), (4.0, 5.0)):
        recorder.spent(Phase.APPLY, 1, began, ended)
    recorder.digest(5.0)
    recorder.spent(Phase.APPLY, 1, 4.5, 6.0)
    recorder.digest(9.0)
    # Busy from 0 to 3 and from 4 to 6; the window begins with the second 5.
    assert recorder.plain(15.0)["time"]["apply"] == pytest.approx(0.5)


def test_what_was_counted_before_the_session_is_not_of_it():
    recorder = Recorder(PS_PHASES)
    recorder.start({"pulls": 1e6, "bytes_in": 5e10}, 100.0)
    recorder.reach({"pulls": 1e6 + 8, "bytes_in": 5e10}, 101.0)
    assert recorder.plain(102.0)["rates"] == {"pulls": 4.0, "bytes_in": 0.0}
    recorder.reach({"pulls": 1e6 + 30, "bytes_in": 5e10}, 110.0)
    assert recorder.plain(110.0)["rates"] == {"pulls": 3.0, "bytes_in": 0.0}


def test_what_is_no_histogram_is_refused():
    plain = {"unit": "seconds", "total": 1.0, "max": 1.0, "buckets": [[1.0, 1]]}
    with pytest.raises(ValueError, match=r"'unit'.*'seconds'.*'total'"):
        Histogram.from_plain(plain)
