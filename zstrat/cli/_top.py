"""``zstrat top``: what a run does, live, and who holds it up.

The screen shows as much as the terminal has room for. Where it is narrow, columns are
left out, the least telling ones first; where it is low, tasks are: those that are lost,
and the slowest, stay. What holds the run up comes above the tables, so that it is
always seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zstrat.launch import Observer, told_by
from zstrat.telemetry import (
    COLUMNS,
    WORKER_PHASES,
    Kind,
    Unit,
    held_up,
    percent,
    report,
    size,
    task_metrics,
)
from zstrat.transport import run as run_loop

from ._options import Seconds, cluster_options, failures, settings, spec
from ._signals import interruptible
from ._tables import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from rich.console import ConsoleOptions, RenderResult

    from zstrat.launch import TaskStatus

    Show = Callable[[list[TaskStatus]], None]

    Task = Mapping[str, Any]

    "As `ClusterCoordinator.metrics` has it among its ``tasks``."

    Row = dict[str, str]

    "The cells of a task, by column."


@click.command(short_help="Show live what a run does, and who holds it up.")
@cluster_options
@click.option(
    "--every",
    type=Seconds(0.1),
    default=1.0,
    show_default=True,
    help="seconds between two looks",
)
@click.option(
    "--count", type=click.IntRange(1), help="how many looks; default: until Ctrl-C"
)
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

    with failures():
        return run_loop(interruptible(looking()))


def observed(seen: Iterable[TaskStatus]) -> dict[str, Any]:
    """What `coordinator.metrics()` says of these tasks."""
    return report({status.task: told_by(status) for status in seen})


NAMED: Final = 4
"""So many of the lost tasks are named above the tables."""
BETWEEN: Final = 2
"""Characters from one column to the next."""
FEWEST: Final = 2
"""Tasks of a kind that are shown, however low the terminal is."""
AROUND: Final = 6
"""Lines of a screen beside tasks and what holds the run up: the summary, a header and
an empty line above each table, and the one in which the cursor is."""
LEFT_OUT: Final = (
    "processor", "compiled", "apply p99", "memory", "waiting", "out/s", "in/s", "wait",
    "pulls/s", "pushes/s", "draw", "state",
)  # fmt: skip
"""Columns that a narrow terminal does not show, in this order."""


@final
@dataclass(frozen=True, slots=True)
class RunScreen:
    """A run, for a terminal.

    Args:
        metrics: As `ClusterCoordinator.metrics` gives them.
    """

    metrics: Mapping[str, Any]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        width = options.max_width
        texts = [Text(text) for text in _held_up(self.metrics)]
        lost = _lost(self.metrics)
        if lost:
            texts.append(Text(f"lost: {lost}", style="red"))
        above = [line for text in texts for line in text.wrap(console, width)]
        servers, workers = _rows(self.metrics, "ps"), _rows(self.metrics, "worker")
        room = console.height - AROUND - len(above)
        fewer = max(FEWEST, room - len(workers), room // 3)
        yield Text(_summary(self.metrics), style="bold")
        yield from above
        yield from _fitted(workers, max(FEWEST, room - min(fewer, len(servers))), width)
        yield from _fitted(servers, fewer, width)


def run_lines(metrics: Mapping[str, Any]) -> list[str]:
    """The run, for a file or a pipe."""
    rows = [*_rows(metrics, "worker"), *_rows(metrics, "ps")]
    for row in rows:
        if row["state"] == "lost":
            row["state"] += f": {metrics['tasks'][row['task']]['last_error']}"
    return [
        _summary(metrics),
        *[" ".join(f"{k}={cell}" for k, cell in row.items() if cell) for row in rows],
        *_held_up(metrics),
    ]


def _summary(metrics: Mapping[str, Any]) -> str:
    examples = metrics["examples_per_s"]
    stale = metrics["staleness"]
    parts = [f"{metrics['steps_per_s']:.1f} steps/s"]
    if examples is not None:
        parts.append(f"{examples:.0f} examples/s")
    if stale["count"]:
        parts.append(f"staleness {stale['p50']:g} (p99 {stale['p99']:g})")
    return ", ".join(parts)


def _held_up(metrics: Mapping[str, Any]) -> list[str]:
    slowest = metrics["slowest"]
    return [
        f"slowest: {each['task']} {each['why']}"
        if each is slowest
        else f"{each['task']}: {each['why']}"
        for each in held_up(metrics)
    ]


def _lost(metrics: Mapping[str, Any]) -> str:
    """Names of tasks; `run_lines` and ``zstrat status`` say why."""
    tasks = metrics["tasks"].items()
    names = [name for name, task in tasks if task["state"] == "lost"]
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest


def _rows(metrics: Mapping[str, Any], job: str) -> list[Row]:
    """The rows of the tasks of a job, in their order."""
    tasks = [
        (name, task)
        for name, task in metrics["tasks"].items()
        if name.partition(":")[0] == job
    ]
    return [_row(name, task, _cells(task, job)) for name, task in tasks]


def _row(name: str, task: Task, cells: Row) -> Row:
    if task["state"] == "lost":  # and what it told before is not so any more
        cells = dict.fromkeys(cells, "")
    return {"task": name, "state": task["state"], **cells}


def _cells(task: Task, job: str) -> Row:
    """What is counted per second, then what its time goes to, then other numbers."""
    rates, others = {}, {}
    for metric in task_metrics(job):
        number, heading = task[metric.name], COLUMNS[metric.name].lower()
        if not heading:
            continue
        match metric.unit, metric.kind is Kind.RATE:
            case Unit.COUNTS, True:
                rates[heading] = f"{number:.1f}"
            case Unit.BYTES, is_rate:
                others[f"{heading}/s" if is_rate else heading] = size(number)
            case Unit.SECONDS, True:
                others[heading] = percent(number)
            case _:
                others[heading] = str(number)
    return rates | (_worker(task) if job == "worker" else _server(task)) | others


def _worker(task: Task) -> Row:
    time, phases = task["time"], task["phases"]
    return {
        **{str(phase): _median(phases[phase]) for phase in WORKER_PHASES},
        "busy": percent(time.get("draw", 0.0) + time.get("compute", 0.0)),
    }


def _server(task: Task) -> Row:
    apply = task["apply"]
    return {
        "apply": _median(apply),
        "apply p99": seconds(apply["p99"]) if apply["count"] else "",
        "busy": percent(task["busy"]),
    }


def _median(summary: Mapping[str, Any]) -> str:
    return seconds(summary["p50"]) if summary["count"] else ""


def _fitted(rows: list[Row], room: int, width: int) -> Iterable[Text | Table]:
    """A table of so many lines and columns, with what stands above and below it."""
    if not rows:
        return
    more = 0
    if len(rows) > room:
        more = len(rows) - room + 1  # whose line takes room, too
        rows = sorted(rows, key=_urgency)[:-more]
    columns = _columns(rows, width)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        side = "left" if name in ("task", "state") else "right"
        made.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        cells = [row[name] for name in columns]
        made.add_row(*cells, style="red" if row["state"] == "lost" else None)
    yield Text("")
    yield made
    if more:
        yield Text(f"and {more} more, which are not lost and not slower")


def _urgency(row: Row) -> tuple[bool, float]:
    """How urgent it is to show a task: of two the one with less is shown."""
    done = row.get("steps/s") or row.get("pushes/s") or "0"
    return row["state"] != "lost", float(done)


def _columns(rows: list[Row], width: int) -> list[str]:
    """The columns for which there is room."""
    wide = {
        name: BETWEEN + max(len(name), *(len(row[name]) for row in rows))
        for name in rows[0]
    }
    for name in LEFT_OUT:
        if sum(wide.values()) - BETWEEN <= width:
            break
        wide.pop(name, None)
    return list(wide)
