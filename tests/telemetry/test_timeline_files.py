"""The file of a time line says what is in the time line: in each of its formats, by a
reader that is not ours."""

import base64
import gzip
import json
import time
from dataclasses import replace

import pytest

from zstrat.telemetry.timeline import (
    Timeline,
    TimelineCurve,
    TimelineRow,
    TimelineSpan,
    TimelineTask,
    check_place,
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
        for suffix in (".json", ".json.gz", ".pftrace")
    }
    for place in places.values():
        nbytes = write_timeline(TIMELINE, place)
        assert nbytes == len(place.read_bytes())
    assert sorted(folder.iterdir()) == sorted(places.values()), "nothing else is left"
    return places


@pytest.fixture(scope="module")
def trace(files):
    protos = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
        reason="needs perfetto, of zstrat[dev]",
    )
    read = protos.Trace()
    read.ParseFromString(files[".pftrace"].read_bytes())
    unknown = pytest.importorskip("google.protobuf.unknown_fields")
    for message in messages_in(read):
        assert not len(unknown.UnknownFieldSet(message)), message
    return read


def messages_in(message):
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from messages_in(inner)


@pytest.fixture(scope="module")
def tracks(trace):
    """Names of task and row or curve, by the number of their track."""
    described = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in trace.packet
        if packet.HasField("track_descriptor")
    }
    return {
        uuid: (described[track.parent_uuid].process.process_name, track.name)
        for uuid, track in described.items()
        if track.parent_uuid
    }


def test_protobuf_has_the_spans_of_each_row_in_order(trace, tracks):
    rows, open_spans = {}, {}
    for packet in trace.packet:
        event = packet.track_event
        if event.type == event.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_spans, "a span within another one"
            open_spans[event.track_uuid] = event.name, packet.timestamp
        elif event.type == event.TYPE_SLICE_END:
            span = *open_spans.pop(event.track_uuid), packet.timestamp
            rows.setdefault(tracks[event.track_uuid], []).append(span)
    assert not open_spans
    assert rows == SPANS


def test_protobuf_has_the_curves(trace, tracks):
    curves, units = {}, {}
    for packet in trace.packet:
        event, track = packet.track_event, packet.track_descriptor
        if event.type == event.TYPE_COUNTER:
            point = packet.timestamp, event.double_counter_value
            curves.setdefault(tracks[event.track_uuid], []).append(point)
        if track.HasField("counter"):
            units[track.name] = track.counter.Unit.Name(track.counter.unit)
    assert curves == CURVES
    assert units == {"queue": "UNIT_COUNT", "received": "UNIT_SIZE_BYTES"}


def test_protobuf_has_an_arrow_from_each_tail_to_its_head(trace):
    tails, heads = {}, {}
    for packet in trace.packet:
        event = packet.track_event
        tails |= dict.fromkeys(event.flow_ids, event.name)
        heads |= dict.fromkeys(event.terminating_flow_ids, event.name)
    assert len(tails) == len(heads) == len(ARROWS)
    assert {(name, heads[number]) for number, name in tails.items()} == ARROWS


def test_protobuf_tells_what_is_known_of_spans_tasks_and_the_file(trace):
    events = [p.track_event for p in trace.packet if p.HasField("track_event")]
    known = [{a.name: value_of(a) for a in e.debug_annotations} for e in events]
    assert {"step": 7, "loss": 0.5, "id": -3} in known
    assert {"step": 8, "of": "Zoë \\ud800"} in known
    (about,) = [
        told
        for told, event in zip(known, events, strict=True)
        if event.name == "about this file"
    ]
    assert about == TIMELINE.about
    labels = [
        list(p.track_descriptor.process.process_labels)
        for p in trace.packet
        if p.track_descriptor.HasField("process")
    ]
    assert labels == [[], ["+1 ms"], []]


def value_of(annotation):
    return getattr(annotation, annotation.WhichOneof("value"))


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


def test_otlp_has_a_trace_for_each_call(tmp_path):
    trace_pb2 = pytest.importorskip(
        "opentelemetry.proto.trace.v1.trace_pb2",
        reason="needs opentelemetry-proto, of zstrat[dev]",
    )
    json_format = pytest.importorskip("google.protobuf.json_format")
    # A second arrow to one span: it has one parent, and a link.
    timeline = replace(TIMELINE, arrows=[*TIMELINE.arrows, (AFTERWARDS, APPLY)])
    place = check_place(tmp_path / "line.otlp.json")
    before = time.time() - time.monotonic()
    write_timeline(timeline, place)
    after = time.time() - time.monotonic()
    told = json.loads(place.read_text())
    # Its JSON has these in hexadecimal, where protobuf's own has base 64.
    for of in told["resourceSpans"]:
        for span in of["scopeSpans"][0]["spans"]:
            for ids in (span, *span.get("links", ())):
                for key in {"traceId", "spanId", "parentSpanId"} & set(ids):
                    ids[key] = base64.b64encode(bytes.fromhex(ids[key])).decode()
    read = json_format.ParseDict(told, trace_pb2.TracesData())
    spans, found = {}, {}
    for of in read.resource_spans:
        task = next(
            each.value.string_value
            for each in of.resource.attributes
            if each.key == "service.instance.id"
        )
        for span in of.scope_spans[0].spans:
            spans[span.span_id] = span
            assert (len(span.trace_id), len(span.span_id)) == (16, 8)
            begin = span.start_time_unix_nano * 1e-9 - 100.0
            assert begin >= before - 1e-5
            assert begin <= after + 0.01
            length = span.end_time_unix_nano - span.start_time_unix_nano
            found.setdefault(task, []).append((span.name, length))
    assert found == {
        task: [(name, end - begin) for name, begin, end in rows]
        for (task, _), rows in SPANS.items()
    }
    schedule, compute, other, apply = spans.values()
    assert [each.parent_span_id for each in spans.values()] == [
        b"",
        schedule.span_id,
        b"",
        compute.span_id,
    ]
    assert schedule.trace_id == compute.trace_id == apply.trace_id != other.trace_id
    assert [(link.trace_id, link.span_id) for link in apply.links] == [
        (other.trace_id, other.span_id)
    ]
    loss = [each for each in compute.attributes if each.key == "loss"]
    assert [each.value.double_value for each in loss] == [0.5]


def test_a_name_that_says_no_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"json\.gz"):
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
