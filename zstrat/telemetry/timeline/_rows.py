"""Spans that overlap, in rows in which none does.

Viewers of time lines draw the spans of one row as a stack of calls: one that begins
within another and ends after it would be drawn wrongly, or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._picture import TimelineRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._picture import TimelineSpan

ROWS: Final = 8
"""Of one kind and task. A worker that has a thousand closures waiting is understood
from eight of them as well, and the curve beside them says how many there are."""


def without_overlaps(
    name: str, spans: Iterable[TimelineSpan], limit: int = ROWS
) -> tuple[list[TimelineRow], list[TimelineSpan]]:
    """The spans in as few rows as there can be, the first row as full as it can be.

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
