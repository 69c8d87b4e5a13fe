"""``zstrat top``: shows a run live, and its slowest tasks.

The output fits the terminal: a narrow terminal omits the least important columns, and a
low one shows only lost tasks and the slowest ones. Bottlenecks are above the tables,
where they are always visible.
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

from zstrat.launch import Observer, report_of
from zstrat.telemetry import (
    COLUMNS,
    WORKER_PHASES,
    Kind,
    Phase,
    Unit,
    held_up,
    percent,
    report,
    size,
    task_metrics,
)
from zstrat.transport import run as run_loop

from ._options import (
    Seconds,
    cluster_options,
    failures,
    interruptible,
    settings,
    spec,
)
from ._tables import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from rich.console import ConsoleOptions, RenderResult

    from zstrat.launch import TaskStatus

    Show = Callable[[list[TaskStatus]], None]

    Task = Mapping[str, Any]

    "An entry of ``tasks`` in `ClusterCoordinator.metrics`."

    Row = dict[str, str]

    "The cells of a task, by column."


@click.command(short_help="Show a run live, with its slowest tasks.")
@cluster_options
@click.option(
    "--every",
    type=Seconds(0.1),
    default=1.0,
    show_default=True,
    help="seconds between updates",
)
@click.option(
    "--count", type=click.IntRange(1), help="number of updates; default: until Ctrl-C"
)
@click.option("--json", "as_json", is_flag=True, help="print a line of JSON per update")
def top(
    cluster: str | None,
    keys: Path | None,
    timeout: float,
    every: float,
    count: int | None,
    as_json: bool,
) -> None:
    """Show a run: steps, phases, staleness, and the slowest tasks."""

    def print_plain(statuses: list[TaskStatus]) -> None:
        metrics = metrics_of(statuses)
        text = json.dumps(metrics) if as_json else "\n".join([*run_lines(metrics), ""])
        click.echo(text)

    arguments = (cluster, keys, timeout, every, count)
    # A pipe or a file gets lines that can be searched, one block per update.
    if as_json or not sys.stdout.isatty():
        sys.exit(watch(print_plain, *arguments))
    # With a count the last picture stays: the alternate screen would take it away.
    with Live(console=Console(), screen=count is None, auto_refresh=False) as live:
        code = watch(
            lambda found: live.update(RunScreen(metrics_of(found)), refresh=True),
            *arguments,
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
    """Inspects all tasks ``count`` times or until Ctrl-C; returns the exit code, 1 if a
    task did not answer the last time."""
    chosen = settings(keys)

    # Links stay open from look to look: opening them costs each task a handshake.
    async def inspect() -> int:
        loop = asyncio.get_running_loop()
        left, code = count, 0
        async with Observer(spec(cluster), chosen) as observer:
            while left is None or left > 0:
                due = loop.time() + every
                statuses = await observer.inspect(timeout)
                show(statuses)
                code = int(any(status.problem for status in statuses))
                left = None if left is None else left - 1
                if left != 0:
                    await asyncio.sleep(max(0.0, due - loop.time()))
        return code

    with failures():
        return run_loop(interruptible(inspect()))


def metrics_of(statuses: Iterable[TaskStatus]) -> dict[str, Any]:
    """Converts statuses of tasks to the format of `coordinator.metrics()`."""
    return report({status.task: report_of(status) for status in statuses})


NAMED: Final = 4
"""Maximum number of tasks, such as lost ones, that a line above the tables names."""
GAP: Final = 2
"""Characters between two columns."""
FEWEST: Final = 2
"""Minimum number of tasks of a job (workers, ps) that are shown."""
AROUND: Final = 6
"""Number of lines of the screen that show neither tasks nor bottlenecks: the summary, a
header and an empty line above each table, and the line of the cursor."""
KEPT: Final = frozenset(
    {"task", "steps/s", Phase.PULL, Phase.COMPUTE, Phase.PUSH, "busy", "apply"}
)
"""Columns that a narrow terminal shows too; other columns are omitted from the
right."""


@final
@dataclass(frozen=True, slots=True)
class RunScreen:
    """Renders the metrics of a run for a terminal.

    Args:
        metrics: The result of `ClusterCoordinator.metrics`.
    """

    metrics: Mapping[str, Any]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        width = options.max_width
        lines = [*_program_lines(self.metrics), *_bottleneck_lines(self.metrics)]
        texts = [Text(line) for line in lines]
        lost = _lost_tasks(self.metrics)
        if lost:
            texts.append(Text(f"lost: {lost}", style="red"))
        above = [line for text in texts for line in text.wrap(console, width)]
        servers, workers = _rows(self.metrics, "ps"), _rows(self.metrics, "worker")
        # Servers get at most a third unless there is room; workers get the rest.
        height = console.height - AROUND - len(above)
        for_servers = max(FEWEST, height - len(workers), height // 3)
        for_workers = max(FEWEST, height - min(for_servers, len(servers)))
        yield Text(_summary(self.metrics), style="bold")
        yield from above
        yield from _fitting_table(workers, for_workers, width)
        yield from _fitting_table(servers, for_servers, width)


def run_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Formats the metrics of a run as lines, for a file or a pipe."""
    rows = [*_rows(metrics, "worker"), *_rows(metrics, "ps")]
    for row in rows:
        if row["state"] == "lost":
            row["state"] += f": {metrics['tasks'][row['task']]['last_error']}"
    return [
        _summary(metrics),
        *[" ".join(f"{k}={cell}" for k, cell in row.items() if cell) for row in rows],
        *_program_lines(metrics),
        *_bottleneck_lines(metrics),
    ]


def _summary(metrics: Mapping[str, Any]) -> str:
    examples = metrics["examples_per_s"]
    stale = metrics["staleness"]
    parts = [f"{metrics['steps_per_s']:.1f} steps/s"]
    if examples is not None:
        parts.append(f"{examples:.0f} examples/s")
    if stale["count"]:
        parts.append(f"staleness {stale['p50']:g} (p99 {stale['p99']:g})")
    if (lead := metrics["largest_lead"]) is not None:
        parts.append(f"largest lead {lead}")
    return ", ".join(parts)


def _program_lines(metrics: Mapping[str, Any]) -> Iterable[str]:
    """Describes each leased dataset, and the rounds of each optimizer, in one line
    each."""
    for name, leases in metrics["leases"].items():
        done, total = leases["done"] + leases["skipped"], leases["total"]
        of = f" of {total} ({percent(done / total)})" if total else ""
        skipped = f", {leases['skipped']} skipped" if leases["skipped"] else ""
        yield (
            f"{name}: epoch {leases['epoch']}, {done}{of} examples, "
            f"{leases['open']} leases open{skipped}"
        )
    yield from _round_lines(metrics)


def _round_lines(metrics: Mapping[str, Any]) -> Iterable[str]:
    """Describes the rounds (merged gradients of several steps) of each optimizer in a
    line."""
    for name, rounds in metrics["rounds"].items():
        parts = [
            f"rounds of {name!r}: {rounds['per_s']:.1f}/s",
            f"{rounds['waiting']} of {rounds['workers']} contributions wait",
        ]
        for what in ("late", "dropped"):
            counts = [f"{worker} {n}" for worker, n in rounds[what].items()]
            if counts:
                parts.append(f"{what}: {_shortened(counts)}")
        waits = [
            f"{worker} {seconds(wait['seconds'])}"
            for worker, wait in rounds["waited_for"].items()
        ]
        if waits:
            parts.append(f"waited for {_shortened(waits)}")
        yield ", ".join(parts)


def _bottleneck_lines(metrics: Mapping[str, Any]) -> list[str]:
    slowest = metrics["slowest"]
    return [
        f"slowest: {task['task']} {task['why']}"
        if task is slowest
        else f"{task['task']}: {task['why']}"
        for task in held_up(metrics)
    ]


def _lost_tasks(metrics: Mapping[str, Any]) -> str:
    """Names the lost tasks; `run_lines` and ``zstrat status`` also give the reasons."""
    tasks = metrics["tasks"].items()
    return _shortened([name for name, task in tasks if task["state"] == "lost"])


def _shortened(words: Sequence[str]) -> str:
    rest = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]) + rest


def _rows(metrics: Mapping[str, Any], job: str) -> list[Row]:
    """Returns the table rows of the tasks of a job, in the order of the tasks."""
    rows = []
    for name, task in metrics["tasks"].items():
        if name.partition(":")[0] == job:
            cells = _cells(task, job)
            # Its last numbers are outdated. Empty cells keep the columns.
            if task["state"] == "lost":
                cells = dict.fromkeys(cells, "")
            rows.append({"task": name, "state": task["state"], **cells})
    return rows


def _cells(task: Task, job: str) -> Row:
    """Returns the cells of a task's row: rates, then phases and busy time, then
    others."""
    rates, others = {}, {}
    for metric in task_metrics(job):
        number, heading = task[metric.name], COLUMNS[metric.name].lower()
        if not heading:
            continue
        # Seconds per second are a share of time.
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


def _fitting_table(rows: list[Row], height: int, width: int) -> Iterable[Text | Table]:
    """Yields the lines of a table of at most this height and width."""
    if not rows:
        return
    more = 0
    if len(rows) > height:
        # One more, for the line that says so.
        more = len(rows) - height + 1
        rows = sorted(rows, key=_priority)[:-more]
    columns = _columns(rows, width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        side = "left" if name in ("task", "state") else "right"
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        cells = [row[name] for name in columns]
        table.add_row(*cells, style="red" if row["state"] == "lost" else None)
    yield Text("")
    yield table
    if more:
        yield Text(f"{more} more, neither lost nor slower")


def _priority(row: Row) -> tuple[bool, float]:
    """Returns the sort key of a task's row: lost tasks come first, then the slowest."""
    rate = row.get("steps/s") or row.get("pushes/s") or "0"
    return row["state"] != "lost", float(rate)


def _columns(rows: list[Row], width: int) -> list[str]:
    """Returns the names of the columns that fit into the width."""
    widths = {
        name: GAP + max(len(name), *(len(row[name]) for row in rows))
        for name in rows[0]
    }
    # The columns are in the order of importance, so a new one needs no entry here.
    for name in [name for name in reversed(rows[0]) if name not in KEPT]:
        if sum(widths.values()) - GAP <= width:
            break
        del widths[name]
    return list(widths)
