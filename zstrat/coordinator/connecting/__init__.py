"""Connects a program to its tasks, one by one and all together: the session on each
task, the link to it, and the addresses of stores that workers get."""

from __future__ import annotations

from ._arrival import AnyTask as AnyTask
from ._arrival import ProbedTask as ProbedTask
from ._arrival import all_joined as all_joined
from ._arrival import arrive as arrive
from ._arrival import devices_of as devices_of
from ._arrival import objection_to as objection_to
from ._cluster_tasks import ClusterTasks as ClusterTasks
from ._cluster_tasks import SessionOptions as SessionOptions
from ._cluster_tasks import StoreDirectory as StoreDirectory
from ._task_links import log_failure as log_failure
from ._task_session import TaskSession as TaskSession
from ._task_session import TaskSessionEvents as TaskSessionEvents
