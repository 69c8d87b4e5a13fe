"""The file of a time line, and its spans for OpenTelemetry, say what is in it."""

import gzip
import json
from dataclasses import replace

import pytest

from zstrat.telemetry.timeline import (
    Timeline,
    TimelineCurve,
    TimelineRow,
    TimelineSpan,
    TimelineTask,
    check_place,
    sdk_spans,
    without_overlaps,
    write_timeline,
)

SCHEDULE = TimelineSpan("schedule", 100.0, 100.00002, {"step": 7})
COMPUTE = TimelineSpan("compute", 100.001, 100.004, {"step": 7, "loss": 0.5, "id": -3})
AFTERWARDS = TimelineSpan("compute", 100.004, 100.004, {"step": 8, "of": "Zoë \ud800"})
APPLY = TimelineSpan("apply", 100.0045, 100.005, {"step": 7})
TIMELINE = Timeline(
    [
        TimelineTask(
            "program",
            "",
            [TimelineRow("schedule", [SCHEDULE])],
            [TimelineCurve("queue", "count", [(100.0, 1.0), (100.002, 0.0)])],
        ),
        TimelineTask(
            "worker:0", "+1 ms", [TimelineRow("compute", [COMPUTE, AFTERWARDS])]
        ),
        TimelineTask(
            "ps:0",
            "",
            [TimelineRow("apply", [APPLY])],
            [TimelineCurve("received", "bytes", [(100.005, 4096.0)])],
        ),
    ],
    [(SCHEDULE, COMPUTE), (COMPUTE, APPLY)],
    {"steps": 2, "error": 0.25, "worker:1: missing": "it was lost"},
)
SPANS = {
    ("program", "schedule"): [("schedule", 0, 20_000)],
    ("worker:0", "compute"): [
        ("compute", 1_000_000, 4_000_000),
        ("compute", 4_000_000, 4_000_001),  # of no length: an arrow would not find it
    ],
    ("ps:0", "apply"): [("apply", 4_500_000, 5_000_000)],
}
"""By task and row: name, begin and end in nanoseconds since the first moment."""
CURVES = {
    ("program", "queue"): [(0, 1.0), (2_000_000, 0.0)],
    ("ps:0", "received"): [(5_000_000, 4096.0)],
}
ARROWS = {("schedule", "compute"), ("compute", "apply")}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """By suffix."""
    folder = tmp_path_factory.mktemp("lines") / "not there yet"
    places = {
        suffix: check_place(folder / f"line{suffix}")
        for suffix in (".json", ".json.gz")
    }
    for place in places.values():
        nbytes = write_timeline(TIMELINE, place)
        assert nbytes == len(place.read_bytes())
    assert sorted(folder.iterdir()) == sorted(places.values()), "nothing else is left"
    return places


REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "ts", "id", "pid", "tid"},
    "f": {"name", "cat", "ts", "id", "pid", "tid", "bp"},
    "C": {"name", "ts", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s", "args"},
}
"""By phase; nothing else is in an event but its phase."""


@pytest.fixture(scope="module")
def events(files):
    read = json.loads(files[".json"].read_text("utf-8"))
    assert read["displayTimeUnit"] in ("ms", "ns")
    assert read["otherData"] == TIMELINE.about
    for event in read["traceEvents"]:
        assert set(event) == REQUIRED[event["ph"]] | {"ph"}
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 1) > 0
    return read["traceEvents"]


def test_the_compressed_file_has_the_same_content(files):
    unpacked = gzip.decompress(files[".json.gz"].read_bytes())
    assert unpacked == files[".json"].read_bytes()


def named(events):
    """Names of tasks, and of rows by task and number."""
    tasks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {
        (e["pid"], e["tid"]): (tasks[e["pid"]], e["args"]["name"])
        for e in events
        if e["name"] == "thread_name"
    }
    return tasks, rows


def test_json_has_the_spans_of_each_row_and_none_within_another(events):
    _, names = named(events)
    rows = {}
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1e3)
            span = event["name"], begin, begin + round(event["dur"] * 1e3)
            rows.setdefault(names[event["pid"], event["tid"]], []).append(span)
    assert rows == SPANS


def test_json_has_the_curves(events):
    tasks, _ = named(events)
    curves = {}
    for event in events:
        if event["ph"] == "C":
            ((_, value),) = event["args"].items()
            point = round(event["ts"] * 1e3), value
            key = tasks[event["pid"]], event["name"]
            curves.setdefault(key, []).append(point)
    assert curves == CURVES


def test_json_has_both_ends_of_each_arrow_at_the_begin_of_its_span(events):
    spans = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    ends = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            span = spans[event["pid"], event["tid"], event["ts"]]
            ends[event["ph"]][event["id"]] = span
    assert ends["s"].keys() == ends["f"].keys()
    assert {(ends["s"][n], ends["f"][n]) for n in ends["s"]} == ARROWS


def test_json_tells_what_is_known_of_spans_tasks_and_the_file(events):
    known = [event["args"] for event in events if event["ph"] == "X"]
    assert {"step": 7, "loss": 0.5, "id": -3} in known
    assert {"step": 8, "of": "Zoë \ud800"} in known
    (about,) = [e["args"] for e in events if e["name"] == "about this file"]
    assert about == TIMELINE.about
    labels = [e["args"]["labels"] for e in events if e["name"] == "process_labels"]
    assert labels == ["", "+1 ms", ""]


def test_opentelemetry_has_a_trace_for_each_call():
    pytest.importorskip(
        "opentelemetry.sdk.trace",
        reason="needs OpenTelemetry, of zstrat[opentelemetry]",
    )
    # A second arrow to one span: it has one parent, and a link.
    timeline = replace(TIMELINE, arrows=[*TIMELINE.arrows, (AFTERWARDS, APPLY)])
    day = 1_700_000_000
    spans = sdk_spans(timeline, day)
    start = (day + 100) * 10**9
    found = {}
    for span in spans:
        task = span.resource.attributes["service.instance.id"]
        times = span.start_time - start, span.end_time - start
        found.setdefault(task, []).append((span.name, *times))
    assert found == {task: told for (task, _), told in SPANS.items()}
    schedule, compute, other, apply = [span.context for span in spans]
    assert [span.parent for span in spans] == [None, schedule, None, compute]
    assert schedule.trace_id == compute.trace_id == apply.trace_id != other.trace_id
    assert [link.context for link in spans[3].links] == [other]
    assert len({span.context.span_id for span in spans}) == 4
    assert spans[1].attributes == {"step": 7, "loss": 0.5, "id": -3}


def test_a_name_that_says_no_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\*\.json.*line\.xml"):
        check_place(tmp_path / "line.xml")


def test_a_place_where_no_file_can_be_is_refused_before_anything_is_taken(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"a\.json"):
        check_place(tmp_path / "a.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"b\.json"):
        check_place(tmp_path / "file" / "b.json")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    place = check_place(tmp_path / "line.json")
    place.write_text("before")
    bad = Timeline([TimelineTask("a", curves=[TimelineCurve("b", "c", [(0.0, 1j)])])])
    with pytest.raises(TypeError):
        write_timeline(bad, place)
    assert [each.name for each in tmp_path.iterdir()] == ["line.json"]
    assert place.read_text() == "before"


def test_spans_that_overlap_are_put_into_as_few_rows_as_there_can_be():
    times = [(0, 4), (1, 2), (2, 5), (3, 6), (4, 7)]
    spans = [TimelineSpan("pull", float(a), float(b)) for a, b in times]
    rows, left = without_overlaps("pull", reversed(spans))
    assert not left
    assert [row.name for row in rows] == ["pull", "pull 2", "pull 3"]
    drawn = [[(s.began, s.ended) for s in row.spans] for row in rows]
    assert drawn == [[(0, 4), (4, 7)], [(1, 2), (2, 5)], [(3, 6)]]


def test_spans_beyond_the_last_row_are_named():
    spans = [TimelineSpan("wait", 0.0, 1.0 + end) for end in range(5)]
    rows, left = without_overlaps("wait", spans, limit=3)
    assert [len(row.spans) for row in rows] == [1, 1, 1]
    assert [span.ended for span in left] == [4.0, 5.0]
