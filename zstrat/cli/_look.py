"""``zstrat status`` and ``zstrat doctor``: what runs, and what is wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import click
from rich.console import Console

from zstrat.config import environment
from zstrat.errors import ZstratError
from zstrat.launch import examine, observe
from zstrat.transport import run as run_loop

from ._options import cluster_options, fail, settings, spec
from ._tables import lines, table

if TYPE_CHECKING:
    from pathlib import Path

    from zstrat.launch import Finding


@click.command()
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="everything that the tasks tell")
def status(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool
) -> None:
    """Show the tasks of a running cluster. Exit code 1 if one does not answer."""
    chosen = settings(keys)
    try:
        seen = run_loop(observe(spec(cluster), chosen, timeout))
    except (ZstratError, ValueError, OSError) as error:
        fail(error)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(task) for task in seen], indent=2))
    elif sys.stdout.isatty():
        Console().print(table(seen))
    else:
        click.echo("\n".join(lines(seen)))
    sys.exit(any(task.problem for task in seen))


@click.command()
@cluster_options
def doctor(cluster: str | None, keys: Path | None, timeout: float) -> None:
    """Check versions, keys, addresses and clocks. Exit code 1 if something is wrong."""
    try:
        chosen = settings(keys)
        known = cluster is not None or environment().get("TF_CONFIG")
        tasks = spec(cluster) if known else None
        findings = run_loop(examine(tasks, chosen, timeout))
    except (ZstratError, ValueError, OSError) as error:
        fail(error)
    for finding in findings:
        click.echo(_worded(finding))
    sys.exit(any(finding.ok is False for finding in findings))


def _worded(finding: Finding) -> str:
    mark = {True: "ok   ", False: "WRONG", None: "     "}[finding.ok]
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{mark} {finding.what}: {finding.words}{advice}"
