"""Tasks, sizes and durations as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.launch import TaskStatus

COLUMNS: Final = (
    "task",
    "address",
    "incarnation",
    "uptime",
    "memory",
    "variables",
    "held",
    "copies",
)
_UNREACHABLE: Final = "unreachable: "


def row(status: TaskStatus) -> list[str]:
    """The cells of one task, as people read them."""
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
        size(number("task", "memory_bytes")),
        variables,
        held,
        copies(status),
    ]


def copies(status: TaskStatus) -> str:
    """Where second copies are: what the process of a parameter server serves, and of
    what it has the backup, by the numbers of the parameter servers; a star stands
    behind what has no backup. Empty if there are no second copies."""
    values = status.values
    own, hosted = values.get("service"), values.get("copies")
    number = int(status.task.partition(":")[2] or 0)
    found = [(number, own)] if isinstance(own, dict) and own.get("session") else []
    others = hosted if isinstance(hosted, list) else []
    found += [(int(str(at.get("store"))), at) for at in others if isinstance(at, dict)]
    roles: dict[str, list[str]] = {"primary": [], "backup": []}
    for store, values in found:
        standing = values.get("replication")
        if not isinstance(standing, dict) or not standing.get("view"):
            continue
        role = str(standing.get("role"))
        is_bare = role == "primary" and standing.get("backup_state") != "attached"
        roles.setdefault(role, []).append(f"{store}{'*' if is_bare else ''}")
    words = (("serves", roles["primary"]), ("backs", roles["backup"]))
    return " ".join(f"{word} {','.join(which)}" for word, which in words if which)


def table(seen: Sequence[TaskStatus]) -> Table:
    """The tasks for a terminal."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    for status in seen:
        made.add_row(*row(status), style="red" if status.problem else None)
    return made


def lines(seen: Sequence[TaskStatus]) -> list[str]:
    """The tasks for a file or a pipe."""
    rows = [row(status) for status in seen]
    return [
        " ".join(
            cell if cell.startswith(_UNREACHABLE) else f"{name}={cell}"
            for name, cell in zip(COLUMNS, cells, strict=True)
            if cell
        )
        for cells in rows
    ]


def size(number: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


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
