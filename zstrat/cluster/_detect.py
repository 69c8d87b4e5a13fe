"""Detects the launcher of this process, and the addresses of the processes that the
launcher started together with it.

Each launcher sets its own variables. They are converted to a `Launch`: the number of
processes that were started together, the rank of this one, and the addresses of all, if
known. Slurm provides more, and has a resolver of its own.

The number of processes is that of the processes started together (the step), not that
of the allocation: a single program in an allocation of many tasks is alone.

Law: detection only reads its arguments, the environment and the name of this host, so
that every launcher can be tested without being installed.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat import config

from ._descriptions import TFConfigClusterResolver
from ._gpu_shares import take_part
from ._ports import agreed_port
from ._resolver import SimpleClusterResolver
from ._slurm import MAX_HOSTS, SlurmClusterResolver
from ._spec import host_and_port, ranked_cluster

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
"""Variable with the number of processes -> variable with the rank: of Open MPI, of
MPICH and related ones, of Slurm's ``srun``, of Kubeflow's jobs for JAX, of SkyPilot.
MPI is first: one Slurm task per node may have started the MPI processes."""

_COMMON: Final = "NUM_PROCESSES"
"""A variable with so common a name that it is ignored unless the variable of the rank
is set, too."""
_INDEX: Final = "JOB_COMPLETION_INDEX"
"""The index of this pod in an indexed Job; Kubernetes does not set the number of
pods."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of this process as ``rank`` of ``size`` processes.

    Args:
        size_variable, rank_variable: The variables with ``size`` and ``rank``.
        addresses: The addresses of all ranks; None if they are unknown.
        lack: What is missing to know the addresses, for errors; "" if they are known.
    """

    size_variable: str
    rank_variable: str
    size: int
    rank: int
    addresses: tuple[str, ...] | None = None
    lack: str = ""

    @property
    def is_slurm(self) -> bool:
        """Whether `SlurmClusterResolver` knows the addresses."""
        return self.size_variable.startswith("SLURM_")


def launched_together(env: Mapping[str, str]) -> tuple[str, int, str] | None:
    """Returns the variable with the number of processes started together, that number,
    and the variable with the rank; None if no variable is set."""
    for name, rank in _COUNTS.items():
        if name == _COMMON and rank not in env:
            continue
        text = env.get(name, "")
        # ASCII, as `int` would accept the digits of other scripts as well; short, as it
        # refuses numbers of thousands of digits.
        if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 1:
            return name, int(text), rank
    return None


def launch_in(env: Mapping[str, str], host: str = "") -> Launch | None:
    """Detects a launch of several processes: of the first launcher with addresses, else
    of the first one; None if there is none.

    Args:
        host: The full name of this host, ``pod-0.service.namespace.svc``, from which
            the names of the other pods of an indexed Job follow.

    Raises:
        ValueError: A variable has an invalid value.
    """
    found = list(_launches(env, host))
    # srun may set the variables of MPI as well, but knows more. Not if the numbers
    # differ: then mpirun runs inside of one step.
    for launch in found:
        first = found[0].size, found[0].rank
        if launch.is_slurm and (launch.size, launch.rank) == first:
            return launch
    # Without addresses the first one counts, so that its lack is reported.
    known = (one for one in found if one.addresses is not None or one.is_slurm)
    return next(known, next(iter(found), None))


def _launches(env: Mapping[str, str], host: str) -> Iterator[Launch]:
    for name, rank_name in _COUNTS.items():
        size = _count(env, name)
        # One process is alone, also if a launcher started it.
        if size is None or size < 2:
            continue
        if rank_name == "SLURM_PROCID":  # its resolver reads and checks the rest
            text = env.get(rank_name, "")
            yield Launch(name, rank_name, size, int(text) if text.isdecimal() else 0)
            continue
        # Also set for other purposes: ignored without a rank.
        if name == _COMMON and rank_name not in env:
            continue
        rank = _count(env, rank_name)
        if rank is None or rank >= size:
            raise ValueError(
                f"{rank_name}: expected a number below {name}={size}, got "
                f"{env.get(rank_name)!r:.80}"
            )
        addresses, lack = _addresses(env, name, size)
        yield Launch(name, rank_name, size, rank, addresses, lack)
    if _INDEX in env:
        yield from _launches_of_indexed_job(env, host)


def _addresses(
    env: Mapping[str, str], name: str, size: int
) -> tuple[tuple[str, ...] | None, str]:
    """Returns the addresses of all ranks and "", or None and a text that says what is
    missing."""
    match name:
        case "OMPI_COMM_WORLD_SIZE":
            return _of_mpi(env, size, _OPEN_MPI)
        case "PMI_SIZE":
            return _of_mpi(env, size, _MPICH)
        case "JAX_NUM_PROCESSES":
            return _of_coordinator(env, "JAX_COORDINATOR_ADDRESS", size)
        case "NUM_PROCESSES":
            return _of_coordinator(env, "COORDINATOR_ADDRESS", size)
    hosts = env.get("SKYPILOT_NODE_IPS", "").split()
    if len(hosts) != size:
        return None, f"SKYPILOT_NODE_IPS has {len(hosts)} addresses, expected {size}"
    # One process a host, so that all may use the same port.
    port = agreed_port(env.get("SKYPILOT_TASK_ID", "skypilot"), 1)
    return tuple(host_and_port(host, port) for host in hosts), ""


_OPEN_MPI: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_MPICH: Final = ("MPI_LOCALNRANKS", ("PMI_PORT", "PMI_JOBID", "PMI_KVS"))
"""The variable with the number of ranks on this host, and the variables that may have
the name of the run."""


def _of_mpi(
    env: Mapping[str, str], size: int, names: tuple[str, tuple[str, ...]]
) -> tuple[tuple[str, ...] | None, str]:
    local, runs = names
    # All ranks have to be on this host, whose loopback address all of them know.
    if _count(env, local) != size:
        here = env.get(local)
        return None, (
            f"{local}={here!r:.20}: not all ranks are on this host, and MPI does not "
            "provide the addresses of the others"
        )
    run = next((env[name] for name in runs if env.get(name)), None)
    if run is None:
        return None, f"{' or '.join(runs)} is not set, from which ports are derived"
    port = agreed_port(run, size)
    return tuple(f"127.0.0.1:{port + rank}" for rank in range(size)), ""


def _of_coordinator(
    env: Mapping[str, str], name: str, size: int
) -> tuple[tuple[str, ...] | None, str]:
    """Derives the addresses of all ranks from the address of jax's coordinator; their
    ports follow after the coordinator's port."""
    address = env.get(name, "").rpartition("://")[2]
    host, _, text = address.rpartition(":")
    if not host and name == "COORDINATOR_ADDRESS":
        host, text = address, env.get("COORDINATOR_PORT", "")
    if not host or not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        return None, f"{name}={env.get(name)!r:.80}: expected host:port"
    # jax's coordinator listens on the port itself.
    port = int(text)
    port = port + 1 if port + size < 65536 else agreed_port(address, size)
    # One host, so each rank needs its own port; else each host has one rank.
    if host in ("localhost", "127.0.0.1", "[::1]"):
        return tuple(f"{host}:{port + rank}" for rank in range(size)), ""
    hosts = _sibling_hosts(host, 0, size)
    if hosts is None:
        return None, (
            f"{name}={address}: expected a host name of Kubeflow whose first label "
            "ends in -0, from which the names of the other hosts follow"
        )
    return tuple(f"{name}:{port}" for name in hosts), ""


def _launches_of_indexed_job(env: Mapping[str, str], host: str) -> Iterator[Launch]:
    # Kubernetes sets the index, but not the number of pods, which the user adds.
    index = _count(env, _INDEX) or 0
    wanted = ("JAX_NUM_PROCESSES", "NUM_PROCESSES")
    size = next((_count(env, name) for name in wanted if name in env), None)
    # The user says that each pod trains alone.
    if size == 1:
        return
    if size is None:
        lack = (
            "an indexed Job does not provide its number of pods: set NUM_PROCESSES to "
            "its completions (1 if each pod trains alone)"
        )
        yield Launch(_INDEX, _INDEX, 0, index, None, lack)
        return
    if index >= size:
        raise ValueError(f"{_INDEX}={index}: expected less than NUM_PROCESSES={size}")
    hosts = _sibling_hosts(host, index, size) if "." in host else None
    if hosts is None:
        lack = (
            f"the full name of this host is {host!r:.80}, expected "
            f"NAME-{index}.SERVICE...: create a headless Service for the pods, and set "
            "`subdomain` in their template to its name"
        )
        yield Launch(_INDEX, _INDEX, size, index, None, lack)
        return
    # The name of the first pod is the name of the run: equal in all pods.
    port = agreed_port(hosts[0], 1)
    addresses = tuple(f"{name}:{port}" for name in hosts)
    yield Launch(_INDEX, _INDEX, size, index, addresses)


def _sibling_hosts(host: str, index: int, size: int) -> list[str] | None:
    """Derives all host names from one: ``job-1.service`` from ``job-0.service``. None
    if its first label does not end in the index."""
    label, dot, rest = host.partition(".")
    stem = label.removesuffix(f"-{index}")
    if stem == label or not stem:
        return None
    return [f"{stem}-{number}{dot}{rest}" for number in range(size)]


def _count(env: Mapping[str, str], name: str) -> int | None:
    """Reads a number from a variable; None if the variable is not set.

    Raises:
        ValueError: The value is not a number from 0 to 65536.
    """
    text = env.get(name)
    if text is None or not text.strip():
        return None
    # Infinite, so that one comparison refuses both words and numbers that are too
    # large.
    number = int(text) if text.isascii() and text.isdecimal() else math.inf
    if not number <= MAX_HOSTS:
        raise ValueError(f"{name}: expected a number of 0 or more, got {text!r:.80}")
    return int(number)


def detect(jobs: Mapping[str, int] | None = None) -> ClusterResolver:
    """Makes the resolver for the environment of this process: TF_CONFIG, or else the
    variables of Open MPI, MPICH, Slurm (``srun``), Kubeflow's jobs for JAX, SkyPilot,
    or of an indexed Job or JobSet of Kubernetes, the first with all addresses.

    A process that was started alone gets a resolver of an empty cluster. Variables
    other than TF_CONFIG are read only once.

    Args:
        jobs: Job -> number of tasks; ranks are assigned in the order of the job names,
            as in `SlurmClusterResolver`. None: all are workers. With TF_CONFIG it has
            to be None or to agree with it.

    Raises:
        ValueError: Several processes were started together, and their addresses are
            unknown; or ``jobs`` has another number of tasks; or a variable is invalid.
        RuntimeError: See `SlurmClusterResolver`.
    """
    env = config.environment()
    if env.get("TF_CONFIG", "").strip():
        found = TFConfigClusterResolver()
        _require_agreement(found, jobs)
        return found
    # The name of this host only if it is needed, as a DNS query may take seconds.
    launch = launch_in(env, socket.getfqdn() if _INDEX in env else "")
    if launch is None:
        _require_none(jobs)
        return TFConfigClusterResolver()
    if launch.is_slurm:
        return SlurmClusterResolver(jobs)
    found_by_rank = resolver_of(launch, jobs)
    # Of MPI the addresses are known only if all ranks are on this host, where they
    # divide the GPUs. Other launchers give each process its own, or start one a host.
    if launch.size_variable.startswith(("OMPI_", "PMI_")):
        take_part(launch.rank, launch.size)
    return found_by_rank


def resolver_of(
    launch: Launch, jobs: Mapping[str, int] | None = None
) -> SimpleClusterResolver:
    """Makes the resolver of a launch with addresses, in the order of ranks.

    Raises:
        ValueError: The addresses are unknown, or their number is not that of the tasks.
    """
    if launch.addresses is None:
        raise ValueError(unknown_addresses(launch))
    tasks = {"worker": launch.size} if jobs is None else dict(jobs)
    if sum(tasks.values()) != launch.size:
        raise ValueError(
            f"the jobs {tasks} have {sum(tasks.values())} tasks, but {launch.size} "
            f"processes were started ({launch.size_variable})"
        )
    spec, names = ranked_cluster(tasks, launch.addresses)
    job, index = names[launch.rank]
    return SimpleClusterResolver(spec, task_type=job, task_id=index)


def unknown_addresses(launch: Launch) -> str:
    """Returns the error for processes that do not know the addresses of each other."""
    size = launch.size_variable
    several = f"{size}={launch.size}" if launch.size else size
    return (
        f"this process was started as one of several ({several}, "
        f"{launch.rank_variable}={launch.rank}), but the addresses of the others are "
        f"unknown: {launch.lack}. Call jax.distributed.initialize() before you create "
        "a MultiWorkerMirroredStrategy, which then uses its addresses; or set "
        "TF_CONFIG in each process; or pass a "
        "zs.cluster_resolver.SimpleClusterResolver of all addresses, with "
        f"task_type='worker' and task_id={launch.rank}. If each process trains alone, "
        "set TF_CONFIG='{}'"
    )


def _require_agreement(
    resolver: TFConfigClusterResolver, jobs: Mapping[str, int] | None
) -> None:
    spec = resolver.cluster_spec()
    counts = {job: spec.num_tasks(job) for job in spec.jobs}
    if jobs is not None and dict(jobs) != counts:
        raise ValueError(f"jobs={dict(jobs)}: TF_CONFIG has the jobs {counts}")


def _require_none(jobs: Mapping[str, int] | None) -> None:
    if jobs is not None and sum(jobs.values()) > 1:
        raise ValueError(
            f"jobs={dict(jobs)}: has {sum(jobs.values())} tasks, but this process was "
            "started alone: start it with srun, mpirun or as a Kubernetes job, or set "
            "TF_CONFIG"
        )
