"""A fleet: the tasks of one run on the machines of an engine (such as ssh, Slurm, Ray),
which are restarted when they fail and end together.

All fleets have in common: an assignment of tasks to hosts, new keys for each run, a log
for each task, a start that succeeds for all tasks or fails, restarts at the same
address (at most a number within a period of time), and an end with the workers first.
`FleetState` decides all this without I/O; `Fleet` carries its decisions out on one
thread. An `Engine` only starts the process of a task, reports its address and its end,
and ends it.

To write an engine:

    class MyEngine:
        name = "my engine"  # for messages

        def start(self, launch: TaskLaunch, events: TaskEvents) -> RunningTask: ...
        def close(self) -> None: ...

- ``start`` is called on the thread of the fleet and returns at once. It returns an
  object that ends the process: ``drain()`` (finish the accepted requests, then end) and
  ``kill()``. Both return at once, also when the process has ended already.
- Call ``events.bound(address)`` once the task serves, with the address at which others
  reach the task, and ``events.ended(TaskEnd(...))`` exactly once, whatever happened,
  also after ``kill``. Both may be called from any thread, and never block.
- ``launch`` has the task, its host as the engine names it, the keys of its role as file
  name -> text, variables, and its last address (``bind``), "" the first time. An engine
  that cannot use the same address reports another one, which ``fleet.resolver`` returns
  from then on.
- A `TaskEnd` with a ``mistake`` is not followed by a restart.

Engines whose process is a command with standard streams (ssh, srun) derive from `Piped`
and only build the command line. Engines that run `zs.Server` in an actor write the keys
of `TaskLaunch.keys` with `write_keys`.
"""

from zstrat.launch._run_folder import RunKeys as RunKeys
from zstrat.launch._run_folder import write_keys as write_keys
from zstrat.launch._started_tasks import share as share

from ._dask import dask as dask
from ._fleet import Fleet as Fleet
from ._piped import TaskHost as TaskHost
from ._ray import ray as ray
from ._slurm import GPUS_BY_NODE as GPUS_BY_NODE
from ._slurm import Allocation as Allocation
from ._slurm import requeue as requeue
from ._slurm import slurm as slurm
from ._slurm import slurm_program as slurm_program
from .hosts import ssh as ssh
from .state import Engine as Engine
from .state import FleetState as FleetState
from .state import FleetTask as FleetTask
from .state import TaskEnd as TaskEnd
from .state import TaskLaunch as TaskLaunch
