"""Reads the arguments of a daemon, with TF_CONFIG or a cluster file: which task the
daemon runs and how it serves. A wrong value ends the daemon with an error and exit code
2."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from zstrat import __version__
from zstrat.cluster import (
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TomlClusterResolver,
    detect,
)
from zstrat.config import MISTAKEN, did_you_mean, environment, settings_from
from zstrat.launch import UNNUMBERED, JoinAddresses, TaskAddress
from zstrat.streams import complete

from ._main import DaemonOptions, leave

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zstrat.cluster import ClusterResolver
    from zstrat.config import Settings


RESOLVERS = ("auto", "slurm", "tf_config")


@final
class _Parser(argparse.ArgumentParser):
    """Suggests the closest option, as click does for the command ``zstrat``."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # Hidden options are not suggested: they are for launchers only.
            known = sorted(set(re.findall(r"--\w[\w-]*", self.format_help())))
            names = (argument.partition("=")[0] for argument in unknown)
            hints = (did_you_mean(name, known) for name in names if name[:1] == "-")
            words = " ".join(unknown) + next(filter(None, hints), "")
            self.error(f"unrecognized arguments: {words}")
        return parsed


def parser(job: str, what: str, *, binds: bool = True) -> argparse.ArgumentParser:
    """Makes the parser of a daemon's arguments; a daemon that binds no address has
    fewer of them. Call this before all else: it makes sure that standard error exists.
    """
    # Before argparse, which prints errors to a standard error that may be missing.
    complete()
    sources = (
        "TF_CONFIG; --cluster and --index; --bind and --index; or --resolver and "
        "--jobs, if Slurm, MPI or an indexed Job started it."
        if binds
        else "TF_CONFIG or --index; the default is 0."
    )
    arguments = _Parser(
        prog=f"zstrat-{job}",
        description=f"{what} Its job and task index come from {sources}",
    )
    add = arguments.add_argument
    add("--index", type=int, metavar="N", help="task index within the job")
    add("--log-json", action="store_true", help="log one JSON object per line")
    add(
        "--http",
        metavar="HOST:PORT",
        help="serve /healthz, /readyz, /metrics and a status page over HTTP (or set "
        "ZSTRAT_HTTP); a port without a host binds to localhost",
    )
    add("--version", action="version", version=f"zstrat {__version__}")
    if not binds:
        return arguments
    add("--cluster", metavar="FILE.toml", help="cluster file; TF_CONFIG is ignored")
    add("--job", default=job, help=f"job of this task in the cluster; default: {job}")
    add(
        "--resolver",
        choices=RESOLVERS,
        help="where the addresses of the cluster come from; auto: the environment that "
        "started this process, of TF_CONFIG, Slurm, MPI or an indexed Job",
    )
    add(
        "--jobs",
        metavar="JOB=N,...",
        help="with --resolver: number of tasks of each job, such as "
        "chief=1,ps=2,worker=4; ranks are assigned in the order of the job names",
    )
    add(
        "--bind",
        metavar="HOST:PORT",
        help="address to bind instead of the task's address in the cluster",
    )
    add("--keys", metavar="DIR", type=folder, help="key folder (or set ZSTRAT_KEYS)")
    if job == "worker":
        add(
            "--join",
            metavar="HOST:PORT,...",
            help="join a running cluster that does not list this worker, through the "
            "first of these parameter servers that answers; requires --bind; add "
            "--index N to request an index",
        )
    if job == "ps":
        add(
            "--state-dir",
            metavar="DIR",
            type=folder,
            help="folder where this server saves its variables when it is stopped, for "
            "the next process of its task (or set ZSTRAT_STATE, or systemd's "
            "STATE_DIRECTORY)",
        )
        add(
            "--spill",
            metavar="DIR",
            type=folder,
            help="folder on a fast disk where this server keeps rows of tables of any "
            "id that memory has no room for (or set ZSTRAT_SPILL)",
        )
    add("--insecure", action="store_true", help="serve other machines without keys")
    add(
        "--parent",
        type=int,
        default=0,
        metavar="PID",
        help="drain and exit when this process ends, for example: ssh HOST "
        f"'zstrat-{job} --parent $PPID ...'",
    )
    # For LocalCluster: the descriptor to which the daemon reports its address.
    add("--report", type=int, default=-1, help=argparse.SUPPRESS)
    # For `launched`: how long the launcher may send no heartbeat.
    add("--launcher-timeout", type=float, default=0.0, help=argparse.SUPPRESS)
    # For `launched`: the temporary folder around --keys, removed once they are read.
    add("--remove-keys", type=Path, help=argparse.SUPPRESS)
    return arguments


@contextlib.contextmanager
def refusals(job: str) -> Iterator[None]:
    """Ends the daemon with exit code 2 if the block raises ValueError, which says what
    is wrong with an argument."""
    try:
        yield
    except ValueError as error:
        print(f"zstrat-{job}: {error}", file=sys.stderr)
        leave(MISTAKEN)


def folder(text: str) -> Path:
    """Converts an argument to a path. Refuses "", which a shell makes of an unset
    variable, and which would mean the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got an empty string")
    return Path(text)


def options_from(parsed: argparse.Namespace, job: str) -> DaemonOptions:
    """Converts the parsed arguments of a parameter server or a worker.

    Raises:
        ValueError: An argument is missing or wrong.
    """
    env = environment()
    join = _join(parsed)
    if join is None:
        task = _task(parsed, job, env)
    else:
        index = UNNUMBERED if parsed.index is None else index_of(parsed.index)
        task = TaskAddress(parsed.job, index, join.address)
    return DaemonOptions(
        task=task,
        settings=settings_of(parsed, env),
        join=join,
        parent=parsed.parent,
        report=parsed.report,
        launcher_timeout=parsed.launcher_timeout,
        keys_to_remove=parsed.remove_keys,
    )


def _join(parsed: argparse.Namespace) -> JoinAddresses | None:
    servers = vars(parsed).get("join")
    if servers is None:
        return None
    if parsed.cluster is not None or parsed.resolver is not None:
        raise ValueError("--join cannot be combined with --cluster or --resolver")
    if parsed.bind is None:
        raise ValueError(
            "--join requires --bind HOST:PORT, the address at which the program and "
            "other workers reach this worker"
        )
    return JoinAddresses(tuple(servers.split(",")), parsed.bind)


def settings_of(parsed: argparse.Namespace, env: Mapping[str, str]) -> Settings:
    """Reads the settings from ``ZSTRAT_*``; arguments take precedence.

    Raises:
        ValueError: A variable has an invalid value.
    """
    names = ("keys", "insecure", "log_json", "http", "spill")
    given = {name: value for name, value in vars(parsed).items() if name in names}
    # An option that was not given is "", None or False, and leaves the setting.
    overrides = {name: value for name, value in given.items() if value}
    settings = settings_from(env)
    state = settings.state
    if "state_dir" in parsed:
        # systemd lists the folders that it created for the service; ours is the first.
        created = env.get("STATE_DIRECTORY", "").partition(":")[0]
        state = parsed.state_dir or state or (Path(created) if created else None)
    return dataclasses.replace(settings, state=state, **overrides)


def _task(parsed: argparse.Namespace, job: str, env: Mapping[str, str]) -> TaskAddress:
    resolver: ClusterResolver
    if parsed.job != job:
        raise ValueError(
            f"--job {parsed.job}: expected {job!r}, the job that zstrat-{job} serves"
        )
    if parsed.jobs is not None and parsed.resolver is None:
        raise ValueError("--jobs requires --resolver, for example --resolver auto")
    if parsed.resolver is not None:
        if parsed.cluster is not None:
            raise ValueError("--resolver and --cluster cannot be combined")
        source, resolver = f"--resolver {parsed.resolver}", _resolver(parsed)
        _check_job(resolver, job, source)
    elif parsed.cluster is not None:
        source = str(parsed.cluster)
        resolver = TomlClusterResolver(parsed.cluster)
        _check_job(resolver, job, source)
    # As with --cluster, arguments win over TF_CONFIG, which may be another program's.
    elif parsed.bind is not None and parsed.index is not None:
        return TaskAddress(job, index_of(parsed.index), parsed.bind)
    elif env.get("TF_CONFIG"):
        source, resolver = "TF_CONFIG", TFConfigClusterResolver()
        _check_job(resolver, job, source)
    else:
        raise ValueError(
            "the task index is missing: set TF_CONFIG, or pass --cluster FILE.toml "
            "--index N, or --bind HOST:PORT --index N, or, under Slurm, MPI or an "
            "indexed Job, --resolver auto --jobs ps=1,worker=3"
        )
    spec = resolver.cluster_spec()
    if job not in spec.jobs:
        raise ValueError(f"{source} has no job {job!r}, only {sorted(spec.jobs)}")
    index = parsed.index if parsed.index is not None else resolver.task_id
    if index is None:
        raise ValueError(f"{source} has no index for this {job}: pass --index N")
    # With --bind, too: a task that is not in the cluster is one that nobody asks.
    indices = spec.task_indices(job)
    if index not in indices:
        raise ValueError(
            f"{source}: no task {index} in job {job!r}, expected one of {indices}"
        )
    return TaskAddress(job, index, parsed.bind or spec.task_address(job, index))


def _resolver(parsed: argparse.Namespace) -> ClusterResolver:
    jobs = None if parsed.jobs is None else jobs_of(parsed.jobs)
    try:
        match parsed.resolver:
            case "slurm":
                return SlurmClusterResolver(jobs)
            case "tf_config":
                return TFConfigClusterResolver()
        return detect(jobs)
    except RuntimeError as error:  # Slurm variables are set, but not by srun
        raise ValueError(f"--resolver {parsed.resolver}: {error}") from None


def jobs_of(text: str) -> dict[str, int]:
    """Parses ``ps=1,worker=3`` into the number of tasks of each job.

    Raises:
        ValueError: The text has another form, or names a job twice.
    """
    # Anything invalid, and a job that is named twice, makes fewer jobs than pairs.
    pairs = [part.partition("=") for part in text.split(",")]
    jobs = {job: int(n) for job, _, n in pairs if job and n.isdecimal() and int(n)}
    if len(jobs) != len(pairs):
        raise ValueError(
            f"--jobs {text!r:.80}: expected JOB=N,..., such as ps=1,worker=3"
        )
    return jobs


def _check_job(resolver: ClusterResolver, job: str, source: str) -> None:
    task_type = resolver.task_type
    if task_type is not None and task_type != job:
        raise ValueError(
            f"{source}: task.type is {task_type!r}, expected {job!r} for zstrat-{job}"
        )


def index_of(index: int) -> int:
    """Returns the index unless it is negative.

    Raises:
        ValueError: It is below 0.
    """
    if index < 0:
        raise ValueError(f"--index {index}: expected 0 or more")
    return index
