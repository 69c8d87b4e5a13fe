"""Adapters to other libraries: one module for each library, imported by its name."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
