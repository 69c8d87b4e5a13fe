"""The resolver of the cluster that this process was started in, whoever started it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from zstrat import config

from ._gpus import take_part
from ._launched import launch_in
from ._resolver import SimpleClusterResolver
from ._slurm import SlurmClusterResolver
from ._spec import ClusterSpec
from ._tf_config import TFConfigClusterResolver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._launched import Launch
    from ._resolver import ClusterResolver


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
    """Of processes that are known by their addresses, in the order of ranks.

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
    names = [(job, index) for job in sorted(tasks) for index in range(tasks[job])]
    cluster: dict[str, list[str]] = {job: [] for job in sorted(tasks)}
    for (job, _), address in zip(names, launch.addresses, strict=True):
        cluster[job].append(address)
    job, index = names[launch.rank]
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=job, task_id=index)


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
