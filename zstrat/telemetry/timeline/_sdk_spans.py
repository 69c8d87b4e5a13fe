"""A time line as spans of OpenTelemetry's own SDK, as its exporters take them.

The same spans and traces as those of the file (`_otlp`); the SDK is an extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._otlp import SpanName, named
from ._picture import earliest, placed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan as ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter as SpanExporter

    from ._picture import Timeline

MISSING = "pip install 'zstrat[opentelemetry]'"


def http_exporter() -> SpanExporter:
    """The exporter for a collector at ``OTEL_EXPORTER_OTLP_ENDPOINT``.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"OpenTelemetry's exporter is not installed ({error}): {MISSING}"
        ) from error
    return trace_exporter.OTLPSpanExporter()


def has_arrived(exporter: SpanExporter, spans: list[ReadableSpan]) -> bool:
    """Sends the spans; whether the collector has taken them. Blocks for as long as the
    exporter does."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    return exporter.export(spans) is SpanExportResult.SUCCESS


def sdk_spans(timeline: Timeline, day: float) -> list[ReadableSpan]:
    """All spans, in the order of tasks and rows.

    Args:
        day: The time of day, in seconds, when the clock of the time line was 0.

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

    def context(name: SpanName) -> SpanContext:
        trace, span = int(name.trace, 16), int(name.span, 16)
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace, span, is_remote=False, trace_flags=flags)

    names, start = named(timeline), earliest(timeline)
    began, scope = round((day + start) * 1e9), InstrumentationScope("zstrat")
    made = []
    for task in timeline.tasks:
        resource = Resource(
            {
                "service.name": "zstrat",
                "service.instance.id": task.name,
                "zstrat.clock": task.label,
            }
        )
        for row in task.rows:
            for span, begin, end in placed(row, start):
                name = names[id(span)]
                parents = [context(each) for each in name.incoming]
                made.append(
                    ReadableSpan(
                        span.name,
                        context(name),
                        parents[0] if parents else None,
                        resource,
                        dict(span.details),
                        links=[Link(each) for each in parents[1:]],
                        start_time=began + begin,
                        end_time=began + end,
                        instrumentation_scope=scope,
                    )
                )
    return made
