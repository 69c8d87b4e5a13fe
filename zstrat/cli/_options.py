"""The options that commands share: which cluster, with which settings; and how a
command ends whose options cannot be."""

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
    """A duration: above 0, or at least so many, and no longer than a day, as those of
    ``ZSTRAT_*``."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__(least, 86400.0, min_open=not least)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):  # no range leaves that out
            self.fail(f"{value!r} is not a valid float.", param, ctx)
        return number


def folder(path: str | Path) -> Path:
    """The type of options that name a folder. A shell makes "" of a variable that is
    not set, and that would be the working folder."""
    if path == "":
        raise click.BadParameter("expected a folder, got an empty text.")
    return Path(path)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--cluster``, ``--keys``, ``--timeout``: which cluster, how, for how long."""
    options = [
        click.option("--cluster", metavar="FILE.toml", help="default: TF_CONFIG"),
        click.option("--keys", type=folder, metavar="DIR", help="default: ZSTRAT_KEYS"),
        click.option(
            "--timeout", type=Seconds(), default=5.0, show_default=True, help="seconds"
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def settings(keys: Path | None) -> Settings:
    """From ``ZSTRAT_*``, with this folder of keys if one is given."""
    with failures():
        found = settings_from(environment())
    return found if keys is None else dataclasses.replace(found, keys=keys)


def spec(file: str | None) -> ClusterSpec:
    """The cluster of a file, or of TF_CONFIG.

    Raises:
        ValueError: There is neither, or it is no cluster, or one without tasks.
    """
    if file is not None:
        found = TomlClusterResolver(file).cluster_spec()
    elif environment().get("TF_CONFIG"):
        found = TFConfigClusterResolver().cluster_spec()
    else:
        raise ValueError("which cluster? Set TF_CONFIG or give --cluster FILE.toml")
    if not any(map(found.num_tasks, found.jobs)):
        raise ValueError(
            f"{file or 'TF_CONFIG'}: cluster: expected addresses of tasks, it has none"
        )
    return found


def fail(error: Exception) -> NoReturn:
    """Says what was wrong, and ends with 2."""
    words = str(error)
    if isinstance(error, OSError) and error.strerror:
        words = error.strerror
        if error.filename is not None:
            words = f"{error.filename}: {words}{_ADVICE.get(type(error), '')}"
    click.echo(f"zstrat: {words}", err=True)
    sys.exit(2)


_ADVICE: Final = {
    FileExistsError: ": give the path of a folder, or one where nothing is",
    IsADirectoryError: ": give the path of a file",
    NotADirectoryError: ": a file has the name of a folder of that path; give another",
}
"""What to do about a path that is something else."""


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """What is wrong with the cluster, with what was said, or with a file, and is found
    in the block, ends the command (`fail`)."""
    try:
        yield
    except (ZstratError, ValueError, OSError) as error:
        fail(error)


class QueueingCommand(click.Command):
    """A command that has ``--queue [SECONDS]``: where a value may follow an option and
    need not, click takes whatever follows for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for at, word in enumerate(args):
            if not word.startswith("-") and not word.isdecimal():
                break  # the first argument: what follows may be another program's
            if word == "--queue" and not "".join(args[at + 1 : at + 2]).isdecimal():
                args = [*args[:at], f"--queue={FOR_EVER}", *args[at + 1 :]]
        return super().parse_args(ctx, args)


FOR_EVER: Final = 10**9
"""Seconds that nobody lives to see the end of."""
