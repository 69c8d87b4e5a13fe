"""Strategies: they decide where variables are stored, where steps run, and how results
are reduced."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
