"""The strategies: where variables live, where steps run, how results meet."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
