"""``zstrat top``: what a run does, live, and who holds it up."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live

from zstrat.errors import ZstratError
from zstrat.launch import Observer, told_by
from zstrat.telemetry import report
from zstrat.transport import run as run_loop

from ._options import cluster_options, fail, settings, spec
from ._signals import interruptible
from ._top_screen import RunScreen, run_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from zstrat.launch import TaskStatus

    Show = Callable[[list[TaskStatus]], None]


@click.command()
@cluster_options
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    help="seconds between two looks",
)
@click.option("--count", type=click.IntRange(1), help="looks; default: until Ctrl-C")
@click.option("--json", "as_json", is_flag=True, help="a line of JSON for each look")
def top(
    cluster: str | None,
    keys: Path | None,
    timeout: float,
    every: float,
    count: int | None,
    as_json: bool,
) -> None:
    """Show what a run does: steps, phases, staleness, and who holds it up."""

    def plainly(seen: list[TaskStatus]) -> None:
        metrics = observed(seen)
        text = json.dumps(metrics) if as_json else "\n".join([*run_lines(metrics), ""])
        click.echo(text)

    watching = (cluster, keys, timeout, every, count)
    if as_json or not sys.stdout.isatty():
        sys.exit(watch(plainly, *watching))
    with Live(console=Console(), screen=count is None, auto_refresh=False) as live:
        code = watch(
            lambda seen: live.update(RunScreen(observed(seen)), refresh=True), *watching
        )
    sys.exit(code)


def watch(
    show: Show,
    cluster: str | None,
    keys: Path | None,
    timeout: float,
    every: float,
    count: int | None,
) -> int:
    """Looks at all tasks again and again, until Ctrl-C or ``count`` times; the exit
    code: 1 if at the last look one did not answer."""
    chosen = settings(keys)

    async def looking() -> int:
        loop = asyncio.get_running_loop()
        left, code = count, 0
        async with Observer(spec(cluster), chosen) as observer:
            while left is None or left > 0:
                due = loop.time() + every
                seen = await observer.look(timeout)
                show(seen)
                code = int(any(task.problem for task in seen))
                left = None if left is None else left - 1
                if left != 0:
                    await asyncio.sleep(max(0.0, due - loop.time()))
        return code

    try:
        return run_loop(interruptible(looking()))
    except (ZstratError, ValueError, OSError) as error:
        fail(error)


def observed(seen: Iterable[TaskStatus]) -> dict[str, Any]:
    """What `coordinator.metrics()` says of these tasks."""
    return report({status.task: told_by(status) for status in seen})
