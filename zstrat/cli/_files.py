"""``zstrat keygen`` and ``zstrat units``: files that a cluster of machines needs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zstrat.errors import ZstratError
from zstrat.launch import write_units
from zstrat.transport import generate_keys
from zstrat.wire import Job

from ._options import fail

_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("directory", type=Path)
@click.option("--per-task", is_flag=True, help="A pair for each ps and each worker.")
@click.option("--ps", type=_COUNT, help="With --per-task: parameter servers.")
@click.option("--workers", type=_COUNT, help="With --per-task: workers.")
def keygen(
    directory: Path, per_task: bool, ps: int | None, workers: int | None
) -> None:
    """Make the keys of a cluster. One pair per role, in DIRECTORY (mode 0700).

    With --per-task a key also says which task its holder is, so that nobody who has the
    key of one worker can pass for another. With replicas=1 leave it out: a server that
    takes the place of another one has to have its key.
    """
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
