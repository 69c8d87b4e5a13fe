"""``zstrat status`` and ``zstrat doctor``: what runs, and what is wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.live import Live

from zstrat.config import environment
from zstrat.errors import ZstratError
from zstrat.launch import examine, observe
from zstrat.transport import run as run_loop

from ._options import cluster_options, fail, settings, spec
from ._tables import lines, table
from ._top import watch

if TYPE_CHECKING:
    from pathlib import Path

    from zstrat.launch import Finding, TaskStatus


@click.command()
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="everything that the tasks tell")
@click.option("--watch", "again", is_flag=True, help="every second, until Ctrl-C")
def status(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool, again: bool
) -> None:
    """Show the tasks of a running cluster. Exit code 1 if one does not answer."""
    if again:
        sys.exit(_again(cluster, keys, timeout, as_json))
    chosen = settings(keys)
    try:
        seen = run_loop(observe(spec(cluster), chosen, timeout))
    except (ZstratError, ValueError, OSError) as error:
        fail(error)
    if sys.stdout.isatty() and not as_json:
        Console().print(table(seen))
    else:
        _plainly(seen, as_json, 2)
    sys.exit(any(task.problem for task in seen))


def _plainly(seen: list[TaskStatus], as_json: bool, indent: int | None) -> None:
    told = [dataclasses.asdict(task) for task in seen] if as_json else []
    text = json.dumps(told, indent=indent) if as_json else "\n".join(lines(seen))
    click.echo(text)


def _again(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool
) -> int:
    looks = (cluster, keys, timeout, 1.0, None)
    if as_json or not sys.stdout.isatty():
        return watch(lambda seen: _plainly(seen, as_json, None), *looks)
    with Live(console=Console(), auto_refresh=False) as live:
        return watch(lambda seen: live.update(table(seen), refresh=True), *looks)


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
