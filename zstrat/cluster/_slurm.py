"""A cluster made of the tasks of one Slurm step: each is told its rank, and the rest
follows from the list of nodes by the same rule on all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat import config

from ._gpus import before_shares, count_gpus, share_of, take_share
from ._hostlist import MAX_HOSTS, expand_hostlist, expand_tasks_per_node, natural_order
from ._resolver import SourceResolver
from ._spec import ranked_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._spec import ClusterSpec

T = TypeVar("T")

_RANK: Final = ("SLURM_PROCID",)
_TASKS: Final = ("SLURM_STEP_NUM_TASKS", "SLURM_NUM_TASKS", "SLURM_NTASKS")
_NODES: Final = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_TASKS_PER_NODE: Final = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
"""Names of one fact each: that of the step first, then that of the whole job."""
_STEP: Final = ("SLURM_STEP_ID", "SLURM_STEPID")
_LAST_STEP: Final = 2**32 - 16
"""Steps above it are none of ``srun``: the batch script, for one."""
_JOB: Final = ("SLURM_JOB_ID", "SLURM_JOBID")
_USUAL_PORT: Final = 8888
"""TensorFlow's, for a Slurm that does not number its jobs."""
_FIRST_PORT, _PORTS, _OF_A_JOB = 10_240, 22_528, 64
"""Below those that Linux and jax choose; ports of one job on a node, so that 352 jobs
that follow each other have different ones."""
_GPUS: Final = "SLURM_GPUS_ON_NODE"
"""GPUs of the step on this node, however few of them a task sees."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a rank runs: a host, and its number among the tasks there."""

    host: str
    local: int


@final
class SlurmClusterResolver(SourceResolver):
    """Answers from the environment of a task that ``srun`` started.

    Hosts are taken in the order in which Slurm numbers nodes, each with its tasks one
    after the other (Slurm's distribution "block"); jobs get ranks in the order of their
    names. So ``{"ps": 1, "worker": 3}`` makes rank 0 the parameter server.

    Args:
        jobs: Job -> number of its tasks. None: all are workers.
        port_base: Port of the first task of a host; the next ones take the next ports.
            None: by the number of the job, so that two jobs on a node do not meet;
            8888, as in TensorFlow, where Slurm does not number it.
        gpus_per_node: None: by Slurm, else by CUDA_VISIBLE_DEVICES, else by nvidia-smi.
        gpus_per_task: None: an equal share of the GPUs of a node.
        tasks_per_node: One number for all nodes, or host -> number. None: by Slurm.
        auto_set_gpu: Set CUDA_VISIBLE_DEVICES of this process to its share, at once,
            so that it is done before jax looks for devices. Nothing is set where a task
            has no GPU, nor where it sees fewer than the node has: these are its share.
            A second resolver in the same process finds the same share.

    Raises:
        RuntimeError: A variable of Slurm is missing; this is the batch script and no
            task of a step; more GPUs are asked for than there are; the jobs have
            another number of tasks than the step; Slurm put this task elsewhere than
            the order above says.
        ValueError: A variable of Slurm cannot be read; says which and why.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: Mapping[str, int] | int | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        env = before_shares(config.environment())
        rank = _number(env, _RANK)
        jobs = {"worker": _number(env, _TASKS)} if jobs is None else jobs
        _require_step(env, sum(jobs.values()))
        layout = _layout(env, tasks_per_node)
        largest = max(layout.values(), default=0)
        per_node = _gpus_on_node(env) if gpus_per_node is None else gpus_per_node
        per_task = per_node // max(largest, 1)
        self._gpus_per_task = per_task if gpus_per_task is None else gpus_per_task
        if largest * self._gpus_per_task > per_node:
            raise RuntimeError(
                "Requested more GPUs per node than available. "
                f"{largest} tasks with {self._gpus_per_task} each, of {per_node}"
            )
        slots = _slots(layout)
        self._spec, names = _cluster(jobs, slots, _port(env, port_base))
        if rank >= len(slots):
            raise RuntimeError(
                f"SLURM_PROCID={rank}, and there are {len(slots)} tasks: expected a "
                f"lower rank; check tasks_per_node, or {_TASKS_PER_NODE[0]}"
            )
        _check_place(env, rank, slots)
        super().__init__(*names[rank], rpc_layer)
        share = share_of(env, per_node, self._gpus_per_task, slots[rank].local)
        if auto_set_gpu and share:
            take_share(env, share)

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Job and index of this process."""
        return self.task_type, self.task_id

    def _accelerators(self) -> Mapping[str, int]:
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


def _variable(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    for name in names:
        if name in env:
            return name, env[name]
    raise RuntimeError(
        f"{names[0]} not found in environment. Not running inside a SLURM step? "
        "Start the program with srun"
    )


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    name, text = _variable(env, names)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(f"{name}: expected a number of 0 or more, got {text!r:.80}")
    return int(text)


def _require_step(env: Mapping[str, str], tasks: int) -> None:
    """A batch script has the variables of rank 0, and is no task of the step."""
    step = next((env[name] for name in _STEP if name in env), "")
    by_srun = step.isdecimal() and int(step) < _LAST_STEP
    has_step = _TASKS[0] in env or _NODES[0] in env
    if tasks > 1 and not by_srun and not has_step:
        raise RuntimeError(
            f"this process is not one of the {tasks} tasks: it is the batch script of "
            "the job, or runs in it, and has the variables of rank 0 without being it. "
            "Start the program with srun in the script: srun python train.py"
        )


def _port(env: Mapping[str, str], given: int | None) -> int:
    if given is not None:
        return given
    if not any(name in env for name in _JOB):
        return _USUAL_PORT
    step = next((env[name] for name in _STEP if name in env), "0")
    # Steps of one job may share a node, too: 89 is prime to the number of places.
    place = _number(env, _JOB) + 89 * (int(step) if step.isdecimal() else 0)
    return _FIRST_PORT + place * _OF_A_JOB % _PORTS


def _gpus_on_node(env: Mapping[str, str]) -> int:
    """What a task sees may be its share alone, so it is not counted where Slurm says
    how many there are."""
    return _number(env, (_GPUS,)) if _GPUS in env else count_gpus(env)


def _expanded(
    env: Mapping[str, str], names: tuple[str, ...], expand: Callable[[str], list[T]]
) -> list[T]:
    name, text = _variable(env, names)
    try:
        return expand(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _layout(
    env: Mapping[str, str], tasks_per_node: Mapping[str, int] | int | None
) -> dict[str, int]:
    """Host -> tasks, in the order of the ranks."""
    if tasks_per_node is None:
        hosts = _expanded(env, _NODES, expand_hostlist)
        counts = _expanded(env, _TASKS_PER_NODE, expand_tasks_per_node)
        if len(hosts) != len(counts):
            name, text = _variable(env, _TASKS_PER_NODE)
            raise RuntimeError(
                f"{name}={text!r:.80} is for {len(counts)} nodes, and "
                f"{_variable(env, _NODES)[0]} has {len(hosts)}: {hosts!r:.80}"
            )
        layout = dict(zip(hosts, counts, strict=True))
    elif isinstance(tasks_per_node, int):
        hosts = _expanded(env, _NODES, expand_hostlist)
        layout = dict.fromkeys(hosts, tasks_per_node)
    else:
        layout = dict(tasks_per_node)
    return {host: layout[host] for host in sorted(layout, key=natural_order)}


def _slots(layout: Mapping[str, int]) -> list[_Slot]:
    tasks = sum(layout.values())
    if tasks > MAX_HOSTS:
        raise RuntimeError(
            f"{tasks} tasks on {len(layout)} nodes, and {MAX_HOSTS} is the limit: see "
            f"{_TASKS_PER_NODE[0]}, or tasks_per_node"
        )
    return [
        _Slot(host, local) for host, tasks in layout.items() for local in range(tasks)
    ]


def _cluster(
    jobs: Mapping[str, int], slots: list[_Slot], port_base: int
) -> tuple[ClusterSpec, list[tuple[str, int]]]:
    """The cluster, and the name of each rank in it."""
    wanted = sum(jobs.values())
    if wanted != len(slots):
        raise RuntimeError(
            f"Requested {wanted} tasks but only {len(slots)} were assigned. "
            f"The jobs are {dict(jobs)}"
        )
    addresses = [f"{slot.host}:{port_base + slot.local}" for slot in slots]
    return ranked_cluster(jobs, addresses)


def _check_place(env: Mapping[str, str], rank: int, slots: list[_Slot]) -> None:
    """Slurm says which node this is. Where it deals ranks out in another order, every
    task would be given the address of another one."""
    host, local = env.get("SLURMD_NODENAME"), env.get("SLURM_LOCALID")
    known = {slot.host for slot in slots}
    if host not in known or local is None:
        return  # other names than Slurm's were given, or it is an old Slurm
    slot = slots[rank]
    if (host, local) != (slot.host, str(slot.local)):
        raise RuntimeError(
            f"Slurm runs rank {rank} as task {local} of {host}, and by the order of "
            f"the nodes it is task {slot.local} of {slot.host}: start the program "
            "with srun --distribution=block"
        )
