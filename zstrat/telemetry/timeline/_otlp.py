"""Converts a time line to spans of OpenTelemetry's SDK, an optional dependency.

A task is a resource. The call that schedules a step and all spans that follow from it
are one trace: an arrow makes the span where it begins the parent of the span where it
ends, and a second arrow to the same span becomes a link. Times are wall clock times of
the program. Curves are omitted, as they are metrics in OpenTelemetry.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ._assembly import earliest, placed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan as ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter as SpanExporter

    from ._assembly import Timeline

MISSING = "pip install 'zstrat[opentelemetry]'"


def http_exporter() -> SpanExporter:
    """Creates the exporter for a collector at ``OTEL_EXPORTER_OTLP_ENDPOINT``.

    Raises:
        ModuleNotFoundError: The exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"OpenTelemetry's exporter is not installed ({error}): {MISSING}"
        ) from error
    return trace_exporter.OTLPSpanExporter()


def has_arrived(exporter: SpanExporter, spans: list[ReadableSpan]) -> bool:
    """Exports spans, blocking; returns whether the collector accepted them."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    return exporter.export(spans) is SpanExportResult.SUCCESS


def sdk_spans(timeline: Timeline, day: float) -> list[ReadableSpan]:
    """Converts all spans of a time line, in the order of tasks and rows.

    Args:
        day: The wall clock time in seconds at time 0 of the time line.

    Raises:
        ModuleNotFoundError: The SDK is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, TraceFlags
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"OpenTelemetry's SDK is not installed ({error}): {MISSING}"
        ) from error

    numbers, parents = _numbers(timeline), _parents(timeline)
    # Traces of all exports must differ; spans only from those of their trace, so that
    # counting them is enough.
    first_trace = secrets.randbits(64) << 64
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def context(span: int) -> SpanContext:
        oldest = span
        while oldest in parents:  # arrows know no circle
            oldest = parents[oldest][0]
        trace = first_trace + numbers[oldest]
        return SpanContext(trace, numbers[span], is_remote=False, trace_flags=sampled)

    # Rounded once, at the begin: nanoseconds since 1970 do not fit a float64.
    start = earliest(timeline)
    began, scope = round((day + start) * 1e9), InstrumentationScope("zstrat")
    made = []
    for task in timeline.tasks:
        about = {"service.name": "zstrat", "service.instance.id": task.name}
        resource = Resource({**about, "zstrat.clock": task.label})
        for row in task.rows:
            for span, begin, end in placed(row, start):
                causes = [context(each) for each in parents.get(id(span), ())]
                made.append(
                    ReadableSpan(
                        span.name,
                        context(id(span)),
                        causes[0] if causes else None,
                        resource,
                        dict(span.details),
                        links=[Link(each) for each in causes[1:]],
                        start_time=began + begin,
                        end_time=began + end,
                        instrumentation_scope=scope,
                    )
                )
    return made


def _numbers(timeline: Timeline) -> dict[int, int]:
    """Returns the number of each span, from 1 on, by the identity of the span."""
    rows = [row for task in timeline.tasks for row in task.rows]
    spans = [span for row in rows for span in row.spans]
    return {id(span): number for number, span in enumerate(spans, 1)}


def _parents(timeline: Timeline) -> dict[int, list[int]]:
    """Returns, by the identity of each span, the identities of the spans from which
    arrows lead to it."""
    found: dict[int, list[int]] = {}
    for tail, head in timeline.arrows:
        found.setdefault(id(head), []).append(id(tail))
    return found
