"""Which task a daemon is and how it serves: its arguments, TF_CONFIG, a cluster file.
A wrong value ends the daemon with a message that names it and with exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from zstrat import __version__
from zstrat.cluster import (
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TomlClusterResolver,
    detect,
)
from zstrat.config import did_you_mean, environment, settings_from
from zstrat.launch import UNNUMBERED, JoinAddresses, TaskAddress
from zstrat.streams import complete

from ._main import Order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zstrat.cluster import ClusterResolver
    from zstrat.config import Settings


RESOLVERS = ("auto", "slurm", "tf_config")


@final
class _Parser(argparse.ArgumentParser):
    """Names the option that was meant, as click does for the program ``zstrat``."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # The help leaves out the options that are for launchers alone.
            known = sorted(set(re.findall(r"--\w[\w-]*", self.format_help())))
            names = (each.partition("=")[0] for each in unknown)
            hints = (did_you_mean(each, known) for each in names if each[:1] == "-")
            words = " ".join(unknown) + next(filter(None, hints), "")
            self.error(f"unrecognized arguments: {words}")
        return parsed


def parser(job: str, what: str, *, binds: bool = True) -> argparse.ArgumentParser:
    """The arguments that every daemon takes; fewer of one that binds no address. Called
    first: a wrong one is said on a stream, if there is one."""
    complete()
    sources = (
        "TF_CONFIG, or --cluster and --index, or --bind and --index alone, or what "
        "started it: --resolver and --jobs."
        if binds
        else "TF_CONFIG or --index; otherwise it is the first one."
    )
    made = _Parser(
        prog=f"zstrat-{job}",
        description=f"{what} It learns which task it is from {sources}",
    )
    add = made.add_argument
    add("--index", type=int, metavar="N", help="task index within the job")
    add("--log-json", action="store_true", help="log one JSON object a line")
    add(
        "--http",
        metavar="HOST:PORT",
        help="answer /healthz, /readyz and /metrics there, and show a page at / (or "
        "ZSTRAT_HTTP); a port alone is one of loopback",
    )
    add("--version", action="version", version=f"zstrat {__version__}")
    if not binds:
        return made
    add("--cluster", metavar="FILE.toml", help="cluster file; TF_CONFIG is not read")
    add("--job", default=job, help=f"job of this task in the cluster; default: {job}")
    add(
        "--resolver",
        choices=RESOLVERS,
        help="what says where all tasks are; auto: whichever started this process, of "
        "TF_CONFIG, Slurm, MPI or an indexed Job",
    )
    add(
        "--jobs",
        metavar="JOB=N,...",
        help="with --resolver: how many tasks of each job were started, as in "
        "chief=1,ps=2,worker=4; jobs get ranks in the order of their names",
    )
    add(
        "--bind",
        metavar="HOST:PORT",
        help="bind this instead of the task's address in the cluster",
    )
    add("--keys", metavar="DIR", type=folder, help="key folder (or ZSTRAT_KEYS)")
    if job == "worker":
        add(
            "--join",
            metavar="HOST:PORT,...",
            help="join a cluster that does not know this worker: report it at the "
            "first of these parameter servers that answers; needs --bind, and takes "
            "--index N to ask for a number",
        )
    if job == "ps":
        add(
            "--state-dir",
            metavar="DIR",
            type=folder,
            help="folder where this server, when it is told to stop, leaves what it "
            "holds for the next process of its task (or ZSTRAT_STATE, or systemd's "
            "STATE_DIRECTORY)",
        )
    add("--insecure", action="store_true", help="serve other machines without keys")
    add(
        "--parent",
        type=int,
        default=0,
        metavar="PID",
        help="drain and end when that process does, as in: ssh HOST "
        f"'zstrat-{job} --parent $PPID ...'",
    )
    # For LocalCluster, whose parent is its own: where the address is reported.
    add("--report", type=int, default=-1, help=argparse.SUPPRESS)
    # For `launched`, whose launcher says again and again that it is there.
    add("--launcher-timeout", type=float, default=0.0, help=argparse.SUPPRESS)
    # For `launched`, which was told the keys: a folder around them, to be removed.
    add("--passing", type=Path, help=argparse.SUPPRESS)
    return made


def folder(text: str) -> Path:
    """A shell makes "" of a variable that is not set: that is no working folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got an empty text")
    return Path(text)


def order(parsed: argparse.Namespace, job: str) -> Order:
    """The order that the arguments give.

    Raises:
        ValueError: Something is missing or wrong; says what and what was expected.
    """
    env = environment()
    join = _join(parsed)
    return Order(
        place=_place(parsed, job, env) if join is None else _unknown(parsed, join),
        settings=settings_of(parsed, env),
        join=join,
        parent=parsed.parent,
        report=parsed.report,
        launcher_timeout=parsed.launcher_timeout,
        passing=parsed.passing,
    )


def _join(parsed: argparse.Namespace) -> JoinAddresses | None:
    """Where a worker reports itself that no cluster names."""
    servers = vars(parsed).get("join")
    if servers is None:
        return None
    if parsed.cluster is not None or parsed.resolver is not None:
        raise ValueError("--join: expected without --cluster and --resolver")
    if parsed.bind is None:
        raise ValueError(
            "--join: expected together with --bind HOST:PORT, the address at which "
            "the program and other workers reach this one"
        )
    return JoinAddresses(tuple(servers.split(",")), parsed.bind)


def _unknown(parsed: argparse.Namespace, join: JoinAddresses) -> TaskAddress:
    index = UNNUMBERED if parsed.index is None else index_of(parsed.index)
    return TaskAddress(parsed.job, index, join.address)


def settings_of(parsed: argparse.Namespace, env: Mapping[str, str]) -> Settings:
    """From ``ZSTRAT_*``, with what the arguments say instead.

    Raises:
        ValueError: A variable has a value that it cannot have.
    """
    names = ("keys", "insecure", "log_json", "http")
    given = {name: value for name, value in vars(parsed).items() if name in names}
    told = {name: value for name, value in given.items() if value}
    settings = settings_from(env)
    state = settings.state
    if "state_dir" in parsed:
        # systemd names the folder that it has made for the service, first of several.
        made = env.get("STATE_DIRECTORY", "").partition(":")[0]
        state = parsed.state_dir or state or (Path(made) if made else None)
    return dataclasses.replace(settings, state=state, **told)


def _place(parsed: argparse.Namespace, job: str, env: Mapping[str, str]) -> TaskAddress:
    resolver: ClusterResolver
    if parsed.job != job:
        raise ValueError(f"--job {parsed.job}: zstrat-{job} runs tasks of job {job!r}")
    if parsed.jobs is not None and parsed.resolver is None:
        raise ValueError("--jobs: expected together with --resolver, as in auto")
    if parsed.resolver is not None:
        if parsed.cluster is not None:
            raise ValueError("--resolver and --cluster: expected one of them")
        source, resolver = f"--resolver {parsed.resolver}", _resolver(parsed)
        _check_job(resolver, job, source)
    elif parsed.cluster is not None:
        source = str(parsed.cluster)
        resolver = TomlClusterResolver(parsed.cluster)
        _check_job(resolver, job, source)
    elif parsed.bind is not None and parsed.index is not None:
        return TaskAddress(job, index_of(parsed.index), parsed.bind)
    elif env.get("TF_CONFIG"):
        source, resolver = "TF_CONFIG", TFConfigClusterResolver()
        _check_job(resolver, job, source)
    else:
        raise ValueError(
            "which task is this? Set TF_CONFIG, or give --cluster FILE.toml --index N, "
            "or --bind HOST:PORT --index N; or of tasks that Slurm, MPI or an indexed "
            "Job has started: --resolver auto --jobs ps=1,worker=3"
        )
    spec = resolver.cluster_spec()
    if job not in spec.jobs:
        raise ValueError(f"{source} has no job {job!r}, only {sorted(spec.jobs)}")
    index = parsed.index if parsed.index is not None else resolver.task_id
    if index is None:
        raise ValueError(f"{source} does not say which {job} this is: give --index N")
    indices = spec.task_indices(job)
    if index not in indices:
        raise ValueError(f"{source}: job {job!r} has tasks {indices}, none is {index}")
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
    except RuntimeError as error:  # of Slurm: something else than srun started it
        raise ValueError(f"--resolver {parsed.resolver}: {error}") from None


def jobs_of(text: str) -> dict[str, int]:
    """Job -> number of tasks, of ``ps=1,worker=3``.

    Raises:
        ValueError: It is written otherwise, or a job is there twice.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    jobs = {job: int(n) for job, _, n in pairs if job and n.isdecimal() and int(n)}
    if len(jobs) != len(pairs):
        raise ValueError(
            f"--jobs {text!r:.80}: expected JOB=N,..., as in ps=1,worker=3"
        )
    return jobs


def _check_job(resolver: ClusterResolver, job: str, source: str) -> None:
    said = resolver.task_type
    if said is not None and said != job:
        raise ValueError(
            f"{source}: task.type is {said!r}; zstrat-{job} runs tasks of type {job!r}"
        )


def index_of(index: int) -> int:
    """
    Raises:
        ValueError: It is below 0.
    """
    if index < 0:
        raise ValueError(f"--index {index}: expected 0 or more")
    return index
