"""Parameter servers: variables with versions, and updates that are applied once, each
push as a whole."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
