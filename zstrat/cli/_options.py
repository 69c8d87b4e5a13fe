"""Options that several commands share, and the exit of a command with an error."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import click

from zstrat.cluster import TFConfigClusterResolver, TomlClusterResolver
from zstrat.config import environment, settings_from
from zstrat.errors import ZstratError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    """Prints the error and exits with code 2."""
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
