"""The variables of one parameter server: values, versions, and the updates that were
applied."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
