"""The commands that start clusters: ``cluster`` and ``run`` on this machine, ``slurm``
as a Slurm job.

``zstrat cluster`` runs local daemons in the foreground, and ``zstrat run`` runs copies
of a program on this machine. ``zstrat slurm`` submits a program with its parameter
servers and workers as one Slurm job. The batch script runs ``zstrat slurm`` again, with
``--here``, on the first node of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.live import Live

from zstrat.config import TRANSPORTS, TRY_AGAIN, environment
from zstrat.errors import ZstratError
from zstrat.launch import (
    GPUS_BY_NODE,
    Copies,
    LocalCluster,
    Observer,
    requeue,
    run_copies,
    run_with_cluster,
    slurm,
    slurm_program,
)
from zstrat.transport import run as run_loop

from ._options import (
    as_interrupts,
    count_option,
    exit_code_of,
    fail,
    failures,
    folder,
    handled_by,
    interruptible,
    settings,
)
from ._tables import lines, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


REFRESH: Final = 1.0
"""Seconds between two updates of the live table."""

OPEN_PORTS: Final = (
    "warning: without keys every user of this machine can reach these ports and run "
    "code as you; use --transport ipc or set ZSTRAT_KEYS to prevent that"
)


@click.command()
@count_option("--ps", help="parameter servers")
@count_option("--workers", help="workers")
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="tcp",
    show_default=True,
    help="transport of messages between tasks",
)
@count_option("--worker-devices", default=None, help="virtual CPU devices per worker")
@click.option(
    "--dir", "directory", type=folder, help="folder to keep logs and the cluster file"
)
def cluster(
    ps: int,
    workers: int,
    transport: str,
    worker_devices: int | None,
    directory: Path | None,
) -> None:
    """Run a local cluster in the foreground; Ctrl-C stops it."""
    chosen = settings(None)
    try:
        with (
            as_interrupts(),
            LocalCluster(
                ps,
                workers,
                transport=transport,
                worker_devices=worker_devices,
                directory=directory,
                settings=chosen,
                # It trains nothing, so it need not import jax.
                coordinates=False,
            ) as running,
        ):
            file = running.directory / "cluster.toml"
            file.write_text(toml(running.spec), "utf-8")
            click.echo(how_to_connect(running.spec, file))
            if chosen.keys is None and has_ports(running.spec):
                click.echo(OPEN_PORTS, err=True)
            run_loop(_watch(running, chosen))
            click.echo("stopping all tasks")
    except KeyboardInterrupt:
        click.echo("interrupted; all tasks stopped")
    except (ZstratError, ValueError, OSError) as error:
        fail(error)


async def _watch(running: LocalCluster, settings: Settings) -> None:
    """Shows a live table of the cluster until interrupted; without a terminal prints
    its lines once."""
    interrupted, console = asyncio.Event(), Console()
    with handled_by(lambda number: interrupted.set()):
        async with Observer(running.spec, settings) as observer:
            if console.is_terminal:
                await _draw(console, observer, interrupted)
                return
            statuses = await observer.inspect(settings.timeouts.connect)
            click.echo("\n".join(lines(statuses)))
            await interrupted.wait()


async def _draw(
    console: Console, observer: Observer, interrupted: asyncio.Event
) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while not interrupted.is_set():
            live.update(table(await observer.inspect(REFRESH)), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), REFRESH)


def how_to_connect(spec: ClusterSpec, file: Path) -> str:
    """Returns the shell commands, ready to be pasted, that set the environment in which
    a program connects to the cluster."""
    # Without a task: the program is not one.
    config = {"cluster": spec.as_dict()}
    return "\n".join(
        [
            "connect with one of",
            f"  export TF_CONFIG={shlex.quote(json.dumps(config))}",
            f"  --cluster {shlex.quote(str(file))}",
            "",
        ]
    )


def has_ports(spec: ClusterSpec) -> bool:
    """Returns whether a task of the cluster listens on a port instead of a socket in a
    folder."""
    return not all(
        spec.task_address(job, index).startswith("ipc://")
        for job in spec.jobs
        for index in spec.task_indices(job)
    )


def toml(spec: ClusterSpec) -> str:
    """Formats a cluster as a TOML file for `TomlClusterResolver`."""
    lines = [
        f"{job} = [{', '.join(json.dumps(address) for address in addresses)}]"
        for job, addresses in spec.as_dict().items()
    ]
    return "\n".join(["[cluster]", *lines, ""])


_NOTICE: Final = 2.0
"""Seconds in which a copy of the program that lost a peer may report this and end."""


@click.command(context_settings={"allow_interspersed_args": False})
@count_option("-n", "--workers", default=2, help="number of copies")
@click.option(
    "--transport",
    type=click.Choice(["ipc", "tcp"]),
    default="ipc",
    show_default=True,
    help="transport of messages between copies",
)
@count_option(
    "--restarts",
    least=0,
    default=0,
    help="restarts of failed copies, of all copies together",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int, transport: str, restarts: int, script: str, arguments: tuple[str, ...]
) -> None:
    """Run several copies of SCRIPT on this machine as the workers of one cluster.

    TF_CONFIG describes the cluster to each copy; MultiWorkerMirroredStrategy and
    zs.collectives.Group read it. If a copy fails, or on Ctrl-C, all copies are stopped.
    Arguments after SCRIPT are passed to it.
    """
    command = (sys.executable, script, *arguments)
    with failures():
        times = settings(None).timeouts
        # A survivor learns of a broken connection after ``reconnect``; its error names
        # the peer, which is worth waiting for.
        notice = times.reconnect + _NOTICE
        copies = Copies(command, workers, transport, restarts, times.drain, notice)
        code = run_loop(interruptible(run_copies(copies, click.echo)))
    sys.exit(code)


_OURS: Final = ("--signal=B:USR1@60", "--requeue", "--open-mode=append")


@click.command(
    "slurm",
    short_help="Run a program with its cluster as one Slurm job.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@count_option("--ps", help="parameter servers")
@count_option("--workers", least=0, help="workers")
@click.option(
    "--print", "only_print", is_flag=True, help="print the batch script; do not submit"
)
@click.option("--here", is_flag=True, help="run in this allocation; do not submit")
@click.option("--dir", "directory", type=folder, help="folder to keep logs in")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def slurm_command(
    ps: int,
    workers: int,
    only_print: bool,
    here: bool,
    directory: Path | None,
    words: tuple[str, ...],
) -> None:
    """Run a Python program with parameter servers and workers as one Slurm job.

    WORDS: options for sbatch, each with its value in the same word, such as
    --time=04:00:00 or -pgpu, then the program and its arguments.

    The program finds the cluster in TF_CONFIG and ZSTRAT_KEYS. It receives SIGUSR1
    before its time limit and before it is preempted; if it then exits with code 75, as
    zs.PreemptionHandler does, the job is requeued.
    """
    # Options of sbatch are unknown here, so that a value in a separate word looks like
    # the program.
    count = next((n for n, word in enumerate(words) if word[:1] != "-"), len(words))
    options, command = words[:count], words[count:]
    if not command:
        raise click.UsageError(
            f"expected a program after the options, got only {' '.join(words)!r}"
        )
    script = Path(command[0])
    if not script.is_file():
        what = "is not a file" if script.exists() else "does not exist"
        advice = "" if not options else _hint_for_value(options[-1], command[0])
        raise click.UsageError(f"program {command[0]!r} {what}{advice}")
    program = [str(script.absolute()), *command[1:]]
    with failures():
        if here:
            if options:
                raise ValueError(
                    f"{options[0]}: an option of sbatch has no effect with --here; "
                    "omit one of them"
                )
            sys.exit(_run_here(ps, workers, directory, program))
        folder_option = [] if directory is None else [f"--dir={directory.absolute()}"]
        own = [f"--ps={ps}", f"--workers={workers}", *folder_option]
        text = batch_script(ps + workers, options, own, program)
        if only_print:
            click.echo(text, nl=False)
            return
        # By standard input: no file has to be kept until the job starts.
        sbatch = slurm_program("sbatch")
        sys.exit(
            subprocess.run([sbatch], input=text, text=True, check=False).returncode
        )


def _hint_for_value(option: str, word: str) -> str:
    """Suggests how to write an option of sbatch if ``word`` is probably its value."""
    is_long = option.startswith("--")
    if "=" in option if is_long else len(option) > 2:
        return ""
    both = f"{option}={word}" if is_long else f"{option}{word}"
    return f"; if it is the value of {option}, write both as one word: {both}"


def batch_script(
    tasks: int, options: Sequence[str], own: Sequence[str], program: Sequence[str]
) -> str:
    """Makes the batch script of a Slurm job. The user's options come last, so that they
    take precedence; ``own`` are options that this command adds.

    Raises:
        ValueError: An option or the name of the program has a line break or the like,
            or an option assigns GPUs per task.
    """
    by_task = ("--gpus-per-task", "--ntasks-per-gpu")
    for option in options:
        if option.startswith(by_task):
            raise ValueError(f"{option}: {GPUS_BY_NODE}")
    name = f"--job-name={Path(program[0]).name}"
    all_options = [f"--ntasks={tasks}", name, *_OURS, *options]
    for option in all_options:
        if not option.isprintable():  # a line break would start a command of the script
            raise ValueError(
                f"{option!r:.80} has a character that is not printable: expected one "
                "line of text for sbatch"
            )
    lines = [f"#SBATCH {shlex.quote(option)}" for option in all_options]
    # exec: signals of Slurm for the batch shell (B:) reach the command itself.
    # -P: modules in the working folder of the job are not imported.
    this = [sys.executable, "-P", "-m", "zstrat.cli", "slurm", "--here"]
    command = shlex.join([*this, *own, *program])
    return "\n".join(["#!/bin/bash", *lines, f"exec {command}", ""])


def _run_here(
    ps: int, workers: int, directory: Path | None, program: Sequence[str]
) -> int:
    try:
        # Only until the program runs: then SIGUSR1 is forwarded to it.
        with as_interrupts(signal.SIGUSR1):
            fleet = slurm(
                ps,
                workers,
                # The folder of the program, from which its modules are imported.
                env={"PYTHONPATH": _python_path(program[0])},
                directory=directory,
                settings=settings(None),
            )
        with fleet:
            code = run_with_cluster(fleet.spec, fleet.keys, [sys.executable, *program])
    except KeyboardInterrupt as interrupt:
        if interrupt.args != (signal.SIGUSR1,):
            return exit_code_of(interrupt)
        code = TRY_AGAIN  # Slurm will end the job before the program has started
    # By ourselves: Slurm does not requeue a job that ends within its grace time.
    if code == TRY_AGAIN:
        job = environment().get("SLURM_JOB_ID", "")
        problem = requeue(job)
        if problem:
            click.echo(f"zstrat: cannot requeue job {job}: {problem}", err=True)
    return code


def _python_path(script: str) -> str:
    before = environment().get("PYTHONPATH")
    return ":".join([str(Path(script).parent), *([before] if before else [])])
