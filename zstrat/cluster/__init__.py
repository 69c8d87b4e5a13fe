"""Specs of clusters, and resolvers that find the tasks of one."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
