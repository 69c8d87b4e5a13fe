"""``zstrat cluster``, which runs local daemons in the foreground, and ``zstrat run``,
which runs copies of a program on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.live import Live

from zstrat.config import TRANSPORTS
from zstrat.errors import ZstratError
from zstrat.launch import Copies, LocalCluster, Observer, run_copies
from zstrat.transport import run as run_loop

from ._options import (
    as_interrupts,
    count_option,
    fail,
    failures,
    folder,
    handled_by,
    interruptible,
    settings,
)
from ._tables import lines, table

if TYPE_CHECKING:
    from pathlib import Path

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
    """Shows the live table until interrupted; without a terminal prints lines once."""
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
    """Returns shell commands that connect a program, ready to be pasted."""
    config = {"cluster": spec.as_dict()}  # without a task: the program is not one
    return "\n".join(
        [
            "connect with one of",
            f"  export TF_CONFIG={shlex.quote(json.dumps(config))}",
            f"  --cluster {shlex.quote(str(file))}",
            "",
        ]
    )


def has_ports(spec: ClusterSpec) -> bool:
    """Returns whether a task listens on a port, and not on a socket in a folder."""
    return not all(
        spec.task_address(job, index).startswith("ipc://")
        for job in spec.jobs
        for index in spec.task_indices(job)
    )


def toml(spec: ClusterSpec) -> str:
    """Formats a cluster file for `TomlClusterResolver`."""
    lines = [
        f"{job} = [{', '.join(json.dumps(address) for address in addresses)}]"
        for job, addresses in spec.as_dict().items()
    ]
    return "\n".join(["[cluster]", *lines, ""])


_NOTICE: Final = 2.0
"""Seconds for a copy that lost a peer to report that and end."""


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
        # A survivor learns of a broken connection after ``reconnect``.
        notice = times.reconnect + _NOTICE
        copies = Copies(command, workers, transport, restarts, times.drain, notice)
        code = run_loop(interruptible(run_copies(copies, click.echo)))
    sys.exit(code)
