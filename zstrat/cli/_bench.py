"""``zstrat bench``: this machine, measured."""

from __future__ import annotations

import shlex
import sys
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from zstrat.collectives import fitted
from zstrat.errors import ZstratError
from zstrat.launch import SIZES, Calibration, calibrate
from zstrat.transport import run as run_loop

from ._signals import interruptible
from ._tables import size
from ._told import fail

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.collectives import Measurement


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(2),
    default=4,
    show_default=True,
    help="largest group",
)
@click.option(
    "--sizes", default=",".join(map(str, SIZES)), show_default=True, help="bytes"
)
@click.option(
    "--lane", type=click.Choice(["ipc", "tcp"]), default="tcp", show_default=True
)
@click.option(
    "--calibrate",
    "file",
    type=Path,
    metavar="FILE.toml",
    help="write the table for ZSTRAT_CHOICES",
)
def collectives(ranks: int, sizes: str, lane: str, file: Path | None) -> None:
    """Compare the algorithms of collectives, among processes of this machine."""
    try:
        plan = Calibration(ranks, _sizes(sizes), lane)
        if file is not None:
            _check_writable(file)
        found: list[Measurement] = []
        code = run_loop(interruptible(_calibrated(plan, found)))
        click.echo("\n".join(_compared(found)))
        if file is not None and not code:
            file.write_text(fitted(found).to_toml(), "utf-8")
            click.echo(f"written: use it with ZSTRAT_CHOICES={shlex.quote(str(file))}")
    except (ZstratError, ValueError, OSError) as error:
        fail(error)
    sys.exit(code)


async def _calibrated(plan: Calibration, found: list[Measurement]) -> int:
    def begins(ranks: int) -> None:
        click.echo(f"measuring {ranks} ranks", err=True)

    found += await calibrate(plan, begins)
    return 0


def _check_writable(file: Path) -> None:
    """Before minutes go by with measuring. What the file holds stays until then.

    Raises:
        OSError: It cannot be written to.
    """
    is_new = not file.exists()
    with file.open("a"):
        pass
    if is_new:
        file.resolve().unlink()  # not the link to it


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"--sizes {text}: expected bytes with commas between")
    return tuple(map(int, parts))


def _compared(found: Sequence[Measurement]) -> Iterator[str]:
    """A line for each call, group and size: the algorithms, the fastest first."""
    for (call, ranks, nbytes), same in groupby(found, lambda m: (m[0], m[2], m[3])):
        times: dict[str, list[float]] = {}
        for each in same:
            times.setdefault(each.algorithm, []).append(each.seconds)
        middle = sorted((median(times[name]), name) for name in times)
        words = ", ".join(f"{name} {1e3 * seconds:.2f}" for seconds, name in middle)
        yield f"{call:15} {ranks} ranks {size(nbytes):>10}  ms: {words}"
