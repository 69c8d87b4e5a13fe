"""Who is in a cluster, and where a process learns it."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
