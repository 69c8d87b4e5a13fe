"""Formats the state of tasks, durations and the like for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from zstrat.launch import TaskStatus
from zstrat.telemetry import size

if TYPE_CHECKING:
    from collections.abc import Sequence


COLUMNS: Final = (
    "task",
    "address",
    "incarnation",
    "uptime",
    "memory",
    "variables",
    "held",
    "copy",
)

_UNREACHABLE: Final = "unreachable: "


def row(status: TaskStatus) -> list[str]:
    """Formats the cells of one task's row. The last cell is its role in a replicated
    store and the address of the backup."""
    # In the third column, which `lines` prints as words, without the column's name.
    if status.problem:
        problem = f"{_UNREACHABLE}{status.problem}"
        return [status.task, status.address, problem, *[""] * 5]
    number = status.number
    variables = held = ""
    if not status.task.startswith("worker"):  # a worker stores no variables
        variables = f"{number('service', 'variables'):.0f}"
        held = size(number("service", "bytes") + number("service", "slot_bytes"))
    return [
        status.task,
        status.address,
        f"{int(number('task', 'incarnation')):016x}"[:8],
        span(number("task", "uptime")),
        size(number("process", "memory")),
        variables,
        held,
        _copy(status, "service"),
    ]


def rows(status: TaskStatus) -> list[list[str]]:
    """Formats the row of a task, and the rows of the copies of other tasks' stores in
    its process."""
    copies = status.values.get("copies")
    copy_rows = [
        _copy_row(TaskStatus("", "", values=values))
        for values in (copies if isinstance(copies, list) else [])
        if isinstance(values, dict)
    ]
    return [row(status), *copy_rows]


def _copy_row(copy: TaskStatus) -> list[str]:
    number = copy.number
    is_backup = copy.text("replication", "role") == "backup"
    return [
        f"ps:{number('store'):.0f}/{'copy' if is_backup else 'store'}",
        copy.text("address"),
        f"{int(number('incarnation')):016x}"[:8],
        span(number("uptime")),
        "",
        f"{number('variables'):.0f}",
        size(number("bytes") + number("slot_bytes")),
        _copy(copy),
    ]


def _copy(status: TaskStatus, *path: str) -> str:
    """Formats the replication of a store: its role, or for a primary the state and
    address of its backup; "" if it never had a backup."""

    def text(name: str) -> str:
        return status.text(*path, "replication", name)

    # Every store is a primary; only views above 0 show that it is, or was, replicated.
    role, state = text("role"), text("backup_state")
    if role != "primary" or not status.number(*path, "replication", "view"):
        return "" if role == "primary" else role
    return f"{state} {text('backup')}" if state else "no backup"


def table(statuses: Sequence[TaskStatus]) -> Table:
    """Formats the tasks as a table for a terminal; below it are the reasons why some
    tasks do not answer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    for status in statuses:
        for cells in rows(status):
            if status.problem:
                # The reason is a sentence, which a column would make a tower of words.
                cells[2] = "unreachable"
            table.add_row(*cells, style="red" if status.problem else None)
    if problems := [status.problem for status in statuses if status.problem]:
        table.caption = Text("\n".join(problems), style="red")
        table.caption_justify = "left"
    return table


def lines(statuses: Sequence[TaskStatus]) -> list[str]:
    """Formats the tasks as lines, for a file or a pipe."""
    return [
        " ".join(
            cell if cell.startswith(_UNREACHABLE) else f"{name}={cell}"
            for name, cell in zip(COLUMNS, cells, strict=True)
            if cell
        )
        for status in statuses
        for cells in rows(status)
    ]


def seconds(number: float) -> str:
    """Formats a short duration, such as 12 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if number >= scale or unit == "µs":
            scaled = number / scale
            return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"
    raise AssertionError(number)


def span(seconds: float) -> str:
    """Formats a long duration, such as 2h 05m."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"
