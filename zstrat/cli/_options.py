"""Shared parts of commands: options, exit codes, and the signals that end commands."""

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

from zstrat.cluster import TFConfigClusterResolver, TomlClusterResolver
from zstrat.config import environment, settings_from
from zstrat.errors import ZstratError
from zstrat.signals import handle, handle_on

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


@final
class Seconds(click.FloatRange):
    """An option type: a duration in seconds, above 0 or at least ``least``, and at most
    a day, like the durations in ``ZSTRAT_*``."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__(least, 86400.0, min_open=not least)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        # It compares false with both limits, so click takes it to be within them.
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid float.", param, ctx)
        return number


def folder(path: str | Path) -> Path:
    """Converts an option to a path. Refuses "", which a shell makes of an unset
    variable, and which would mean the current folder."""
    if path == "":
        raise click.BadParameter("expected a folder, got an empty string.")
    return Path(path)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options ``--cluster``, ``--keys`` and ``--timeout`` to a command."""
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
    # Decorators apply from the last one up; --help lists them in this order.
    for option in reversed(options):
        command = option(command)
    return command


def count_option(
    *names: str,
    help: str,  # noqa: A002
    least: int = 1,
    default: int | None = 1,
) -> Callable[..., Any]:
    """Makes a click option for a number of tasks or restarts, at least ``least``."""
    kind = click.IntRange(least)
    return click.option(
        *names, type=kind, default=default, show_default=True, help=help
    )


def settings(keys: Path | None) -> Settings:
    """Reads the settings from ``ZSTRAT_*``; the folder ``keys``, if given, takes
    precedence."""
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
    # An empty TF_CONFIG is valid for a program, but there is nothing to look at.
    if not any(map(cluster.num_tasks, cluster.jobs)):
        raise ValueError(
            f"{file or 'TF_CONFIG'}: cluster: has no tasks, expected their addresses"
        )
    return cluster


def fail(error: Exception) -> NoReturn:
    """Prints the error and exits with code 2.

    Raises:
        BrokenPipeError: ``error`` is one: the reader of the output has closed it.
    """
    # Nobody reads the output, as after `zstrat top | head`. click then ends silently,
    # and makes sure that Python's last flush fails silently as well.
    if isinstance(error, BrokenPipeError):
        raise error
    words = str(error)
    # Python's own text begins with the number of the error.
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
    """Makes errors of the cluster, of arguments or of files in the block end the
    program by `fail`."""
    try:
        yield
    except (ZstratError, ValueError, OSError) as error:
        fail(error)


class QueueingCommand(click.Command):
    """A click command with an option ``--queue`` whose value is optional. Click itself
    would take the next argument as the value, whatever it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for index, word in enumerate(args):
            # The first argument; later options are of the user's program. A number is
            # the value of an option before it.
            if not word.startswith("-") and not word.isdecimal():
                break
            following = "".join(args[index + 1 : index + 2])
            if word == "--queue" and not following.isdecimal():
                args = [*args[:index], f"--queue={NO_LIMIT}", *args[index + 1 :]]
        return super().parse_args(ctx, args)


NO_LIMIT: Final = 10**9
"""Seconds that ``--queue`` without a value waits: 31 years, so without a limit."""


def endings() -> list[signal.Signals]:
    """Returns the signals that end a command; SIGHUP only if it is not ignored, as
    under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def as_interrupts(*more: signal.Signals) -> Iterator[None]:
    """Makes the signals of `endings`, and ``more``, raise KeyboardInterrupt with their
    number in the block; restores their handlers after it."""
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
    """Returns the exit code of a program that a signal ended, as a shell computes
    it."""
    return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


@contextlib.contextmanager
def handled_by(callback: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Makes each of the signals call ``callback`` on the running loop, in the block.
    After the block the signals have their default effect."""
    loop, numbers = asyncio.get_running_loop(), endings()
    for number in numbers:
        handle_on(loop, number, callback, number)
    try:
        yield
    finally:
        for number in numbers:  # uvloop does not remove its handlers when it is closed
            loop.remove_signal_handler(number)


async def interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Runs ``work`` and returns its exit code. A signal cancels it; the code is then
    128 + the number of the signal, as in a shell."""
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
            # Not by us: by the caller that runs this task.
            if not received:
                raise
            return 128 + received[0]
