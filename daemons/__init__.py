"""The programs that run on each machine.

Each is a short file: read the arguments, say which task this is, and hand over to
`_main`, the only place that knows signals, logging set-up, exit codes and the service
manager.
"""

from ._arguments import jobs_of as jobs_of
from ._arguments import order as order
from ._arguments import parser as parser
from ._parent_watch import ParentWatch as ParentWatch
