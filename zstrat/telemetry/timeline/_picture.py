"""The contents of a time line, for a file or for OpenTelemetry.

A *row* belongs to a task and has consecutive spans; overlapping spans are divided among
several rows (`without_overlaps`). An arrow leads from one span to another. A curve is a
number that changes over time. All times are in seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


PictureValue = str | int | float


@dataclass(frozen=True, slots=True, eq=False)
class TimelineSpan:
    """A named interval. ``details`` are shown when it is selected."""

    name: str
    began: float
    ended: float
    details: Mapping[str, PictureValue] = field(default_factory=dict)


@dataclass(slots=True)
class TimelineRow:
    """Spans that do not overlap, in their order."""

    name: str
    spans: list[TimelineSpan] = field(default_factory=list)


@dataclass(slots=True)
class TimelineCurve:
    """Values of a number and the times from which they hold. ``unit``: "bytes" or
    "count"."""

    name: str
    unit: str
    points: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class TimelineTask:
    """One process. ``label``: remarks, such as the error of its clock."""

    name: str
    label: str = ""
    rows: list[TimelineRow] = field(default_factory=list)
    curves: list[TimelineCurve] = field(default_factory=list)


@dataclass(slots=True)
class Timeline:
    """A whole time line. ``about``: information about the file and missing records."""

    tasks: list[TimelineTask] = field(default_factory=list)
    arrows: list[tuple[TimelineSpan, TimelineSpan]] = field(default_factory=list)
    about: dict[str, PictureValue] = field(default_factory=dict)


def earliest(timeline: Timeline) -> float:
    """Returns the earliest time, which is time 0 of the file; 0 if it is empty."""
    begins = [
        span.began for task in timeline.tasks for row in task.rows for span in row.spans
    ]
    points = [
        at for task in timeline.tasks for curve in task.curves for at, _ in curve.points
    ]
    return min((*begins, *points), default=0.0)


def placed(row: TimelineRow, start: float) -> Iterator[tuple[TimelineSpan, int, int]]:
    """Yields the spans with begin and end in nanoseconds since ``start``. Adjusts them
    so that no span is empty, as arrows need a span, and none overlaps the previous."""
    end = 0
    for span in row.spans:
        begin = max(round((span.began - start) * 1e9), end)
        end = max(round((span.ended - start) * 1e9), begin + 1)
        yield span, begin, end


ROWS: Final = 8
"""Number of rows of one kind and task. Eight of a thousand waiting closures of a worker
are enough to see, and a curve shows their number."""


def without_overlaps(
    name: str, spans: Iterable[TimelineSpan], limit: int = ROWS
) -> tuple[list[TimelineRow], list[TimelineSpan]]:
    """Divides the spans among as few rows as possible, filling the first rows first.

    Viewers draw the spans of one row as a stack of calls: a span that begins within
    another one and ends after it would be drawn wrongly, or not at all.

    Returns:
        The rows, and the spans that did not fit.
    """
    rows: list[TimelineRow] = []
    left: list[TimelineSpan] = []
    for span in sorted(spans, key=lambda span: (span.began, span.ended)):
        row = next((row for row in rows if row.spans[-1].ended <= span.began), None)
        if row is None and len(rows) < limit:
            row = TimelineRow(f"{name} {len(rows) + 1}" if rows else name)
            rows.append(row)
        if row is None:
            left.append(span)
        else:
            row.spans.append(span)
    return rows, left
