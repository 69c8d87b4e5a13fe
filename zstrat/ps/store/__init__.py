"""The variables of one server: values, versions, what was applied already."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
