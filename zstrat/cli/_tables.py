"""Tasks, sizes and durations as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

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
    """The cells of one task, as people read them. The last one: what it is to a store
    of which there is a second copy, and where that is."""
    if status.problem:
        problem = f"{_UNREACHABLE}{status.problem}"
        return [status.task, status.address, problem, *[""] * 5]
    number = status.number
    variables = held = ""
    if not status.task.startswith("worker"):  # a worker holds no variables
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
    """The task, and the copies that it keeps for others."""
    copies = status.values.get("copies")
    hosted = [
        _hosted(TaskStatus("", "", values=values))
        for values in (copies if isinstance(copies, list) else [])
        if isinstance(values, dict)
    ]
    return [row(status), *hosted]


def _hosted(copy: TaskStatus) -> list[str]:
    number = copy.number
    return [
        f"ps:{number('store'):.0f}/{_kind(copy)}",
        copy.text("address"),
        f"{int(number('incarnation')):016x}"[:8],
        span(number("uptime")),
        "",
        f"{number('variables'):.0f}",
        size(number("bytes") + number("slot_bytes")),
        _copy(copy),
    ]


def _kind(hosted: TaskStatus) -> str:
    is_backup = hosted.text("replication", "role") == "backup"
    return "copy" if is_backup else "store"


def _copy(status: TaskStatus, *at: str) -> str:
    """Nothing if there never was a second copy."""

    def text(name: str) -> str:
        return status.text(*at, "replication", name)

    role, state = text("role"), text("backup_state")
    if role != "primary" or not status.number(*at, "replication", "view"):
        return "" if role == "primary" else role
    return f"{state} {text('backup')}" if state else "no backup"


def table(seen: Sequence[TaskStatus]) -> Table:
    """The tasks for a terminal."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    for status in seen:
        for cells in rows(status):
            made.add_row(*cells, style="red" if status.problem else None)
    return made


def lines(seen: Sequence[TaskStatus]) -> list[str]:
    """The tasks for a file or a pipe."""
    return [
        " ".join(
            cell if cell.startswith(_UNREACHABLE) else f"{name}={cell}"
            for name, cell in zip(COLUMNS, cells, strict=True)
            if cell
        )
        for status in seen
        for cells in rows(status)
    ]


def seconds(number: float) -> str:
    """A short duration as people read it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if number >= scale or unit == "µs":
            scaled = number / scale
            return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"
    raise AssertionError(number)


def span(seconds: float) -> str:
    """A duration as people read it."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"
