"""Spans of a run go to a collector of OpenTelemetry while it runs, and training does
not hear of it when they do not arrive."""

from __future__ import annotations

import http.server
import itertools
import logging
import socket
import sys
import threading

import jax.numpy as jnp
import pytest
from coordinator_fakes import good, note_step

import zstrat as zs

sdk = pytest.importorskip(
    "opentelemetry.sdk.trace.export",
    reason="needs OpenTelemetry, of zstrat[opentelemetry]",
)
otlp = pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    reason="needs OpenTelemetry, of zstrat[opentelemetry]",
)

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: E402
    ExportTraceServiceRequest,
)

LONG = 1e6
"""Seconds: whatever ends, this does not end it."""


class Collector:
    """Takes what is posted to it, as a collector does, or keeps who posts waiting."""

    def __init__(self):
        self.requests, self.is_open = [], threading.Event()
        self.is_open.set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append((self.path, body))
                collector.is_open.wait(60)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # who posted did not wait
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def spans(self):
        """By task, ``(name, step, trace, span, parent, begin, end)``."""
        found = {}
        for _, body in self.requests:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {
                    a.key: a.value.string_value for a in resource.resource.attributes
                }
                assert about["service.name"] == "zstrat"
                for span in resource.scope_spans[0].spans:
                    details = {a.key: a.value.int_value for a in span.attributes}
                    found.setdefault(about["service.instance.id"], []).append(
                        (span.name, details.get("step"), span)
                    )
        return found

    def close(self):
        self.is_open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def world(make_world):
    return make_world(ps=1, workers=1)


def sampled(coordinator):
    """Trains until a sample is taken."""
    while coordinator._core.engine.notes is None:
        coordinator.schedule(good).fetch()


def test_each_step_is_a_trace_over_all_tasks(world, coordinator, collector):
    world.workers[0].ahead = 1000.0
    exporter = otlp.OTLPSpanExporter(endpoint=collector.endpoint)
    with zs.OpenTelemetryExport(
        coordinator, exporter, every=LONG, steps=1000, seconds=LONG
    ) as export:
        sampled(coordinator)
        values = [coordinator.schedule(good) for _ in range(2)]
        coordinator.join()
        steps = [value.run.step for value in values]
        for step in steps:
            world.on_loop(note_step, world, step)
    assert export.dropped == 0
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    spans = collector.spans()
    assert export.sent == sum(map(len, spans.values()))

    def of(task, name, step):
        (span,) = [each for was, of, each in spans[task] if (was, of) == (name, step)]
        return span

    traces = set()
    for step in steps:
        chain = [
            of("program", "schedule", step),
            of("worker:0", "compute", step),
            of("worker:0", "push", step),
            of("ps:0", "apply", step),
        ]
        assert len({span.trace_id for span in chain}) == 1
        traces.add(chain[0].trace_id)
        assert not chain[0].parent_span_id
        for parent, child in itertools.pairwise(chain):
            assert child.parent_span_id == parent.span_id
        # By the day, to the clock of the program.
        took = chain[1].end_time_unix_nano - chain[1].start_time_unix_nano
        assert took == pytest.approx(1000, abs=400)
        assert abs(chain[1].start_time_unix_nano - chain[0].start_time_unix_nano) < 60e9
    assert len(traces) == 2


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_dead_or_hanging_collector_costs_its_spans(
    coordinator, collector, caplog, is_there
):
    endpoint = f"http://127.0.0.1:{closed_port()}/v1/traces"
    if is_there:
        collector.is_open.clear()
        endpoint = collector.endpoint
    exporter = otlp.OTLPSpanExporter(endpoint=endpoint, timeout=0.05)
    with zs.OpenTelemetryExport(coordinator, exporter, every=0.001, steps=2) as export:
        before = 0
        for _ in range(3):  # samples
            while export.dropped == before:
                assert coordinator.schedule(good).fetch() == 1
            before = export.dropped
    assert export.sent == 0
    lost = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["are lost" in record.getMessage() for record in lost] == [True]


class Hangs(sdk.SpanExporter):
    def __init__(self):
        self.calls, self.goes_on = 0, threading.Event()

    def export(self, spans):
        self.calls += 1
        self.goes_on.wait(60)
        return sdk.SpanExportResult.SUCCESS

    def shutdown(self):
        pass


def test_while_it_sends_it_takes_no_other_sample(world):
    coordinator, exporter = world.coordinator(), Hangs()
    with zs.OpenTelemetryExport(coordinator, exporter, every=0.001, steps=1) as export:
        while not exporter.calls:
            coordinator.schedule(good).fetch()
        before = list(world.workers[0].capturing)
        for _ in range(100):
            coordinator.schedule(good).fetch()
        assert exporter.calls == 1
        assert world.workers[0].capturing == before
        exporter.goes_on.set()
    assert export.sent > 0
    assert export.dropped == 0


def test_it_makes_way_for_a_time_line(coordinator, collector, tmp_path):
    exporter = otlp.OTLPSpanExporter(endpoint=collector.endpoint)
    with zs.OpenTelemetryExport(
        coordinator, exporter, every=0.001, steps=1000, seconds=LONG
    ):
        for number in range(3):
            sampled(coordinator)
            with coordinator.profile(tmp_path / f"{number}.json") as profile:
                coordinator.schedule(good).fetch()
            assert profile.problem == ""
            assert profile.about["steps that ended"] == 1


def test_a_session_that_ends_first_ends_it(world, coordinator, collector):
    exporter = otlp.OTLPSpanExporter(endpoint=collector.endpoint)
    with zs.OpenTelemetryExport(coordinator, exporter, every=0.001, seconds=LONG):
        sampled(coordinator)
        world.session.close()


@pytest.mark.parametrize("name", ["every", "steps", "seconds"])
def test_numbers_that_are_none_are_refused(world, name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        zs.OpenTelemetryExport(world.coordinator(), Hangs(), **{name: 0})


def test_without_the_extra_it_says_what_to_install(world, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"\[opentelemetry\]"):
        zs.OpenTelemetryExport(world.coordinator())


def test_it_is_refused_in_a_step(coordinator):

    @zs.function
    def step():
        zs.OpenTelemetryExport(None, Hangs())
        return jnp.float32(1)

    with pytest.raises(RuntimeError, match=r"zs\.OpenTelemetryExport"):
        coordinator.schedule(step)
