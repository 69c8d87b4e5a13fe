"""``zstrat cluster``: local daemons in the foreground, and how to connect to them; and
``zstrat run``: copies of a program on this machine.
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

from ._options import fail, failures, folder, settings
from ._signals import as_interrupts, heard_by, interruptible
from ._tables import lines, table

if TYPE_CHECKING:
    from pathlib import Path

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


REFRESH: Final = 1.0
"""Seconds between two looks of the live table."""

_COUNT: Final = click.IntRange(1)

OPEN_PORTS: Final = (
    "note: without keys every user of this machine can reach these ports and run code "
    "here; --transport ipc or ZSTRAT_KEYS avoids that"
)


@click.command()
@click.option(
    "--ps", type=_COUNT, default=1, show_default=True, help="parameter servers"
)
@click.option("--workers", type=_COUNT, default=1, show_default=True, help="workers")
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="tcp",
    show_default=True,
    help="how tasks exchange messages",
)
@click.option("--worker-devices", type=_COUNT, help="virtual CPU devices per worker")
@click.option(
    "--dir", "directory", type=folder, help="keep logs and the cluster file there"
)
def cluster(
    ps: int,
    workers: int,
    transport: str,
    worker_devices: int | None,
    directory: Path | None,
) -> None:
    """Run local daemons in the foreground; Ctrl-C ends them all."""
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
            click.echo("ending all tasks")
    except KeyboardInterrupt:
        click.echo("interrupted; all tasks ended")
    except (ZstratError, ValueError, OSError) as error:
        fail(error)


async def _watch(running: LocalCluster, settings: Settings) -> None:
    """Draws the table until interrupted; plain lines when nobody can see a table."""
    interrupted, console = asyncio.Event(), Console()
    with heard_by(lambda number: interrupted.set()):
        async with Observer(running.spec, settings) as observer:
            if console.is_terminal:
                await _draw(console, observer, interrupted)
                return
            seen = await observer.look(settings.timeouts.connect)
            click.echo("\n".join(lines(seen)))
            await interrupted.wait()


async def _draw(
    console: Console, observer: Observer, interrupted: asyncio.Event
) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while not interrupted.is_set():
            live.update(table(await observer.look(REFRESH)), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), REFRESH)


def how_to_connect(spec: ClusterSpec, file: Path) -> str:
    """The lines that a program's terminal needs, ready to be pasted."""
    config = {"cluster": spec.as_dict()}  # the program itself is none of the tasks
    return "\n".join(
        [
            "connect with either of",
            f"  export TF_CONFIG={shlex.quote(json.dumps(config))}",
            f"  --cluster {shlex.quote(str(file))}",
            "",
        ]
    )


def has_ports(spec: ClusterSpec) -> bool:
    """Whether some task listens on a port, and not on a socket in a folder."""
    return not all(
        spec.task_address(job, index).startswith("ipc://")
        for job in spec.jobs
        for index in spec.task_indices(job)
    )


def toml(spec: ClusterSpec) -> str:
    """A cluster file for `TomlClusterResolver`."""
    lines = [
        f"{job} = [{', '.join(json.dumps(address) for address in addresses)}]"
        for job, addresses in spec.as_dict().items()
    ]
    return "\n".join(["[cluster]", *lines, ""])


_WORDS: Final = 2.0
"""Seconds in which a program that heard of a loss may say so, and end."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="copies",
)
@click.option(
    "--transport", type=click.Choice(["ipc", "tcp"]), default="ipc", show_default=True
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="of copies that fail",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int, transport: str, restarts: int, script: str, arguments: tuple[str, ...]
) -> None:
    """Run copies of SCRIPT here. Each is a worker of one cluster on this machine.

    Each finds itself and the others in TF_CONFIG, as MultiWorkerMirroredStrategy and
    zs.collectives.Group read it. The first that fails ends all, once the others have
    had a moment to say what they lost; so does Ctrl-C. What follows SCRIPT is for it.
    """
    command = (sys.executable, script, *arguments)
    with failures():
        times = settings(None).timeouts
        # A connection that broke has ``reconnect`` before a survivor hears of it.
        notice = times.reconnect + _WORDS
        copies = Copies(command, workers, transport, restarts, times.drain, notice)
        code = run_loop(interruptible(run_copies(copies, click.echo)))
    sys.exit(code)
