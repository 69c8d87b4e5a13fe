"""``zstrat top``: what a run does, live, and who holds it up."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zstrat.errors import ZstratError
from zstrat.launch import Observer, told_by
from zstrat.telemetry import WORKER_PHASES, limits, report
from zstrat.transport import run as run_loop

from ._options import cluster_options, fail, settings, spec
from ._signals import interruptible
from ._tables import percent, seconds, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from zstrat.launch import TaskStatus

    Show = Callable[[list[TaskStatus]], None]

WORST = 3
"""Of what holds the run up, so much is shown."""


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
        text = json.dumps(metrics) if as_json else "\n".join([*words(metrics), ""])
        click.echo(text)

    watching = (cluster, keys, timeout, every, count)
    if as_json or not sys.stdout.isatty():
        sys.exit(watch(plainly, *watching))
    with Live(console=Console(), screen=count is None, auto_refresh=False) as live:
        code = watch(
            lambda seen: live.update(screen(observed(seen)), refresh=True), *watching
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


# ---- what is shown ---------------------------------------------------------------


def screen(metrics: Mapping[str, Any]) -> Group:
    """The run, for a terminal."""
    return Group(
        Text(_summary(metrics), style="bold"),
        Text(""),
        _table(_worker_rows(metrics), WORKER_COLUMNS),
        Text(""),
        _table(_server_rows(metrics), SERVER_COLUMNS),
        Text(""),
        *[Text(line) for line in _holdups(metrics)],
    )


def words(metrics: Mapping[str, Any]) -> list[str]:
    """The run, for a file or a pipe."""
    found = [_summary(metrics)]
    for columns, rows in (
        (WORKER_COLUMNS, _worker_rows(metrics)),
        (SERVER_COLUMNS, _server_rows(metrics)),
    ):
        for cells in rows:
            told = zip(columns, cells, strict=True)
            found.append(" ".join(f"{name}={cell}" for name, cell in told if cell))
    return found + _holdups(metrics)


WORKER_COLUMNS = (
    "task",
    "state",
    "steps/s",
    *(str(phase) for phase in WORKER_PHASES),
    "busy",
    "in/s",
    "out/s",
    "waiting",
    "memory",
    "compiled",
)
SERVER_COLUMNS = (
    "task",
    "state",
    "pulls/s",
    "pushes/s",
    "apply",
    "apply p99",
    "busy",
    "in/s",
    "out/s",
    "waiting",
    "memory",
)


def _summary(metrics: Mapping[str, Any]) -> str:
    examples = metrics["examples_per_s"]
    stale = metrics["staleness"]
    parts = [f"{metrics['steps_per_s']:.1f} steps/s"]
    if examples is not None:
        parts.append(f"{examples:.0f} examples/s")
    if stale["count"]:
        parts.append(f"staleness {stale['p50']:g} (p99 {stale['p99']:g})")
    return ", ".join(parts)


def _holdups(metrics: Mapping[str, Any]) -> list[str]:
    found = []
    slowest = metrics["slowest"]
    if slowest is not None:
        found.append(f"slowest: {slowest['task']} {slowest['why']}")
    worst = [
        limit for limit in limits(metrics) if limit.task != (slowest or {}).get("task")
    ]
    return found + [f"{each.task}: {each.words}" for each in worst[:WORST]]


def _worker_rows(metrics: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, task in _tasks(metrics, "worker"):
        if task["state"] == "lost":
            rows.append(_absent(name, task, len(WORKER_COLUMNS)))
            continue
        time, phases = task["time"], task["phases"]
        busy = time.get("draw", 0.0) + time.get("compute", 0.0)
        rows.append(
            [
                name,
                task["state"],
                f"{task['steps_per_s']:.1f}",
                *[_median(phases[phase]) for phase in WORKER_PHASES],
                percent(busy),
                size(task["bytes_in_per_s"]),
                size(task["bytes_out_per_s"]),
                str(task["waiting"]),
                size(task["memory"]),
                f"{task['compilations']}",
            ]
        )
    return rows


def _server_rows(metrics: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, task in _tasks(metrics, "ps"):
        if task["state"] == "lost":
            rows.append(_absent(name, task, len(SERVER_COLUMNS)))
            continue
        apply = task["apply"]
        rows.append(
            [
                name,
                task["state"],
                f"{task['pulls_per_s']:.1f}",
                f"{task['pushes_per_s']:.1f}",
                _median(apply),
                seconds(apply["p99"]) if apply["count"] else "",
                percent(task["busy"]),
                size(task["bytes_in_per_s"]),
                size(task["bytes_out_per_s"]),
                str(task["waiting"]),
                size(task["memory"]),
            ]
        )
    return rows


def _tasks(
    metrics: Mapping[str, Any], job: str
) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for name, task in metrics["tasks"].items():
        if name.partition(":")[0] == job:
            yield name, task


def _absent(name: str, task: Mapping[str, Any], width: int) -> list[str]:
    return [name, "lost: " + task["last_error"], *[""] * (width - 2)]


def _median(summary: Mapping[str, Any]) -> str:
    return seconds(summary["p50"]) if summary["count"] else ""


def _table(rows: list[list[str]], columns: tuple[str, ...]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="left" if name in columns[:2] else "right")
    for cells in rows:
        made.add_row(*cells, style="red" if cells[1].startswith("lost") else None)
    return made
