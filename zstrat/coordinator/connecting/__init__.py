"""How a program comes to its tasks, one at a time and all of them together."""

from __future__ import annotations

from ._arrival import arrive as arrive
from ._arrival import hail as hail
from ._arrival import known_servers as known_servers
from ._arrival import known_workers as known_workers
from ._open_sessions import Place as Place
from ._open_sessions import SessionClaim as SessionClaim
from ._open_sessions import open_sessions as open_sessions
from ._task_session import MakeTaskLink as MakeTaskLink
from ._task_session import TaskSession as TaskSession
