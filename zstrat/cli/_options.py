"""The options that commands share: which cluster, with which settings; and how a
command ends whose options cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from zstrat.cluster import TFConfigClusterResolver, TomlClusterResolver
from zstrat.config import environment, settings_from
from zstrat.errors import ZstratError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--cluster``, ``--keys``, ``--timeout``: which cluster, how, for how long."""
    options = [
        click.option("--cluster", metavar="FILE.toml", help="default: TF_CONFIG"),
        click.option("--keys", type=Path, metavar="DIR", help="default: ZSTRAT_KEYS"),
        click.option("--timeout", default=5.0, show_default=True, help="seconds"),
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
        ValueError: There is neither, or it is no cluster.
    """
    if file is not None:
        return TomlClusterResolver(file).cluster_spec()
    if not environment().get("TF_CONFIG"):
        raise ValueError("which cluster? Set TF_CONFIG or give --cluster FILE.toml")
    return TFConfigClusterResolver().cluster_spec()


def fail(error: Exception) -> NoReturn:
    """Says what was wrong, and ends with 2."""
    click.echo(f"zstrat: {error}", err=True)
    sys.exit(2)


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
