"""The resolver of the cluster that this process was started in, whoever started it.

Each launcher has its own variables. They become one value, a `Launch`: how many
processes were started together, which of them this is, and where each is reached, if
anything says that. Slurm has more to say, and a resolver of its own.

What counts is how many processes were started together (the step), never how many there
could be (the allocation): one program that runs by itself in an allocation of many
tasks is alone.

Law of that: it is told the environment, and the full name of this host; it asks nobody,
so that every launcher can be tried without one.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat import config

from ._gpus import take_part
from ._hostlist import MAX_HOSTS
from ._ports import agreed_port
from ._resolver import SimpleClusterResolver
from ._slurm import SlurmClusterResolver
from ._spec import host_and_port, ranked_cluster
from ._tf_config import TFConfigClusterResolver

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ._resolver import ClusterResolver


_COUNTS: Final = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "JAX_NUM_PROCESSES": "JAX_PROCESS_ID",
    "NUM_PROCESSES": "PROCESS_ID",
    "SKYPILOT_NUM_NODES": "SKYPILOT_NODE_RANK",
}
"""By the variable of the number of processes, that of a process's own number: of Open
MPI, of MPICH and its kin, of Slurm's ``srun``, of Kubeflow's jobs for JAX, of SkyPilot.
MPI first: its processes may have been started by one task of Slurm on each node."""

_COMMON: Final = "NUM_PROCESSES"
"""Too common a name to mean anything without the number of the process."""
_INDEX: Final = "JOB_COMPLETION_INDEX"
"""Which pod of an indexed Job this is; Kubernetes does not say of how many."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one launcher started this process: as ``rank`` of ``size``.

    ``said_by`` is the variable that says so, ``rank_by`` the one with the rank;
    ``addresses`` are those of all ranks, None if nothing says them, and ``lack`` is
    then what is missing, in words.
    """

    said_by: str
    rank_by: str
    size: int
    rank: int
    addresses: tuple[str, ...] | None = None
    lack: str = ""

    @property
    def is_slurm(self) -> bool:
        """Whether Slurm's own resolver knows where all are."""
        return self.said_by.startswith("SLURM_")

    @property
    def is_mpi(self) -> bool:
        """Whether MPI says it: it is known where all are if they are on one host."""
        return self.said_by.startswith(("OMPI_", "PMI_"))


def launched_together(env: Mapping[str, str]) -> tuple[str, int, str] | None:
    """The variable that says that several processes were started together, how many,
    and the variable with the number of this one; None: no variable says so."""
    for name, rank in _COUNTS.items():
        if name == _COMMON and rank not in env:
            continue
        text = env.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 1:
            return name, int(text), rank
    return None


def launch_in(env: Mapping[str, str], host: str = "") -> Launch | None:
    """How this process was started as one of several: the first launcher that says
    where all are, else the first that says that there are several; None: no one does.

    Args:
        host: The full name of this host, ``pod-0.service.namespace.svc``; pods of an
            indexed Job are named after it.

    Raises:
        ValueError: A variable has a value that it cannot have; names it.
    """
    found = list(_launches(env, host))
    for each in found:  # srun may speak MPI's languages, too, and knows more
        if each.is_slurm and (each.size, each.rank) == (found[0].size, found[0].rank):
            return each
    known = (each for each in found if each.addresses is not None or each.is_slurm)
    return next(known, next(iter(found), None))


def _launches(env: Mapping[str, str], host: str) -> Iterator[Launch]:
    for name, rank_name in _COUNTS.items():
        size = _count(env, name)
        if size is None or size < 2:
            continue
        if rank_name == "SLURM_PROCID":  # its resolver reads the rest, and complains
            text = env.get(rank_name, "")
            yield Launch(name, rank_name, size, int(text) if text.isdecimal() else 0)
            continue
        # Set for other purposes, too: without a rank it says nothing of us.
        if name == _COMMON and rank_name not in env:
            continue
        rank = _count(env, rank_name)
        if rank is None or rank >= size:
            raise ValueError(
                f"{name}={size}, so {rank_name} has to be a number below that; it is "
                f"{env.get(rank_name)!r:.80}"
            )
        addresses, lack = _whereabouts(env, name, size)
        yield Launch(name, rank_name, size, rank, addresses, lack)
    if _INDEX in env:
        yield from _indexed(env, host)


def _whereabouts(
    env: Mapping[str, str], name: str, size: int
) -> tuple[tuple[str, ...] | None, str]:
    """The addresses of all ranks, or what is missing to know them."""
    match name:
        case "OMPI_COMM_WORLD_SIZE":
            return _of_mpi(env, size, _OPEN_MPI)
        case "PMI_SIZE":
            return _of_mpi(env, size, _MPICH)
        case "JAX_NUM_PROCESSES":
            return _beside(env, "JAX_COORDINATOR_ADDRESS", size)
        case "NUM_PROCESSES":
            return _beside(env, "COORDINATOR_ADDRESS", size)
    hosts = env.get("SKYPILOT_NODE_IPS", "").split()
    if len(hosts) != size:
        return None, f"SKYPILOT_NODE_IPS has {len(hosts)} addresses, expected {size}"
    port = agreed_port(env.get("SKYPILOT_TASK_ID", "skypilot"), 1)
    return tuple(host_and_port(host, port) for host in hosts), ""


_OPEN_MPI: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_MPICH: Final = ("MPI_LOCALNRANKS", ("PMI_PORT", "PMI_JOBID", "PMI_KVS"))
"""The variable with the number of ranks of this host, and those that name the run."""


def _of_mpi(
    env: Mapping[str, str], size: int, names: tuple[str, tuple[str, ...]]
) -> tuple[tuple[str, ...] | None, str]:
    local, runs = names
    if _count(env, local) != size:
        here = env.get(local)
        return None, (
            f"{local}={here!r:.20}: not all ranks are on this host, and MPI does "
            "not tell where the others are"
        )
    run = next((env[name] for name in runs if env.get(name)), None)
    if run is None:
        return None, f"none of {', '.join(runs)} is set, from which ports are derived"
    port = agreed_port(run, size)
    return tuple(f"127.0.0.1:{port + rank}" for rank in range(size)), ""


def _beside(
    env: Mapping[str, str], name: str, size: int
) -> tuple[tuple[str, ...] | None, str]:
    """Next to the coordinator of jax: its port is jax's own, ours are behind it."""
    address = env.get(name, "").rpartition("://")[2]
    host, _, text = address.rpartition(":")
    if not host and name == "COORDINATOR_ADDRESS":
        host, text = address, env.get("COORDINATOR_PORT", "")
    if not host or not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        return None, f"{name}={env.get(name)!r:.80}: expected host:port"
    port = int(text)
    port = port + 1 if port + size < 65536 else agreed_port(address, size)
    if host in ("localhost", "127.0.0.1", "[::1]"):
        return tuple(f"{host}:{port + rank}" for rank in range(size)), ""
    hosts = _numbered(host, 0, size)
    if hosts is None:
        return None, (
            f"{name}={address}: expected a host of Kubeflow whose first label ends in "
            "-0, from which the hosts of the others follow"
        )
    return tuple(f"{each}:{port}" for each in hosts), ""


def _indexed(env: Mapping[str, str], host: str) -> Iterator[Launch]:
    index = _count(env, _INDEX) or 0
    wanted = ("JAX_NUM_PROCESSES", "NUM_PROCESSES")
    size = next((_count(env, name) for name in wanted if name in env), None)
    if size == 1:
        return
    if size is None:
        lack = (
            "an indexed Job does not say how many pods it has: set NUM_PROCESSES to "
            "its completions (1 if each pod is to train alone)"
        )
        yield Launch(_INDEX, _INDEX, 0, index, None, lack)
        return
    if index >= size:
        raise ValueError(f"{_INDEX}={index}: expected less than NUM_PROCESSES={size}")
    hosts = _numbered(host, index, size) if "." in host else None
    if hosts is None:
        lack = (
            f"the full name of this host is {host!r:.80}, expected "
            f"NAME-{index}.SERVICE...: give the pods a headless Service, and set "
            "`subdomain` in their template to its name"
        )
        yield Launch(_INDEX, _INDEX, size, index, None, lack)
        return
    port = agreed_port(hosts[0], 1)
    addresses = tuple(f"{each}:{port}" for each in hosts)
    yield Launch(_INDEX, _INDEX, size, index, addresses)


def _numbered(host: str, index: int, size: int) -> list[str] | None:
    """The hosts of all, of that of one: ``job-1.service`` is beside ``job-0.service``.
    None: its first label does not end in the index."""
    label, dot, rest = host.partition(".")
    stem = label.removesuffix(f"-{index}")
    if stem == label or not stem:
        return None
    return [f"{stem}-{each}{dot}{rest}" for each in range(size)]


def _count(env: Mapping[str, str], name: str) -> int | None:
    """A number of a variable; None where it is not set.

    Raises:
        ValueError: It is no number from 0 to 65536.
    """
    text = env.get(name)
    if text is None or not text.strip():
        return None
    number = int(text) if text.isascii() and text.isdecimal() else math.inf
    if not number <= MAX_HOSTS:
        raise ValueError(f"{name}: expected a number of 0 or more, got {text!r:.80}")
    return int(number)


def detect(jobs: Mapping[str, int] | None = None) -> ClusterResolver:
    """The resolver for what the environment says: TF_CONFIG, or else the variables of
    Open MPI, MPICH, Slurm (``srun``), Kubeflow's jobs for JAX, SkyPilot, or of an
    indexed Job or JobSet of Kubernetes, the first that knows where all processes are.

    A process that was started alone gets a resolver of an empty cluster. It is read
    once, but for TF_CONFIG; nobody is asked but the resolver of this host's name.

    Args:
        jobs: Job -> number of its tasks, which get ranks in the order of their names,
            as in `SlurmClusterResolver`. None: all are workers. With TF_CONFIG, which
            says it itself, it has to be None or to agree.

    Raises:
        ValueError: Several processes were started together, and nothing says where they
            are; or ``jobs`` are not as many tasks as there are processes; or a variable
            cannot be read. Says which, and what to do.
        RuntimeError: As `SlurmClusterResolver`.
    """
    env = config.environment()
    if env.get("TF_CONFIG", "").strip():
        found = TFConfigClusterResolver()
        _require_agreement(found, jobs)
        return found
    launch = launch_in(env, _full_name(env))
    if launch is None:
        _require_none(jobs)
        return TFConfigClusterResolver()
    if launch.is_slurm:
        return SlurmClusterResolver(jobs)
    found_by_rank = resolver_of(launch, jobs)
    if launch.is_mpi:
        take_part(launch.rank, launch.size)
    return found_by_rank


def resolver_of(
    launch: Launch, jobs: Mapping[str, int] | None = None
) -> SimpleClusterResolver:
    """The resolver of processes that are known by their addresses, in the order of
    ranks.

    Raises:
        ValueError: Their addresses are not known, or there are not as many as tasks.
    """
    if launch.addresses is None:
        raise ValueError(apart(launch))
    tasks = {"worker": launch.size} if jobs is None else dict(jobs)
    if sum(tasks.values()) != launch.size:
        raise ValueError(
            f"the jobs {tasks} are {sum(tasks.values())} tasks, and {launch.size} "
            f"processes were started ({launch.said_by})"
        )
    spec, names = ranked_cluster(tasks, launch.addresses)
    job, index = names[launch.rank]
    return SimpleClusterResolver(spec, task_type=job, task_id=index)


def apart(launch: Launch) -> str:
    """The words for processes that were started together and cannot find each other."""
    several = f"{launch.said_by}={launch.size}" if launch.size else launch.said_by
    return (
        f"this process was started as one of several ({several}, "
        f"{launch.rank_by}={launch.rank}), and nothing says where the others are: "
        f"{launch.lack}. Call jax.distributed.initialize() before you make a "
        "MultiWorkerMirroredStrategy, which then learns them from it; or set TF_CONFIG "
        "in each process, or give a zs.cluster_resolver.SimpleClusterResolver of the "
        f"addresses of all, with task_type='worker' and task_id={launch.rank}. If each "
        "is to train alone, set TF_CONFIG='{}'"
    )


def _full_name(env: Mapping[str, str]) -> str:
    """Asks for it only where it matters: it may take the seconds of a DNS."""
    return socket.getfqdn() if "JOB_COMPLETION_INDEX" in env else ""


def _require_agreement(
    resolver: TFConfigClusterResolver, jobs: Mapping[str, int] | None
) -> None:
    spec = resolver.cluster_spec()
    there = {job: spec.num_tasks(job) for job in spec.jobs}
    if jobs is not None and dict(jobs) != there:
        raise ValueError(f"TF_CONFIG has the jobs {there}, and jobs={dict(jobs)}")


def _require_none(jobs: Mapping[str, int] | None) -> None:
    if jobs is not None and sum(jobs.values()) > 1:
        raise ValueError(
            f"jobs={dict(jobs)} are {sum(jobs.values())} tasks, and nothing says that "
            "this process was started with others: start it with srun, mpirun or as a "
            "job of Kubernetes, or set TF_CONFIG"
        )
