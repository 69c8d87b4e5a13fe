"""A fleet in an allocation of Slurm: a step for each task, by `srun`.

Steps overlap: a task that ends is started again on its node while the others hold
theirs, and the batch script itself needs a core, too. The launcher's heartbeat goes
over the pipes of srun; besides, all steps end with the job.
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
from zstrat.launch._runtime_dir import own_folder

from ._engine import FleetTask, distribute_tasks
from ._fleet import Fleet
from ._piped import Piped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.config import Settings

    from ._engine import TaskLaunch

GPUS_BY_NODE: Final = (
    "each task is a step of its own here, to which Slurm would not give GPUs as it was "
    "asked; ask for --gpus-per-node=N, which the workers of a node divide among them"
)

_GPUS_BY_TASK: Final = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")

TIMEOUT: Final = 30.0
"""Seconds for a question to Slurm's controller."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm gave to this job: its number, and node -> task slots.

    Each task is a step of its own. A step of a job that has its GPUs by task gets one
    of them, all steps the same one; where it has so many on several nodes together,
    Slurm gives a step none at all. So both are refused.

    Raises:
        ValueError: This is no job of Slurm, or it cannot be read.
    """

    job: str
    slots: Mapping[str, int]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation:
        """The allocation that the variables of a batch script tell of, or of a shell of
        salloc."""
        wanted = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
        missing = [name for name in wanted if not env.get(name)]
        if missing:
            raise ValueError(
                f"this is no allocation of Slurm ({missing[0]} is not set): submit the "
                "program with `zstrat slurm`, or start it in one of salloc or sbatch"
            )
        job, nodes, tasks = (env[name] for name in wanted)
        hosts, counts = expand_hostlist(nodes), expand_tasks_per_node(tasks)
        by_task = [name for name in _GPUS_BY_TASK if name in env]
        if len(hosts) > 1 and "SLURM_GPUS" in env:
            by_task.append("SLURM_GPUS")
        if by_task:
            raise ValueError(
                f"job {job} has {by_task[0]}={env[by_task[0]]}: {GPUS_BY_NODE}"
            )
        return cls(job, dict(zip(hosts, counts, strict=True)))

    def tasks(self, num_ps: int, num_workers: int) -> list[FleetTask]:
        """Who runs where: distributed to the nodes in turn, parameter servers first.

        Raises:
            ValueError: A number cannot be, or there is no room for so many.
        """
        counts = num_ps, num_workers
        if not all(isinstance(n, int) for n in counts) or num_ps < 1 or num_workers < 0:
            raise ValueError(
                f"num_ps={num_ps!r}, num_workers={num_workers!r}: expected 1 or more, "
                "and 0 or more"
            )
        wanted = num_ps + num_workers
        turns = max(self.slots.values(), default=0)
        places = [
            node
            for turn in range(turns)
            for node, count in self.slots.items()
            if turn < count
        ]
        if len(places) < wanted:
            by_node = ", ".join(f"{node}: {n}" for node, n in self.slots.items())
            raise ValueError(
                f"job {self.job} has room for {len(places)} tasks ({by_node}), and "
                f"{num_ps} ps and {num_workers} workers are {wanted}: ask Slurm "
                f"for --ntasks={wanted}"
            )
        return distribute_tasks(num_ps, num_workers, places)


@final
class SlurmEngine(Piped):
    """Runs each daemon as a step of the job that this process is in.

    Raises:
        UnavailableError: There is no `srun` here, or the controller does not say where
            the nodes are.
    """

    name = "slurm"

    def __init__(self, nodes: Sequence[str], cpus: str = "") -> None:
        self._srun = slurm_program("srun")
        self._cpus = ["--cpus-per-task", cpus] if cpus else []
        self._addresses = _addresses(nodes)

    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        task = launch.task
        words = [self._srun, "--exact", "--overlap", "-N1", "-n1", "-w", task.where]
        # What sites set for steps of many tasks would end this one's job, or hide it.
        words += ["--kill-on-bad-exit=0", "--quiet", "--mpi=none", *self._cpus]
        return [*words, f"--job-name={task.job}-{task.index}", *daemon]

    def host(self, task: FleetTask) -> str:
        return self._addresses[task.where]

    def python(self, task: FleetTask) -> str:
        return sys.executable

    def why(self, launch: TaskLaunch, code: int, *, has_served: bool) -> str:
        if has_served:
            return ""
        if code in (126, 127) or "No module named" in launch.said():
            return f"{sys.executable} has no zstrat on {launch.task.where}"
        return ""


def slurm_program(name: str) -> str:
    """One of Slurm's.

    Raises:
        UnavailableError: It is not here.
    """
    found = shutil.which(name)
    if found is None:
        raise UnavailableError(
            f"there is no program {name!r} here: run this where Slurm's commands are, "
            "on a login node or in a job"
        )
    return found


def requeue(job: str) -> str:
    """Has Slurm start the job anew; what it says if it does not, else "". This process
    may be ended by it."""
    asked = [slurm_program("scontrol"), "requeue", job]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stderr.strip() or f"exit code {done.returncode}" * bool(done.returncode)


def _addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Where each node is reached: NodeAddr, which need not be its name."""
    asked = [slurm_program("scontrol"), "show", "node", "--oneliner", ",".join(nodes)]
    try:
        said = subprocess.run(
            asked, capture_output=True, text=True, check=True, timeout=TIMEOUT
        ).stdout
    except subprocess.CalledProcessError as error:
        raise UnavailableError(
            f"Slurm does not say where {', '.join(nodes)} are: {error.stderr.strip()}"
        ) from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"Slurm's controller did not answer scontrol within {TIMEOUT:g} s"
        ) from None
    found = {}
    for line in said.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "NodeName" in facts:
            found[facts["NodeName"]] = facts.get("NodeAddr", facts["NodeName"])
    return {node: found.get(node, node) for node in nodes}


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
    """Parameter servers and workers on the nodes of this job, for this program.

        with zs.launch.slurm(num_ps=2, num_workers=8) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    For a program that runs in a batch script, or in a shell of salloc, itself: without
    srun. `zstrat slurm` submits one that need not know of Slurm at all. Each run has
    keys of its own, which go to the nodes through srun.

    Args:
        num_ps, num_workers: How many of each; the allocation has room for all.
        restarts, window: A task that ends by itself is started again at its address, so
            often at most within so many seconds.
        env: Variables for the tasks, over those of this process. The folder of the
            program comes before a ``PYTHONPATH``.
        logs: "files" in ``directory``, or "terminal".
        directory: Folder for keys and logs, kept; default: a new one, removed at the
            end but for the logs of tasks that ended with an error.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        ValueError: This is no allocation, or too small a one.
        UnavailableError: There is no Slurm here, or a task ended before it was ready;
            quotes what was said.
        DeadlineExceededError: A task was not ready in ``timeouts.connect``.
    """
    found = environment()
    allocation = Allocation.of(found)
    tasks = allocation.tasks(num_ps, num_workers)
    engine = SlurmEngine(list(allocation.slots), found.get("SLURM_CPUS_PER_TASK", ""))
    told = dict(env or {})
    paths = [own_folder(), told.get("PYTHONPATH") or found.get("PYTHONPATH", "")]
    told["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return Fleet(
        engine,
        tasks,
        restarts=restarts,
        window=window,
        env=told,
        logs=logs,
        directory=directory,
        settings=settings,
    )
