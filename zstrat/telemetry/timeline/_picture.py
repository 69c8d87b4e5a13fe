"""What a time line shows, in a file or as spans of OpenTelemetry.

A *row* belongs to a task and has spans one after the other; what overlaps is put into
several rows (`without_overlaps`). An arrow leads from one span to another one. A curve
is a number that changes. All times are seconds by one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


PictureValue = str | int | float


@dataclass(frozen=True, slots=True, eq=False)
class TimelineSpan:
    """Something that took a while. ``details`` are shown when it is selected."""

    name: str
    began: float
    ended: float
    details: Mapping[str, PictureValue] = field(default_factory=dict)


@dataclass(slots=True)
class TimelineRow:
    """Spans of which none begins before the one in front of it has ended."""

    name: str
    spans: list[TimelineSpan] = field(default_factory=list)


@dataclass(slots=True)
class TimelineCurve:
    """A number, from each of these moments on. ``unit``: "bytes" or "count"."""

    name: str
    unit: str
    points: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class TimelineTask:
    """One process. ``label``: what has to be known about it, such as its clock."""

    name: str
    label: str = ""
    rows: list[TimelineRow] = field(default_factory=list)
    curves: list[TimelineCurve] = field(default_factory=list)


@dataclass(slots=True)
class Timeline:
    """A whole time line. ``about`` says what the file is, and what it lacks."""

    tasks: list[TimelineTask] = field(default_factory=list)
    arrows: list[tuple[TimelineSpan, TimelineSpan]] = field(default_factory=list)
    about: dict[str, PictureValue] = field(default_factory=dict)


def earliest(timeline: Timeline) -> float:
    """The first moment that is in it, from which its file counts; 0 if it is empty."""
    begins = [
        span.began for task in timeline.tasks for row in task.rows for span in row.spans
    ]
    points = [
        at for task in timeline.tasks for curve in task.curves for at, _ in curve.points
    ]
    return min((*begins, *points), default=0.0)


def placed(row: TimelineRow, start: float) -> Iterator[tuple[TimelineSpan, int, int]]:
    """The spans, each with its begin and end in nanoseconds since ``start``: none is
    empty, as no arrow would find it, and none begins before the last one has ended."""
    end = 0
    for span in row.spans:
        begin = max(round((span.began - start) * 1e9), end)
        end = max(round((span.ended - start) * 1e9), begin + 1)
        yield span, begin, end


ROWS: Final = 8
"""Of one kind and task. A worker that has a thousand closures waiting is understood
from eight of them as well, and the curve beside them says how many there are."""


def without_overlaps(
    name: str, spans: Iterable[TimelineSpan], limit: int = ROWS
) -> tuple[list[TimelineRow], list[TimelineSpan]]:
    """The spans in as few rows as there can be, the first row as full as it can be.

    Viewers of time lines draw the spans of one row as a stack of calls: one that begins
    within another and ends after it would be drawn wrongly, or not at all.

    Returns:
        The rows, and the spans for which there was no place in so many.
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
