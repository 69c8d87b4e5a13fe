"""The time line of a run, taken from all tasks of a session at a time."""

from ._asking import CapturedTask as CapturedTask
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._timeline_run import TimelineRun as TimelineRun
