"""Starts tasks (parameter servers and workers), in this process, as daemons on this
machine or on other machines, and observes them."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
