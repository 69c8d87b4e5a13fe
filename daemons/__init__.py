"""The programs that run on each machine.

Each is a short file: read the arguments, say which task this is, and hand over to
`_main`, the only place that knows signals, logging set-up, exit codes and the service
manager.
"""

from typing import TYPE_CHECKING

from zstrat.doors import by_name, fetched_late

if TYPE_CHECKING:
    from zstrat.config import MISTAKEN as MISTAKEN

    from ._arguments import index_of as index_of
    from ._arguments import jobs_of as jobs_of
    from ._arguments import order as order
    from ._arguments import parser as parser
    from ._arguments import settings_of as settings_of
    from ._main import leave as leave
    from ._main import run as run
    from ._main import run_program as run_program
    from ._parent_watch import ParentWatch as ParentWatch
else:
    __getattr__, __dir__ = fetched_late(
        __name__,
        by_name(
            {
                "zstrat.config": "MISTAKEN",
                "._arguments": "index_of jobs_of order parser settings_of",
                "._main": "leave run run_program",
                "._parent_watch": "ParentWatch",
            }
        ),
    )
