"""``zstrat bench``: this machine, or a cluster, measured."""

from __future__ import annotations

import shlex
import sys
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import click

from zstrat.cluster import TFConfigClusterResolver, TomlClusterResolver
from zstrat.collectives import Group, fitted
from zstrat.launch import SIZES, Calibration, calibrate, calibrate_tasks
from zstrat.telemetry import size
from zstrat.transport import run as run_loop

from ._options import failures, settings
from ._signals import as_interrupts, interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.cluster import ClusterResolver
    from zstrat.collectives import Measurement

_PROCESSES: Final = 4
"""Of this machine, if nobody says how many."""

_INTERRUPTED: Final = 130
"""What shells say of a program that Ctrl-C has ended."""

_COUNTS: Final = {
    True: "on one host without shared memory (ZSTRAT_TRANSPORT, containers); for what "
    "goes between hosts run this on each of them, with its TF_CONFIG",
    False: "between hosts",
}
"""For which groups a table is."""


@click.group()
def bench() -> None:
    """Measure this machine, or a cluster."""


@bench.command()
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(2),
    help=f"largest group [default: {_PROCESSES}, or all tasks of the cluster]",
)
@click.option(
    "--sizes",
    default=",".join(map(str, SIZES)),
    show_default=True,
    help="of arrays, in bytes",
)
@click.option(
    "--transport",
    type=click.Choice(["ipc", "tcp"]),
    default="tcp",
    show_default=True,
    help="how processes of this machine exchange messages",
)
@click.option(
    "--cluster",
    metavar="FILE.toml",
    help="names the tasks to measure, and which one this is; default: TF_CONFIG",
)
@click.option(
    "--calibrate",
    "file",
    type=Path,
    metavar="FILE.toml",
    help="write what is found to a file for ZSTRAT_CHOICES",
)
def collectives(
    ranks: int | None,
    sizes: str,
    transport: str,
    cluster: str | None,
    file: Path | None,
) -> None:
    """Compare the algorithms of collectives.

    To measure between the tasks of a cluster, run this command as each of them, with
    its TF_CONFIG; the first task prints the results. Without a task in TF_CONFIG it
    measures between processes of this machine.
    """
    with failures():
        resolver = _resolver(cluster)
        if resolver is None:
            plan = Calibration(ranks or _PROCESSES, _sizes(sizes), transport)
            code = _on_this_machine(plan, file)
        else:
            code = _among_tasks(resolver, ranks, _sizes(sizes), transport, file)
    sys.exit(code)


def _resolver(file: str | None) -> ClusterResolver | None:
    """The resolver of a cluster that has this process among its tasks; None: there is
    none."""
    if file is not None:
        return TomlClusterResolver(file)
    found = TFConfigClusterResolver()
    # A program that has no task may have been told where daemons are.
    return found if found.cluster_spec() and found.task_type is not None else None


def _on_this_machine(plan: Calibration, file: Path | None) -> int:
    if file is not None:
        _check_writable(file)
    found: list[Measurement] = []

    async def measure() -> int:
        found.extend(await calibrate(plan, _begins))
        return 0

    code = run_loop(interruptible(measure()))
    if not code:
        _tell(found, file)
    return code


def _among_tasks(
    resolver: ClusterResolver,
    ranks: int | None,
    sizes: tuple[int, ...],
    transport: str,
    file: Path | None,
) -> int:
    """This task's part; the first one has the results."""
    chosen = settings(None)
    click.echo("waiting for all tasks of the cluster", err=True)
    try:
        with (
            as_interrupts(),
            Group(
                resolver, name="calibration", transport=transport, settings=chosen
            ) as whole,
        ):
            plan = Calibration(ranks or whole.size, sizes, transport)
            if whole.rank == 0 and file is not None:
                _check_writable(file)
            found = calibrate_tasks(whole, plan, resolver, chosen, _begins)
            if whole.rank == 0:
                _tell(found, file)
            else:
                click.echo(f"measured: {whole.members[0]} has the results")
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _begins(ranks: int) -> None:
    click.echo(f"measuring {ranks} ranks", err=True)


def _tell(found: Sequence[Measurement], file: Path | None) -> None:
    """Prints what was measured, and writes the table if there is a file for it."""
    click.echo("\n".join(_compared(found)))
    for one_host in sorted({each.one_host for each in found}):
        click.echo(f"this counts {_COUNTS[one_host]}")
    if file is not None:
        file.write_text(fitted(found).to_toml(), "utf-8")
        click.echo(f"written: use it with ZSTRAT_CHOICES={shlex.quote(str(file))}")


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
