"""``zstrat keygen`` and ``zstrat units``: files that a cluster of machines needs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zstrat.errors import ZstratError
from zstrat.launch import write_units
from zstrat.transport import generate_keys

from ._told import fail


@click.command()
@click.argument("directory", type=Path)
def keygen(directory: Path) -> None:
    """Make the keys of a cluster: one pair per role, in DIRECTORY (mode 0700)."""
    try:
        made = generate_keys(directory)
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
    """Write the systemd units, for programs in BINDIR and a cluster file in CONFIG."""
    try:
        for path in write_units(bindir, to, config):
            click.echo(path)
    except (OSError, ValueError) as error:
        fail(error)
