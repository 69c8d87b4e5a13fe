"""Parameter servers: variables with versions, updates that apply once and whole."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
