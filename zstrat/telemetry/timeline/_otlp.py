"""A time line as OpenTelemetry's spans: in the JSON of its protocol (OTLP), or as those
of its own SDK, which is an extra.

The JSON is what a collector takes at ``/v1/traces``, and what its receiver of files
reads. A task is a resource, a span a span. What follows from a call that scheduled a
step is one trace: an arrow makes the span that it leads from the parent, and a second
arrow to the same span becomes a link. Times are those of the day, by the clock of the
program. There are no curves in it: OTLP has these as metrics, which are told as they
are. The spans and traces for the SDK's exporters are the same.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ._picture import earliest, placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace import ReadableSpan as ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter as SpanExporter

    from ._picture import PictureValue, Timeline, TimelineSpan, TimelineTask

    Names = dict[int, "SpanName"]


_INTERNAL = 1
"""Of the kinds of spans: neither of a client nor of a server, for that is not said."""


_GENERATIONS = 16
"""From a call to what it became on a server there are four; arrows know no circle."""


@dataclass(slots=True)
class SpanName:
    """What a span is called, and those that lead to it: the first is its parent."""

    own_trace: str
    span: str
    incoming: list[SpanName] = field(default_factory=list)

    @property
    def trace(self) -> str:
        """The trace of the span that all began with."""
        oldest = self
        for _ in range(_GENERATIONS):
            if not oldest.incoming:
                break
            oldest = oldest.incoming[0]
        return oldest.own_trace


def write_otlp(timeline: Timeline, file: TextIO, day: float) -> None:
    """Writes it in one line, as a request has it.

    Args:
        day: The time of day, in seconds, when the clock of the time line was 0.

    Raises:
        OSError: The file cannot be written.
    """
    names, start = named(timeline), earliest(timeline)
    scope = {"name": "zstrat", "attributes": _attributes(timeline.about)}
    file.write('{"resourceSpans": [')
    for number, task in enumerate(timeline.tasks):
        spans = list(_spans(task, start, day, names))
        resource = {
            "resource": {"attributes": _attributes(_about(task))},
            "scopeSpans": [{"scope": scope, "spans": spans}],
        }
        file.write(", " * (number > 0) + json.dumps(resource))
    file.write("]}\n")


def _about(task: TimelineTask) -> dict[str, str]:
    """The task as a resource, by OpenTelemetry's names."""
    return {
        "service.name": "zstrat",
        "service.instance.id": task.name,
        "zstrat.clock": task.label,
    }


def named(timeline: Timeline) -> Names:
    """The name of each span, by its identity. A trace is called as what it begins
    with."""
    own = secrets.token_hex(8)
    spans = [s for task in timeline.tasks for row in task.rows for s in row.spans]
    names = {
        id(span): SpanName(f"{own}{number:016x}", f"{number:016x}")
        for number, span in enumerate(spans, 1)
    }
    for tail, head in timeline.arrows:
        names[id(head)].incoming.append(names[id(tail)])
    return names


def _spans(
    task: TimelineTask, start: float, day: float, names: Names
) -> Iterator[dict[str, Any]]:
    began = round((day + start) * 1e9)
    for row in task.rows:
        for span, begin, end in placed(row, start):
            yield _span(span, names[id(span)], began + begin, began + end)


def _span(span: TimelineSpan, name: SpanName, begin: int, end: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "traceId": name.trace,
        "spanId": name.span,
        "name": span.name,
        "kind": _INTERNAL,
        # 64 bits are texts in JSON, whose numbers have 53.
        "startTimeUnixNano": str(begin),
        "endTimeUnixNano": str(end),
        "attributes": _attributes(span.details),
    }
    if name.incoming:
        parent, *others = name.incoming
        made["parentSpanId"] = parent.span
        made["links"] = [
            {"traceId": each.trace, "spanId": each.span} for each in others
        ]
    return made


def _attributes(values: Mapping[str, PictureValue]) -> list[dict[str, Any]]:
    return [{"key": _text(key), "value": _value(each)} for key, each in values.items()]


def _value(value: PictureValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": _text(value)}


def _text(text: str) -> str:
    """Without halves of characters, which are no Unicode to who reads this."""
    return text.encode("utf-8", "replace").decode("utf-8")


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
        resource = Resource(_about(task))
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
