"""The time line of a run: the activities of all its tasks on one clock, in one file."""

from typing import TYPE_CHECKING

from ._assembly import PictureValue as PictureValue
from ._assembly import Timeline as Timeline
from ._assembly import TimelineCurve as TimelineCurve
from ._assembly import TimelineRow as TimelineRow
from ._assembly import TimelineSpan as TimelineSpan
from ._assembly import TimelineTask as TimelineTask
from ._assembly import assemble as assemble
from ._assembly import check_place as check_place
from ._assembly import without_overlaps as without_overlaps
from ._assembly import write_timeline as write_timeline
from ._notes import ClockLine as ClockLine
from ._notes import ClockReading as ClockReading
from ._notes import JaxEvent as JaxEvent
from ._notes import JaxEvents as JaxEvents
from ._notes import ProgramNotes as ProgramNotes
from ._notes import RoundTrip as RoundTrip
from ._notes import TaskNotes as TaskNotes
from ._notes import columns_of as columns_of
from ._notes import from_columns as from_columns
from ._notes import from_jax_columns as from_jax_columns
from ._notes import jax_columns as jax_columns
from ._notes import read_clock as read_clock
from ._otlp import has_arrived as has_arrived
from ._otlp import http_exporter as http_exporter
from ._otlp import sdk_spans as sdk_spans

if TYPE_CHECKING:  # of the extra
    from ._otlp import ReadableSpan as ReadableSpan
    from ._otlp import SpanExporter as SpanExporter
