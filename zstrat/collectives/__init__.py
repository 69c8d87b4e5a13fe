"""Collective operations among ranks: groups, schedules of algorithms, and memory that
ranks of one host share."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
