"""A fleet: the tasks of one run on the hosts of an engine, kept up and ended together.

What a fleet is does not depend on where its tasks run: which task is where, fresh keys
for this run by role, a log for each task, a start that succeeds as a whole or fails by
name, restarts at the same address (at most so many within a window), and an end with
the workers first. `FleetState` decides all that without I/O; `Fleet` carries it out on
one thread; an `Engine` knows three things and nothing else: how to start the process of
a task somewhere, how to hear of its address and its end, and how to end it.

To write an engine:

    class MyEngine:
        name = "my engine"  # for words to a person

        def start(self, launch: TaskLaunch, hear: TaskEvents) -> RunningTask: ...
        def close(self) -> None: ...

- ``start`` returns at once, on the thread of the fleet, what ends the process that it
  began: ``drain()`` (finish what was accepted, then end) and ``kill()`` (now). Both
  return at once, and may be called when the process is gone.
- ``hear.bound(address)`` is called once when the task serves, with the address at which
  others reach it; ``hear.ended(End(...))`` exactly once, whatever happened, also after
  ``kill``. Both take any thread, and never block.
- ``launch`` says all: which task, where (a word of the engine's own, such as a host),
  the keys of its role as file name -> text, variables, and the address that it had
  before (``bind``), "" the first time. An engine that cannot have the same address
  again reports another one: ``fleet.resolver`` is asked again and tells it.
- An `End` with a ``mistake`` is not tried again: it would end so again.

Engines whose process is a command with standard streams (ssh, srun) are `Piped` ones:
they say the words of the command. Those that hold `zs.Server` in an actor make it of
`TaskLaunch.keys` by `write_keys`.
"""

from zstrat.launch._runtime_dir import share as share

from ._beside import run_beside as run_beside
from ._dask import dask as dask
from ._engine import End as End
from ._engine import Engine as Engine
from ._engine import FleetTask as FleetTask
from ._engine import TaskLaunch as TaskLaunch
from ._fleet import Fleet as Fleet
from ._keys import write_keys as write_keys
from ._piped import TaskHost as TaskHost
from ._ray import ray as ray
from ._slurm import GPUS_BY_NODE as GPUS_BY_NODE
from ._slurm import Allocation as Allocation
from ._slurm import requeue as requeue
from ._slurm import slurm as slurm
from ._slurm import slurm_program as slurm_program
from ._ssh import ssh as ssh
from .state import FleetState as FleetState
