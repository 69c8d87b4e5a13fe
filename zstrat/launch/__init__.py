"""Starting tasks: in this process, as daemons on this machine, and looking at them."""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
