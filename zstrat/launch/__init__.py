"""Starting tasks: in this process, as daemons on this machine, and looking at them."""

from typing import TYPE_CHECKING

from zstrat.doors import by_name, fetched_late

if TYPE_CHECKING:
    from zstrat.launch.fleet import GPUS_BY_NODE as GPUS_BY_NODE
    from zstrat.launch.fleet import Fleet as Fleet
    from zstrat.launch.fleet import dask as dask
    from zstrat.launch.fleet import ray as ray
    from zstrat.launch.fleet import requeue as requeue
    from zstrat.launch.fleet import run_beside as run_beside
    from zstrat.launch.fleet import slurm as slurm
    from zstrat.launch.fleet import slurm_program as slurm_program
    from zstrat.launch.fleet import ssh as ssh

    from ._calibrate import SIZES as SIZES
    from ._calibrate import Calibration as Calibration
    from ._calibrate import calibrate as calibrate
    from ._calibrate import calibrate_tasks as calibrate_tasks
    from ._child import Child as Child
    from ._copies import Copies as Copies
    from ._copies import run_copies as run_copies
    from ._doctor import Finding as Finding
    from ._doctor import RunFindings as RunFindings
    from ._doctor import examine as examine
    from ._doctor import examine_run as examine_run
    from ._fork_server import CONTINUED as CONTINUED
    from ._fork_server import LENGTH as LENGTH
    from ._fork_server import STOPPED as STOPPED
    from ._fork_server import WORD as WORD
    from ._fork_server import ForkServer as ForkServer
    from ._fork_server import kept_fork_server as kept_fork_server
    from ._imports import choose_devices as choose_devices
    from ._imports import kept_for_good as kept_for_good
    from ._local import LocalCluster as LocalCluster
    from ._observe import ObservedRun as ObservedRun
    from ._observe import Observer as Observer
    from ._observe import TaskStatus as TaskStatus
    from ._observe import observe as observe
    from ._observe import told_by as told_by
    from ._process_output import ProcessOutput as ProcessOutput
    from ._server import Server as Server
    from ._server import ServerDef as ServerDef
    from ._task import Task as Task
    from ._task import TaskPlace as TaskPlace
    from ._task import serve as serve
    from ._units import write_units as write_units
    from ._worker_join import UNNUMBERED as UNNUMBERED
    from ._worker_join import JoinPlace as JoinPlace
    from ._worker_join import WorkerJoin as WorkerJoin
else:
    __getattr__, __dir__ = fetched_late(
        __name__,
        by_name(
            {
                ".fleet": "GPUS_BY_NODE Fleet dask ray requeue run_beside slurm "
                "slurm_program ssh",
                "._calibrate": "SIZES Calibration calibrate calibrate_tasks",
                "._child": "Child",
                "._copies": "Copies run_copies",
                "._doctor": "Finding RunFindings examine examine_run",
                "._fork_server": (
                    "CONTINUED LENGTH STOPPED WORD ForkServer kept_fork_server"
                ),
                "._imports": "choose_devices kept_for_good",
                "._local": "LocalCluster",
                "._observe": "ObservedRun Observer TaskStatus observe told_by",
                "._process_output": "ProcessOutput",
                "._server": "Server ServerDef",
                "._task": "Task TaskPlace serve",
                "._units": "write_units",
                "._worker_join": "UNNUMBERED JoinPlace WorkerJoin",
            }
        ),
    )
