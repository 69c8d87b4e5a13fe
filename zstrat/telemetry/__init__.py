"""What a run tells of itself: how long, how often, how stale, and what holds it up."""

from ._capture import SpanCapture as SpanCapture
from ._capture import TrafficPoint as TrafficPoint
from ._histogram import EDGES as EDGES
from ._histogram import RECENT as RECENT
from ._histogram import Histogram as Histogram
from ._histogram import Unit as Unit
from ._histogram import Windowed as Windowed
from ._histogram import merged as merged
from ._limits import Limit as Limit
from ._limits import limits as limits
from ._limits import slowest as slowest
from ._period import over as over
from ._phases import PS_PHASES as PS_PHASES
from ._phases import WORKER_PHASES as WORKER_PHASES
from ._phases import Phase as Phase
from ._phases import PhaseSpan as PhaseSpan
from ._recorder import Recorder as Recorder
from ._recorder import StepTimes as StepTimes
from ._recorder import resident_bytes as resident_bytes
from ._report import TaskTold as TaskTold
from ._report import report as report
from ._scalars import SCALARS as SCALARS
from ._scalars import Scalars as Scalars
from ._throughput import Rate as Rate
from ._throughput import Throughput as Throughput
from ._throughput import TimeShares as TimeShares
