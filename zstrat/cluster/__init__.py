"""Specs of clusters (the addresses of all tasks), and resolvers that find the tasks."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
