"""What tasks have noted, each by its own clock, becomes one picture."""

import itertools

import pytest

from zstrat.errors import NotFoundError
from zstrat.telemetry import Phase, PhaseSpan, Recorder, SpanCapture, TrafficPoint
from zstrat.telemetry.timeline import (
    ClockLine,
    ClockReading,
    JaxEvent,
    JaxEvents,
    ProgramNotes,
    TaskNotes,
    assemble,
    columns_of,
    from_columns,
    from_jax_columns,
    jax_columns,
)

AHEAD = ClockLine(ClockReading(1100.0, 1000.0, 0.001))
"""A clock that is 1,000 s ahead of the program's."""


def notes(limit=100, **more):
    return ProgramNotes(100.0, waiting=2, running=1, limit=limit, **more)


def drawn(timeline, task):
    """``(begin, end, details)`` by row."""
    (found,) = [each for each in timeline.tasks if each.name == task]
    return {
        row.name: [(s.began, s.ended, dict(s.details)) for s in row.spans]
        for row in found.rows
    }


def test_what_a_program_notes_is_shown():
    own = notes()
    own.schedule(1, 100.0, 100.25)
    own.dispatch("worker:0", 3, 100.5, 100.75)
    own.end(2, 101.0)
    own.fetch(100.5, 101.0)
    timeline = assemble(own, [], 102.0, {"why": "to see"})
    assert drawn(timeline, "program") == {
        "schedule": [(100.0, 100.25, {"step": 1})],
        "dispatch": [(100.5, 100.75, {"closures": 3})],
        "fetch": [(100.5, 101.0, {})],
    }
    waits, runs = timeline.tasks[0].curves
    assert waits.points == [(100.0, 2), (100.25, 3), (100.75, 0)]
    assert runs.points == [(100.0, 1), (100.75, 4), (101.0, 2)]
    assert timeline.about == {"why": "to see"}


def test_spans_of_a_task_are_moved_to_the_clock_of_the_program():
    spans = [
        PhaseSpan(7, Phase.COMPUTE, 1101.0, 1102.0),
        PhaseSpan(-1, Phase.APPLY, 1100.5, 1101.5),
    ]
    timeline = assemble(notes(), [TaskNotes("ps:0", AHEAD, spans)], 110.0, {})
    assert drawn(timeline, "ps:0") == {
        "compute": [(101.0, 102.0, {"step": 7})],
        "apply": [(100.5, 101.5, {})],
    }
    assert timeline.about["ps:0: clock"] == (
        "offset +1000000.000 ms to the program's, error at most 1.000 ms"
    )


def test_what_jax_notes_of_a_worker_lies_in_rows_of_its_own_on_the_same_clock():
    events = [
        JaxEvent("python", "Execute", 1101.0, 1103.0),
        JaxEvent("python", "inside", 1101.5, 1102.0),
        JaxEvent("GPU:0 Stream", "dot", 1104.0, 1105.0),
        JaxEvent("python", "before", 1000.0, 1001.0),
    ]
    sent = jax_columns(JaxEvents(events, "wrong by 0.001 ms at most"))
    task = TaskNotes("worker:0", AHEAD, jax=from_jax_columns(sent))
    timeline = assemble(notes(), [task], 110.0, {})
    assert drawn(timeline, "worker:0") == {
        "jax python": [(101.0, 103.0, {})],
        "jax python 2": [(101.5, 102.0, {})],
        "jax GPU:0 Stream": [(104.0, 105.0, {})],
    }
    names = [s.name for row in timeline.tasks[1].rows for s in row.spans]
    assert names == ["Execute", "inside", "dot"]
    assert timeline.about["worker:0: jax events"] == "wrong by 0.001 ms at most"


@pytest.mark.parametrize(
    "broken",
    [lambda c: c[:2], lambda c: [c[0] + 1, *c[1:]], lambda c: [*c[:2], c[2][:-1]]],
)
def test_columns_of_jax_that_are_none_are_refused(broken):
    columns = jax_columns(JaxEvents([JaxEvent("python", "dot", 1.0, 2.0)], ""))
    with pytest.raises(ValueError, match="columns of jax events"):
        from_jax_columns(broken(columns))


def test_what_lies_outside_is_left_out_and_what_reaches_over_an_end_is_whole():
    times = [(98.0, 99.0), (99.0, 101.0), (104.0, 106.0), (105.5, 106.0)]
    spans = [PhaseSpan(1, Phase.PULL, a + 1000, b + 1000) for a, b in times]
    timeline = assemble(notes(), [TaskNotes("worker:0", AHEAD, spans)], 105.0, {})
    assert [
        (began, ended) for began, ended, _ in drawn(timeline, "worker:0")["pull"]
    ] == times[1:3]


def test_arrows_follow_a_step_to_every_server_and_to_each_of_its_runs():
    own = notes()
    own.schedule(5, 100.0, 100.1)
    own.schedule(6, 100.1, 100.2)

    def ran(name, *phases):
        spans = [PhaseSpan(5, phase, 1101.0 + at, 1101.5 + at) for phase, at in phases]
        return TaskNotes(name, AHEAD, spans)

    tasks = [
        ran("worker:0", (Phase.WAIT, 0), (Phase.COMPUTE, 1)),  # and was lost
        ran("worker:1", (Phase.COMPUTE, 1), (Phase.PUSH, 2)),
        ran("ps:0", (Phase.APPLY, 2)),
        ran("ps:1", (Phase.APPLY, 3)),
    ]
    timeline = assemble(own, tasks, 110.0, {})
    owner = {
        id(span): task.name
        for task in timeline.tasks
        for row in task.rows
        for span in row.spans
    }
    assert sorted(
        (owner[id(tail)], tail.name, owner[id(head)], head.name)
        for tail, head in timeline.arrows
    ) == [
        ("program", "schedule", "worker:0", "compute"),
        ("program", "schedule", "worker:1", "compute"),
        ("worker:0", "compute", "worker:1", "push"),
        ("worker:1", "compute", "worker:1", "push"),
        ("worker:1", "push", "ps:0", "apply"),
        ("worker:1", "push", "ps:1", "apply"),
    ]


def test_what_is_missing_and_what_was_cut_is_told():
    own = notes(limit=1)
    own.schedule(1, 100.0, 100.1)
    own.schedule(2, 100.1, 100.2)
    waits = [PhaseSpan(n, Phase.WAIT, 1100.0, 1101.0) for n in range(10)]
    tasks = [
        TaskNotes("worker:0", AHEAD, waits, is_cut=True, profile="/tmp/there"),
        TaskNotes("worker:1", problem="it was lost"),
    ]
    about = assemble(own, tasks, 110.0, {}).about
    assert about.pop("worker:0: clock")
    assert about == {
        "program: cut": "there was no room to note all that it did",
        "worker:0: cut": "it has noted more: its last spans are here",
        "worker:0: jax profile": "/tmp/there",
        "worker:0: wait not drawn": "2 of wait, as they overlap 8 others",
        "worker:1: missing": "it was lost",
    }


def test_after_so_many_steps_it_is_enough_once():
    called = []
    own = notes(steps=3, done=lambda: called.append(own.steps))
    for ended in (2, 2, 2):
        own.end(ended, 101.0)
        own.schedule(ended, 101.0, 101.0)
    assert called == [4]
    assert (own.steps, own.ended) == (4, [(2, 101.0), (2, 101.0)])
    assert len(own.scheduled) == 1, "nothing is noted any more"
    assert not own.is_full


def test_what_a_task_has_moved_is_a_curve_from_zero():
    points = [
        TrafficPoint(1101.0, 5000, 70),
        TrafficPoint(1102.0, 6000, 70),
        TrafficPoint(1103.5, 9000, 80),
    ]
    timeline = assemble(notes(), [TaskNotes("ps:0", AHEAD, traffic=points)], 103.0, {})
    assert [(c.name, c.unit, c.points) for c in timeline.tasks[1].curves] == [
        ("received", "bytes", [(101.0, 0), (102.0, 1000)]),
        ("sent", "bytes", [(101.0, 0), (102.0, 0)]),
    ]


def captured(limit=100, until=50.0):
    """A recorder that notes a push a second, of which 10 bytes came and 1 went."""
    count = itertools.count(1)

    def moved():
        seconds = next(count)
        return 10 * seconds, seconds

    recorder = Recorder([Phase.APPLY])
    recorder.spent(Phase.APPLY, 99, -2.0, -1.0)  # before anybody asked
    recorder.begin_capture(SpanCapture(limit, until, moved), now=0.0)
    for step in range(5):
        recorder.spent(Phase.APPLY, step, step + 0.25, step + 0.75)
    return recorder.end_capture(now=6.0)


def test_what_a_recorder_captures_travels_in_columns():
    capture = captured()
    spans = [PhaseSpan(n, Phase.APPLY, n + 0.25, n + 0.75) for n in range(5)]
    times = [0.0, 0.75, 1.75, 2.75, 3.75, 4.75, 6.0]
    points = [TrafficPoint(at, 10 * n, n) for n, at in enumerate(times, 1)]
    assert not capture.is_cut
    names, columns = columns_of(capture)
    assert from_columns(names, columns) == (spans, points)
    assert sum(column.nbytes for column in columns) == 25 * 5 + 24 * 7


def test_a_capture_keeps_the_last_and_says_that_there_was_more():
    capture = captured(limit=2)
    assert capture.is_cut
    assert [span.step for span in capture.spans] == [3, 4]


def test_nothing_is_kept_for_somebody_who_does_not_come_back():
    capture = captured(until=2.5)
    assert not capture.is_cut
    assert [span.step for span in capture.spans] == [0, 1, 2]
    assert [point.at for point in capture.traffic] == [0.0, 0.75, 1.75]


def test_a_capture_that_was_not_begun_is_none():
    with pytest.raises(NotFoundError):
        Recorder([Phase.APPLY]).end_capture(0.0)


@pytest.mark.parametrize(
    "broken",
    [lambda c: c[:2], lambda c: [c[0][:1], *c[1:]], lambda c: [*c[:3], c[3][:2]]],
)
def test_columns_that_are_none_are_refused(broken):
    names, columns = columns_of(captured())
    with pytest.raises(ValueError, match="columns of spans"):
        from_columns(names, broken(columns))
    with pytest.raises(ValueError, match="'nap'"):
        from_columns(["nap"], columns)
