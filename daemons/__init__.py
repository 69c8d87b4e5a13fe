"""The programs that run on each machine.

Each is a short file that reads its arguments and calls `_main`, the only module that
handles signals, logging, exit codes and the service manager.
"""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
