"""Slurm: the tasks of a step, and its lists of nodes.

The tasks of one Slurm step are a cluster. Each task knows its rank and derives the
addresses of all tasks from the list of nodes.

`expand_hostlist` and `expand_tasks_per_node` read Slurm's short forms of the nodes of a
job and of the tasks on each. Law: text in, lists out.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat import config

from ._gpu_shares import before_shares, count_gpus, share_of, take_share
from ._resolver import SourceResolver
from ._spec import ranked_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._spec import ClusterSpec


MAX_HOSTS: Final = 64 * 1024
"""Largest number of hosts in an expanded list, Slurm's own limit for one range. A
longer list is an error that would exhaust the memory."""

_PART: Final = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_PIECE: Final = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASKS_OF_NODES: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands a list such as ``n[1-2],m5,o[3-4,6]-ib[0-1]``, in its order.

    Leading zeros of a range are kept: ``[08-10]`` is 08, 09, 10. With several brackets
    in one name the last one varies fastest, as in ``scontrol show hostnames``.
    Duplicates are kept.

    Raises:
        ValueError: The list is malformed, or has more than 65536 hosts.
    """
    hosts: list[str] = []
    try:
        for part in _parts(hostlist):
            hosts += _hosts(part)
            # Each part is bounded by itself; here their sum is.
            _check_size(len(hosts))
    except ValueError as error:
        words = f"Invalid hostlist format {hostlist!r:.80}: {error}"
        raise ValueError(words) from None
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Expands a list such as ``3(x2),2,1`` to 3, 3, 2, 1.

    Raises:
        ValueError: The list is malformed, or has more than 65536 nodes.
    """
    tasks: list[int] = []
    try:
        for part in tasks_per_node.split(","):
            match = _TASKS_OF_NODES.fullmatch(part)
            if match is None:
                raise ValueError(f"expected 3 or 3(x2), got {part!r}")
            count, times = int(match[1]), int(match[2] or 1)
            # Before the list is made, which 3(x99999999) would make too long for
            # memory.
            _check_size(len(tasks) + times)
            tasks += [count] * times
    except ValueError as error:
        words = f"Invalid tasks-per-node list format {tasks_per_node!r:.80}: {error}"
        raise ValueError(words) from None
    return tasks


def natural_order(host: str) -> tuple[list[str | int], str]:
    """Key that sorts n9 before n10: the order in which Slurm numbers the nodes of a
    job. (n01 and n1 are two hosts; the name itself decides between them.)"""
    parts = re.split(r"([0-9]+)", host)  # texts and numbers in turn, a text first
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], host


def _parts(hostlist: str) -> list[str]:
    """Splits the text at commas outside of brackets."""
    parts: list[str] = []
    at, end = 0, len(hostlist)
    while at < end:
        match = _PART.match(hostlist, at)
        if match is None:
            raise ValueError(f"expected a host at {hostlist[at:]!r:.20}")
        parts.append(match[0])
        at = match.end()
        if at < end and hostlist[at] != ",":
            raise ValueError(f"expected a comma at {hostlist[at:]!r:.20}")
        # The loop would end, and the missing host pass unnoticed.
        if at == end - 1:
            raise ValueError("expected a host after the last comma")
        at += 1
    return parts


def _hosts(part: str) -> list[str]:
    pieces = [
        [match[2]] if match[1] is None else _numbers(match[1])
        for match in _PIECE.finditer(part)
    ]
    # Several brackets multiply.
    _check_size(math.prod(map(len, pieces)))
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"expected 3 or 3-5 in brackets, got {text!r:.40}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {text!r:.40} ends before it begins")
        _check_size(len(numbers) + last - first + 1)
        # That of the first number, as in Slurm: [8-10] is 8, 9, 10.
        width = len(match[1])
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return numbers


def _check_size(hosts: int) -> None:
    if hosts > MAX_HOSTS:
        raise ValueError(f"it has {hosts} entries, and {MAX_HOSTS} is the limit")


T = TypeVar("T")

_RANK: Final = ("SLURM_PROCID",)
_TASKS: Final = ("SLURM_STEP_NUM_TASKS", "SLURM_NUM_TASKS", "SLURM_NTASKS")
_NODES: Final = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_TASKS_PER_NODE: Final = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
"""Names of the variables of Slurm. The alternatives for one value are that of the step
first, then those of the job."""
_STEP: Final = ("SLURM_STEP_ID", "SLURM_STEPID")
_LAST_STEP: Final = 2**32 - 16
"""The last id of a step of ``srun``. Higher ones are those of the batch script, for
example."""
_JOB: Final = ("SLURM_JOB_ID", "SLURM_JOBID")
_USUAL_PORT: Final = 8888
"""The port that TensorFlow uses, for the case that there is no job id."""
_FIRST_PORT, _PORTS, _PORTS_OF_A_JOB = 10_240, 22_528, 64
"""The first port, and the number of ports, below those that Linux and jax choose; and
the number of ports for one job on a node. So 352 consecutive jobs have different ports.
"""
_GPUS: Final = "SLURM_GPUS_ON_NODE"
"""Variable with the number of GPUs of the step on this node, of which a task may see
fewer."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """The host of a rank, and the number of the rank among the tasks on that host."""

    host: str
    local: int


@final
class SlurmClusterResolver(SourceResolver):
    """Reads the environment of a task that ``srun`` started.

    Ranks are assigned to the nodes in Slurm's order, all tasks of a node before the
    next node (Slurm's distribution "block"), and to jobs in the order of their names.
    So ``{"ps": 1, "worker": 3}`` makes rank 0 the parameter server.

    Args:
        jobs: Job -> number of tasks. None: all are workers.
        port_base: Port of the first task on a host; the others use the next ports.
            None: derived from the job id, so that two jobs on a node do not collide;
            8888, as in TensorFlow, without a job id.
        gpus_per_node: None: from Slurm, CUDA_VISIBLE_DEVICES or nvidia-smi.
        gpus_per_task: None: an equal share of the GPUs of a node.
        tasks_per_node: One number for all nodes, or host -> number. None: from Slurm.
        auto_set_gpu: Sets CUDA_VISIBLE_DEVICES of this process to its share at once,
            before jax initializes its devices. Nothing is set if a task has no GPU, or
            sees fewer GPUs than the node has, which are its share then. Another
            resolver in the same process uses the same share.

    Raises:
        RuntimeError: A variable of Slurm is missing; this is the batch script and not a
            task of a step; more GPUs are requested than exist; the jobs have another
            number of tasks than the step; Slurm placed this task elsewhere than in the
            order above.
        ValueError: A variable of Slurm is invalid.
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
        # A second resolver in this process must not divide its share once more.
        env = before_shares(config.environment())
        rank = _number(env, _RANK)
        jobs = {"worker": _number(env, _TASKS)} if jobs is None else jobs
        # Before all other checks, whose messages would lead a batch script astray.
        _require_step(env, sum(jobs.values()))
        layout = _layout(env, tasks_per_node)
        # The fullest node decides, so that all tasks have the same number of GPUs.
        largest = max(layout.values(), default=0)
        per_node = gpus_per_node
        if per_node is None:  # Slurm's number first, as a task may see only its share
            per_node = _number(env, (_GPUS,)) if _GPUS in env else count_gpus(env)
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
                f"SLURM_PROCID={rank}: expected a rank below the number of tasks, "
                f"{len(slots)}; check tasks_per_node, or {_TASKS_PER_NODE[0]}"
            )
        _check_slot(env, rank, slots)
        super().__init__(*names[rank], rpc_layer)
        # Last: nothing is set in the environment if an argument was wrong.
        share = share_of(env, per_node, self._gpus_per_task, slots[rank].local)
        if auto_set_gpu and share:
            take_share(env, share)

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job and index of the task of this process."""
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
    """Refuses a batch script, which has the same variables as rank 0."""
    # Any of these shows a step; which ones are set depends on the version of Slurm.
    step = next((env[name] for name in _STEP if name in env), "")
    by_srun = step.isdecimal() and int(step) < _LAST_STEP
    has_step = _TASKS[0] in env or _NODES[0] in env
    if tasks > 1 and not by_srun and not has_step:
        raise RuntimeError(
            f"this process is not one of the {tasks} tasks, but the batch script of "
            "the job or a process of it, which has the same variables as rank 0. Start "
            "the program with srun in the script: srun python train.py"
        )


def _port(env: Mapping[str, str], given: int | None) -> int:
    if given is not None:
        return given
    if not any(name in env for name in _JOB):
        return _USUAL_PORT
    step = next((env[name] for name in _STEP if name in env), "0")
    # Steps of one job may share a node as well; 89 is coprime to the number of jobs.
    place = _number(env, _JOB) + 89 * (int(step) if step.isdecimal() else 0)
    return _FIRST_PORT + place * _PORTS_OF_A_JOB % _PORTS


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
    """Returns host -> number of tasks, in the order of the ranks."""
    if tasks_per_node is None:
        hosts = _expanded(env, _NODES, expand_hostlist)
        counts = _expanded(env, _TASKS_PER_NODE, expand_tasks_per_node)
        if len(hosts) != len(counts):
            name, text = _variable(env, _TASKS_PER_NODE)
            raise RuntimeError(
                f"{name}={text!r:.80} has {len(counts)} nodes, but "
                f"{_variable(env, _NODES)[0]} has {len(hosts)}: {hosts!r:.80}"
            )
        layout = dict(zip(hosts, counts, strict=True))
    elif isinstance(tasks_per_node, int):
        hosts = _expanded(env, _NODES, expand_hostlist)
        layout = dict.fromkeys(hosts, tasks_per_node)
    else:
        layout = dict(tasks_per_node)
    # Slurm sorts the nodes of a job; its ranks follow that order, not the list's.
    return {host: layout[host] for host in sorted(layout, key=natural_order)}


def _slots(layout: Mapping[str, int]) -> list[_Slot]:
    # Before the list is made: an argument or a variable may say any number.
    tasks = sum(layout.values())
    if tasks > MAX_HOSTS:
        raise RuntimeError(
            f"{tasks} tasks on {len(layout)} nodes: expected at most {MAX_HOSTS}; "
            f"check {_TASKS_PER_NODE[0]}, or tasks_per_node"
        )
    return [
        _Slot(host, local) for host, tasks in layout.items() for local in range(tasks)
    ]


def _cluster(
    jobs: Mapping[str, int], slots: list[_Slot], port_base: int
) -> tuple[ClusterSpec, list[tuple[str, int]]]:
    """Makes the cluster, and the job and index of each rank."""
    wanted = sum(jobs.values())
    if wanted != len(slots):
        raise RuntimeError(
            f"Requested {wanted} tasks but only {len(slots)} were assigned. "
            f"The jobs are {dict(jobs)}"
        )
    addresses = [f"{slot.host}:{port_base + slot.local}" for slot in slots]
    return ranked_cluster(jobs, addresses)


def _check_slot(env: Mapping[str, str], rank: int, slots: list[_Slot]) -> None:
    """Checks that Slurm assigned ranks in the expected order; otherwise every task
    would have the address of another one."""
    host, local = env.get("SLURMD_NODENAME"), env.get("SLURM_LOCALID")
    known = {slot.host for slot in slots}
    if host not in known or local is None:
        return  # the names are not Slurm's, or this is an old version of Slurm
    slot = slots[rank]
    if (host, local) != (slot.host, str(slot.local)):
        raise RuntimeError(
            f"Slurm runs rank {rank} as task {local} of {host}, expected task "
            f"{slot.local} of {slot.host} by the order of the nodes: start the program "
            "with srun --distribution=block"
        )
