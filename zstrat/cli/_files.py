"""``zstrat keygen`` and ``zstrat units``: files that a cluster of machines needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from zstrat.errors import ZstratError
from zstrat.launch import write_units
from zstrat.transport import NEXT, PREVIOUS, generate_keys, rotate_keys
from zstrat.wire import Job

from ._options import fail

_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("directory", type=Path)
@click.option("--per-task", is_flag=True, help="A pair for each ps and each worker.")
@click.option("--ps", type=_COUNT, help="With --per-task: parameter servers.")
@click.option("--workers", type=_COUNT, help="With --per-task: workers.")
@click.option("--rotate", is_flag=True, help="Change the keys that are there.")
def keygen(
    directory: Path, per_task: bool, ps: int | None, workers: int | None, rotate: bool
) -> None:
    """Make the keys of a cluster. One pair per role, in DIRECTORY (mode 0700).

    With --per-task a key also says which task its holder is, so that nobody who has the
    key of one worker can pass for another. With replicas=1 leave it out: a server that
    takes the place of another one has to have its key.

    With --rotate the keys in DIRECTORY are changed while all tasks go on, by three
    calls; after each of them copy DIRECTORY to all machines.
    """
    if rotate:
        if per_task or ps or workers:
            raise click.UsageError(
                "--rotate makes keys for whoever has some now: leave out --per-task, "
                "--ps and --workers"
            )
        _rotate(directory)
        return
    counts = {Job.PS: ps, Job.WORKER: workers}
    tasks = {job: count for job, count in counts.items() if count is not None}
    if per_task != (len(tasks) == len(counts)) or (tasks and not per_task):
        raise click.UsageError(
            "say how many tasks get keys: --per-task --ps 2 --workers 4"
        )
    try:
        made = generate_keys(directory, tasks)
    except (ZstratError, OSError, ValueError) as error:
        fail(error)
    for path in made:
        click.echo(path)


def _rotate(directory: Path) -> None:
    try:
        done = rotate_keys(directory)
    except OSError as error:
        fail(error)
    click.echo(_STEPS[done].format(directory))


_STEPS: Final = {
    NEXT: "1 of 3: the next keys are in {0}/next. Copy {0} to all machines, and when "
    "all have it call this again: then those keys are used.",
    PREVIOUS: "2 of 3: the next keys are in use, the previous ones still valid. Copy "
    "{0} to all machines, and when all have it call this again: then the previous ones "
    "are valid no more.",
    "": "3 of 3: the previous keys are valid no more. Copy {0} to all machines, and "
    "remove {0}/next and {0}/previous there (rsync --delete).",
}


@click.command()
@click.option(
    "--bindir", type=Path, default=Path(sys.executable).parent, show_default=True
)
@click.option("--to", type=Path, default=Path("/etc/systemd/system"), show_default=True)
@click.option("--config", type=Path, default=Path("/etc/zstrat"), show_default=True)
def units(bindir: Path, to: Path, config: Path) -> None:
    """Write the systemd units. For programs in BINDIR, a cluster file in CONFIG."""
    try:
        for path in write_units(bindir, to, config):
            click.echo(path)
    except (OSError, ValueError) as error:
        fail(error)
