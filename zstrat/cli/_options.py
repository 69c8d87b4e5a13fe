"""What commands share: options, signals that end them, exits, and tables for people."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import click
from rich.table import Table

from zstrat.cluster import TFConfigClusterResolver, TomlClusterResolver
from zstrat.config import environment, settings_from
from zstrat.errors import ZstratError
from zstrat.launch import TaskStatus
from zstrat.signals import handle, handle_on
from zstrat.telemetry import size

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


@final
class Seconds(click.FloatRange):
    """A duration in seconds: above 0, or at least ``least``, and at most a day, like
    those of ``ZSTRAT_*``."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__(least, 86400.0, min_open=not least)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):  # is in every range of click
            self.fail(f"{value!r} is not a valid float.", param, ctx)
        return number


def folder(path: str | Path) -> Path:
    """Converts an option to a path. Refuses "", which a shell makes of an unset
    variable, and which would mean the working folder."""
    if path == "":
        raise click.BadParameter("expected a folder, got an empty string.")
    return Path(path)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options ``--cluster``, ``--keys`` and ``--timeout``."""
    options = [
        click.option(
            "--cluster", metavar="FILE.toml", help="cluster file; default: TF_CONFIG"
        ),
        click.option(
            "--keys",
            type=folder,
            metavar="DIR",
            help="key folder; default: ZSTRAT_KEYS",
        ),
        click.option(
            "--timeout",
            type=Seconds(),
            default=5.0,
            show_default=True,
            help="seconds for each task to answer",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def count_option(
    *names: str,
    help: str,  # noqa: A002
    least: int = 1,
    default: int | None = 1,
) -> Callable[..., Any]:
    """Makes an option for a number of tasks or restarts, at least ``least``."""
    kind = click.IntRange(least)
    return click.option(
        *names, type=kind, default=default, show_default=True, help=help
    )


def settings(keys: Path | None) -> Settings:
    """Reads the settings from ``ZSTRAT_*``; ``keys`` takes precedence."""
    with failures():
        settings = settings_from(environment())
    return settings if keys is None else dataclasses.replace(settings, keys=keys)


def spec(file: str | None) -> ClusterSpec:
    """Reads the cluster from a file, or from TF_CONFIG.

    Raises:
        ValueError: There is neither, or it does not describe a cluster with tasks.
    """
    if file is not None:
        cluster = TomlClusterResolver(file).cluster_spec()
    elif environment().get("TF_CONFIG"):
        cluster = TFConfigClusterResolver().cluster_spec()
    else:
        raise ValueError(
            "no cluster specified: pass --cluster FILE.toml or set TF_CONFIG"
        )
    if not any(map(cluster.num_tasks, cluster.jobs)):
        raise ValueError(
            f"{file or 'TF_CONFIG'}: cluster: has no tasks, expected their addresses"
        )
    return cluster


def fail(error: Exception) -> NoReturn:
    """Prints the error and exits with code 2.

    Raises:
        BrokenPipeError: It was given: the reader of the output has left.
    """
    # Nobody reads the output, as after `zstrat top | head`. click then ends silently,
    # and makes sure that Python's last flush fails silently as well.
    if isinstance(error, BrokenPipeError):
        raise error
    words = str(error)
    if isinstance(error, OSError) and error.strerror:
        words = error.strerror
        if error.filename is not None:
            words = f"{error.filename}: {words}{_ADVICE.get(type(error), '')}"
    click.echo(f"zstrat: {words}", err=True)
    sys.exit(2)


_ADVICE: Final = {
    FileExistsError: ": expected a folder, or a path that does not exist",
    IsADirectoryError: ": expected the path of a file",
    NotADirectoryError: ": a parent of this path is a file; choose another path",
}
"""Remedies for errors about a path of the wrong type."""


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Exits by `fail` if the block raises an error of the cluster, of an argument or of
    a file."""
    try:
        yield
    except (ZstratError, ValueError, OSError) as error:
        fail(error)


class QueueingCommand(click.Command):
    """A command with ``--queue [SECONDS]``. For an option with an optional value click
    takes the next argument as the value, whatever it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for index, word in enumerate(args):
            if not word.startswith("-") and not word.isdecimal():
                break  # the first argument: later options are of the user's program
            following = "".join(args[index + 1 : index + 2])
            if word == "--queue" and not following.isdecimal():
                args = [*args[:index], f"--queue={NO_LIMIT}", *args[index + 1 :]]
        return super().parse_args(ctx, args)


NO_LIMIT: Final = 10**9
"""Seconds of ``--queue`` without a value: 31 years."""


def endings() -> list[signal.Signals]:
    """Returns the signals that end a command; SIGHUP only if it is not ignored, as
    under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def as_interrupts(*more: signal.Signals) -> Iterator[None]:
    """Makes `endings` and ``more`` signals raise KeyboardInterrupt with their number in
    the block, and restores the handlers after it."""
    numbers = (*endings(), *more)
    before = {number: handle(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """Returns the exit code of a program that a signal ended, as in a shell."""
    return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


@contextlib.contextmanager
def handled_by(callback: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Calls ``callback`` on the running loop for each of the signals in the block.
    After it the signals have their default effect."""
    loop, numbers = asyncio.get_running_loop(), endings()
    for number in numbers:
        handle_on(loop, number, callback, number)
    try:
        yield
    finally:
        for number in numbers:  # uvloop does not remove its handlers when it is closed
            loop.remove_signal_handler(number)


async def interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Returns the exit code of ``work``, which a signal cancels; then it is 128 + the
    number of the signal, as in a shell."""
    task = asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    with handled_by(cancel):
        try:
            return await work
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]


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
    """Formats the cells of one task. The last cell is its role in a replicated store
    and the address of the backup."""
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
    """Formats the rows of a task and of the copies of other stores in its process."""
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
    """Formats the replication of a store; "" if it never had a backup."""

    def text(name: str) -> str:
        return status.text(*path, "replication", name)

    role, state = text("role"), text("backup_state")
    if role != "primary" or not status.number(*path, "replication", "view"):
        return "" if role == "primary" else role
    return f"{state} {text('backup')}" if state else "no backup"


def table(statuses: Sequence[TaskStatus]) -> Table:
    """Formats the tasks as a table, for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    for status in statuses:
        for cells in rows(status):
            table.add_row(*cells, style="red" if status.problem else None)
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
    """Formats a short duration: 12 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if number >= scale or unit == "µs":
            scaled = number / scale
            return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"
    raise AssertionError(number)


def span(seconds: float) -> str:
    """Formats a long duration: 2h 05m."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"
