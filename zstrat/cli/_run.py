"""``zstrat run``: copies of a program on this machine."""

from __future__ import annotations

import sys
from typing import Final

import click

from zstrat.launch import Copies, run_copies
from zstrat.transport import run as run_loop

from ._options import fail, settings
from ._signals import interruptible

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
    "--lane", type=click.Choice(["ipc", "tcp"]), default="ipc", show_default=True
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
    workers: int, lane: str, restarts: int, script: str, arguments: tuple[str, ...]
) -> None:
    """Run copies of SCRIPT here. Each is a worker of one cluster on this machine.

    Each finds itself and the others in TF_CONFIG, as MultiWorkerMirroredStrategy and
    zs.collectives.Group read it. The first that fails ends all, once the others have
    had a moment to say what they lost; so does Ctrl-C. What follows SCRIPT is for it.
    """
    command = (sys.executable, script, *arguments)
    try:
        times = settings(None).timeouts
        # A connection that broke has ``reconnect`` before a survivor hears of it.
        notice = times.reconnect + _WORDS
        copies = Copies(command, workers, lane, restarts, times.drain, notice)
        code = run_loop(interruptible(run_copies(copies, click.echo)))
    except (ValueError, OSError) as error:
        fail(error)
    sys.exit(code)
