"""zstrat in the hands of other libraries: a module for each, imported by its name."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
