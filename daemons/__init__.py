"""The programs that run on each machine.

Each is a short file: read the arguments, say which task this is, and hand over to
`_main`, the only place that knows signals, logging set-up, exit codes and the service
manager.
"""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
