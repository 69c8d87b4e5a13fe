"""A fleet in a Slurm allocation: each task is a job step, started by `srun`.

Steps overlap, so that a task can be restarted on its node while the others run, and
because the batch script needs a core as well. The launcher's heartbeat goes over the
pipes of srun; besides, all steps end with the job.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, final

from zstrat.cluster import expand_hostlist, expand_tasks_per_node
from zstrat.config import environment
from zstrat.errors import UnavailableError
from zstrat.launch._started_tasks import script_folder

from ._fleet import Fleet
from ._piped import Piped
from .state import FleetTask, assign

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.config import Settings

    from .state import TaskLaunch

GPUS_BY_NODE: Final = (
    "each task is a job step of its own, for which Slurm ignores this request; use "
    "--gpus-per-node=N instead, and the workers of a node divide its GPUs"
)

_GPUS_BY_TASK: Final = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")

TIMEOUT: Final = 30.0
"""Seconds for a request to Slurm's controller."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The id of this Slurm job, and the task slots of each of its nodes.

    Each task is a step of its own. GPUs per task or as a total over several nodes are
    refused: all steps would get the same GPU, or none.

    Raises:
        ValueError: This is not a Slurm job, or its variables are invalid.
    """

    job: str
    slots: Mapping[str, int]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation:
        """Reads the allocation from the variables of a batch script or of salloc."""
        names = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
        missing = [name for name in names if not env.get(name)]
        if missing:
            raise ValueError(
                f"not inside a Slurm allocation ({missing[0]} is not set): submit the "
                "program with `zstrat slurm`, or run it inside sbatch or salloc"
            )
        job, nodes, tasks = (env[name] for name in names)
        hosts, counts = expand_hostlist(nodes), expand_tasks_per_node(tasks)
        by_task = [name for name in _GPUS_BY_TASK if name in env]
        # A total: on one node it is that of the node.
        if len(hosts) > 1 and "SLURM_GPUS" in env:
            by_task.append("SLURM_GPUS")
        if by_task:
            raise ValueError(
                f"job {job} has {by_task[0]}={env[by_task[0]]}: {GPUS_BY_NODE}"
            )
        return cls(job, dict(zip(hosts, counts, strict=True)))

    def tasks(self, num_ps: int, num_workers: int) -> list[FleetTask]:
        """Assigns the tasks round robin to the nodes, parameter servers first.

        Raises:
            ValueError: A number is invalid, or there are too few slots.
        """
        counts = num_ps, num_workers
        if not all(isinstance(n, int) for n in counts) or num_ps < 1 or num_workers < 0:
            raise ValueError(
                f"num_ps={num_ps!r}, num_workers={num_workers!r}: expected 1 or more, "
                "and 0 or more"
            )
        wanted = num_ps + num_workers
        # One task of each node, then the next of each, as long as nodes have slots.
        rounds = max(self.slots.values(), default=0)
        nodes = [
            node
            for number in range(rounds)
            for node, count in self.slots.items()
            if number < count
        ]
        if len(nodes) < wanted:
            by_node = ", ".join(f"{node}: {n}" for node, n in self.slots.items())
            raise ValueError(
                f"job {self.job} has {len(nodes)} task slots ({by_node}), but {num_ps} "
                f"ps and {num_workers} workers need {wanted}: use --ntasks={wanted}"
            )
        return assign(num_ps, num_workers, nodes)


@final
class SlurmEngine(Piped):
    """Runs each daemon as a step of the Slurm job of this process.

    Raises:
        UnavailableError: `srun` is missing, or the controller does not return the
            addresses of the nodes.
    """

    name = "slurm"

    def __init__(self, nodes: Sequence[str], cpus: str = "") -> None:
        self._srun = slurm_program("srun")
        self._cpus = ["--cpus-per-task", cpus] if cpus else []
        self._addresses = _addresses(nodes)

    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        task = launch.task
        # --exact: only the CPUs that the step asks for, and not all of its node.
        # --overlap: other steps may use the same ones, so that a restarted task is not
        # queued behind them. --mpi=none: no library of MPI is started for a daemon.
        command = [self._srun, "--exact", "--overlap", "-N1", "-n1", "-w", task.where]
        # --kill-on-bad-exit overrides a default of many sites, by which a failed task
        # ends its whole step.
        command += ["--kill-on-bad-exit=0", "--quiet", "--mpi=none", *self._cpus]
        return [*command, f"--job-name={task.job}-{task.index}", *daemon]

    def host(self, task: FleetTask) -> str:
        return self._addresses[task.where]

    def python(self, task: FleetTask) -> str:
        return sys.executable

    def why(self, launch: TaskLaunch, code: int, *, has_served: bool) -> str:
        # It began once, so Python and zstrat are there.
        if has_served:
            return ""
        if code in (126, 127) or "No module named" in launch.log_tail():
            return (
                f"{sys.executable} is missing or has no zstrat on {launch.task.where}; "
                "install zstrat in a folder that all nodes share"
            )
        return ""


def slurm_program(name: str) -> str:
    """Returns the path of a command of Slurm.

    Raises:
        UnavailableError: The command is not installed.
    """
    path = shutil.which(name)
    if path is None:
        raise UnavailableError(
            f"Slurm command {name!r} not found: run this on a machine with Slurm's "
            "commands, such as a login node, or in a job"
        )
    return path


def requeue(job: str) -> str:
    """Requeues the Slurm job, which may end this process; returns the error of Slurm,
    or "" if it succeeded."""
    command = [slurm_program("scontrol"), "requeue", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() or f"exit code {done.returncode}" * bool(done.returncode)


def _addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Returns the address (NodeAddr) of each node, which may differ from its name."""
    command = [slurm_program("scontrol"), "show", "node", "--oneliner", ",".join(nodes)]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT
        ).stdout
    except subprocess.CalledProcessError as error:
        raise UnavailableError(
            f"scontrol failed to show the addresses of {', '.join(nodes)}: "
            f"{error.stderr.strip()}"
        ) from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"Slurm's controller did not answer scontrol within {TIMEOUT:g} s"
        ) from None
    addresses = {}
    # One line a node: "NodeName=n1 Arch=x86_64 ... NodeAddr=10.0.0.7 ...". Values may
    # have spaces, but not these two.
    for line in output.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "NodeName" in fields:
            name = fields["NodeName"]
            addresses[name] = fields.get("NodeAddr", name)
    return {node: addresses.get(node, node) for node in nodes}


def slurm(
    num_ps: int = 1,
    num_workers: int = 1,
    *,
    restarts: int = 5,
    window: float = 600.0,
    env: Mapping[str, str] | None = None,
    logs: Literal["files", "terminal"] = "files",
    directory: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
) -> Fleet:
    """Starts parameter servers and workers on the nodes of this Slurm job.

        with zs.launch.slurm(num_ps=2, num_workers=8) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    Call it from a program that a batch script or a shell of salloc runs directly,
    without srun. `zstrat slurm` submits programs that need no code for Slurm. Each run
    has its own keys, which are sent to the nodes through srun.

    Args:
        num_ps, num_workers: Number of parameter servers and workers. The allocation
            needs a task slot for each.
        restarts, window: A task that fails is restarted at its address, at most
            ``restarts`` times within ``window`` seconds.
        env: Variables for the tasks, in addition to those of this process. The folder
            of the program is put in front of ``PYTHONPATH``.
        logs: "files" in ``directory``, or "terminal".
        directory: Folder for keys and logs, which is kept; default: a temporary folder,
            from which only the logs of failed tasks are kept.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        ValueError: This is not a Slurm allocation, or it has too few task slots.
        UnavailableError: Slurm is not installed, or a task ended before it was ready;
            quotes the output.
        DeadlineExceededError: A task was not ready within ``timeouts.connect``.
    """
    process_env = environment()
    allocation = Allocation.of(process_env)
    tasks = allocation.tasks(num_ps, num_workers)
    cpus = process_env.get("SLURM_CPUS_PER_TASK", "")
    engine = SlurmEngine(list(allocation.slots), cpus)
    variables = dict(env or {})
    # Of this process, too: srun passes its environment on, but the task gets these
    # variables later, and they would replace it.
    path = variables.get("PYTHONPATH") or process_env.get("PYTHONPATH", "")
    paths = [script_folder(), path]
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return Fleet(
        engine,
        tasks,
        restarts=restarts,
        window=window,
        env=variables,
        logs=logs,
        directory=directory,
        settings=settings,
    )
