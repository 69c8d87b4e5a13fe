"""``zstrat up`` and ``zstrat down``: a cluster on hosts that ssh reaches.

What runs is known by a folder beside the file of hosts: ``hosts.toml`` has
``hosts.up``, with the keys, the cluster file, the logs, and a lock that is held as long
as the tasks are. Who holds it ends them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from zstrat.errors import ZstratError
from zstrat.launch import run_beside, ssh

from ._cluster import how_to_connect, toml
from ._options import QueueingCommand, fail, settings
from ._signals import as_interrupts
from ._up_folder import clear, ended, folder_of, held

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.launch import Fleet

_IS_UP: Final = "all tasks serve"
_HOSTS: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=QueueingCommand, context_settings={"allow_interspersed_args": False})
@click.option("--ps", type=click.IntRange(1), help="default: as the file says")
@click.option("--workers", type=click.IntRange(0), help="default: as the file says")
@click.option(
    "-d", "--detach", is_flag=True, help="return when all serve; `zstrat down` ends it"
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=0,
    metavar="[SECONDS]",
    help="wait while another `zstrat up` holds the hosts of the file",
)
@click.option("--alone", is_flag=True, hidden=True, help="nobody watches: say it once")
@click.argument("hosts", type=_HOSTS)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def up(
    ps: int | None,
    workers: int | None,
    detach: bool,
    queue: int,
    alone: bool,
    hosts: Path,
    program: tuple[str, ...],
) -> None:
    """Run daemons on the hosts of a file, by ssh. Ctrl-C, or `zstrat down`, ends them.

    With a PROGRAM, such as `python train.py`, it is run here when all serve: it finds
    them in TF_CONFIG and ZSTRAT_KEYS, its end ends them, and its exit code is ours.
    """
    if detach and program:
        raise click.UsageError("--detach and a program: expected one of them")
    if program and shutil.which(program[0]) is None:
        fail(ValueError(f"there is no program {program[0]!r} here that can be run"))
    if detach:
        counts = (("--ps", ps), ("--workers", workers), ("--queue", queue))
        said = [f"{name}={count}" for name, count in counts if count is not None]
        sys.exit(_detached([*said, str(hosts)]))
    try:
        with held(folder_of(hosts), queue) as folder:
            code = _up(hosts, ps, workers, folder, program, alone=alone)
    except KeyboardInterrupt as signalled:
        click.echo("interrupted; all tasks ended")
        code = _code(signalled) if program else 0  # nobody ran it
    except (ZstratError, ValueError, OSError) as error:
        fail(error)
    sys.exit(code)


@click.command()
@click.argument("hosts", type=_HOSTS)
def down(hosts: Path) -> None:
    """End what `zstrat up` runs for this file. Returns when all tasks have ended."""
    try:
        has_run = ended(folder_of(hosts), signal.SIGTERM)
    except (ValueError, OSError) as error:
        fail(error)
    click.echo("all tasks ended" if has_run else f"nothing runs for {hosts}")


def _up(
    hosts: Path,
    ps: int | None,
    workers: int | None,
    folder: Path,
    program: Sequence[str],
    *,
    alone: bool,
) -> int:
    try:
        with as_interrupts():
            fleet = ssh(hosts, ps, workers, directory=folder, settings=settings(None))
    except KeyboardInterrupt:  # no task has failed: there is nothing to be read
        clear(folder)
        raise
    with _cleared(fleet, folder):
        if program:
            return run_beside(fleet, program)
        with as_interrupts():
            file = folder / "cluster.toml"
            file.write_text(toml(fleet.spec), "utf-8")
            click.echo(_words(fleet, file))
            if alone:
                _leave_terminal(folder / "up.log")
            fleet.wait()
            click.echo("all tasks ended by themselves", err=True)
            return 1


@contextlib.contextmanager
def _cleared(fleet: Fleet, folder: Path) -> Iterator[None]:
    """Ends the fleet. No folder is left, unless logs there say of failures."""
    try:
        with fleet:
            yield
    finally:
        if not fleet.failures:
            clear(folder)


def _words(fleet: Fleet, file: Path) -> str:
    connect, keys = how_to_connect(fleet.spec, file), shlex.quote(str(fleet.keys))
    return f"{connect}  export ZSTRAT_KEYS={keys}\n\n{_IS_UP}"


def _code(signalled: KeyboardInterrupt) -> int:
    """As shells say it, of a signal."""
    return 128 + (signalled.args[0] if signalled.args else signal.SIGINT)


def _leave_terminal(log: Path) -> None:
    """What is said from now on goes there."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _detached(arguments: Sequence[str]) -> int:
    """Has another process of our own do it; 0 when all tasks serve, else its code. A
    signal ends that one, too."""
    with as_interrupts():
        process = _started(arguments)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                click.echo(line, nl=False)
                if line.strip() == _IS_UP:
                    return 0
        except KeyboardInterrupt as signalled:
            process.terminate()
            click.echo(process.communicate()[0], nl=False)
            return _code(signalled)
        return process.wait() or 1


def _started(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zstrat.cli", "up", "--alone", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
