"""The time line of a run, taken from all tasks of a session at a time."""

from ._profile import MAX_BYTES as MAX_BYTES
from ._profile import SECONDS as SECONDS
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._timeline_run import TimelineRun as TimelineRun
