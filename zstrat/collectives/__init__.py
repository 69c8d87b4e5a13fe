"""Ranks that compute together: schedules, groups, memory that one host shares."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
