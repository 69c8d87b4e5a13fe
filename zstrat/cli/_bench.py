"""``zstrat bench``: measures the collective algorithms on this machine or in a
cluster."""

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

from ._options import as_interrupts, failures, interruptible, settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.cluster import ClusterResolver
    from zstrat.collectives import Measurement

_PROCESSES: Final = 4
"""Default number of processes on this machine."""

_INTERRUPTED: Final = 130
"""Exit code of a program that Ctrl-C ended, the same as in a shell."""

_APPLIES: Final = {
    True: "groups on one host without shared memory (ZSTRAT_TRANSPORT, containers); to "
    "measure between hosts run this command on each of them, with its TF_CONFIG",
    False: "traffic between hosts",
}
"""Describes to which process groups a measurement applies."""


@click.group()
def bench() -> None:
    """Measure this machine or a cluster."""


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
    help="sizes of the arrays in bytes",
)
@click.option(
    "--transport",
    type=click.Choice(["ipc", "tcp"]),
    default="tcp",
    show_default=True,
    help="transport between processes of this machine",
)
@click.option(
    "--cluster",
    metavar="FILE.toml",
    help="cluster file with the tasks to measure and this task; default: TF_CONFIG",
)
@click.option(
    "--calibrate",
    "file",
    type=Path,
    metavar="FILE.toml",
    help="write the fastest algorithms to a file for ZSTRAT_CHOICES",
)
def collectives(
    ranks: int | None,
    sizes: str,
    transport: str,
    cluster: str | None,
    file: Path | None,
) -> None:
    """Compare the algorithms of collective operations.

    To measure between the tasks of a cluster, run this command once for each task, with
    the TF_CONFIG of the task; the first task prints the results. Without a task in
    TF_CONFIG it measures between processes of this machine.
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
    """Returns the resolver of a cluster in which this process is a task, or None."""
    if file is not None:
        return TomlClusterResolver(file)
    resolver = TFConfigClusterResolver()
    # TF_CONFIG of a program may have a cluster of daemons without a task.
    is_task = resolver.cluster_spec() and resolver.task_type is not None
    return resolver if is_task else None


def _on_this_machine(plan: Calibration, file: Path | None) -> int:
    if file is not None:
        _check_writable(file)
    measurements: list[Measurement] = []

    async def measure() -> int:
        measurements.extend(await calibrate(plan, _print_group))
        return 0

    code = run_loop(interruptible(measure()))
    if not code:
        _print_results(measurements, file)
    return code


def _among_tasks(
    resolver: ClusterResolver,
    ranks: int | None,
    sizes: tuple[int, ...],
    transport: str,
    file: Path | None,
) -> int:
    """Measures the collective algorithms as one task of a cluster; the first task
    prints the results."""
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
            # Rank 0 writes, and may be another machine than this one.
            if whole.rank == 0 and file is not None:
                _check_writable(file)
            measurements = calibrate_tasks(whole, plan, resolver, chosen, _print_group)
            if whole.rank == 0:
                _print_results(measurements, file)
            else:
                click.echo(f"done; {whole.members[0]} prints the results")
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _print_group(ranks: int) -> None:
    click.echo(f"measuring {ranks} ranks", err=True)


def _print_results(measurements: Sequence[Measurement], file: Path | None) -> None:
    """Prints the measurements, and writes a table of the fastest algorithms to
    ``file``."""
    click.echo("\n".join(_compared(measurements)))
    for one_host in sorted({m.one_host for m in measurements}):
        click.echo(f"these results apply to {_APPLIES[one_host]}")
    if file is not None:
        file.write_text(fitted(measurements).to_toml(), "utf-8")
        path = shlex.quote(str(file))
        click.echo(f"wrote {path}; use it with ZSTRAT_CHOICES={path}")


def _check_writable(file: Path) -> None:
    """Checks before measuring for minutes that the file can be written, and keeps its
    contents.

    Raises:
        OSError: The file cannot be written.
    """
    # Opening is the only sure test of rights and of read-only disks.
    is_new = not file.exists()
    with file.open("a"):
        pass
    if is_new:
        file.resolve().unlink()  # resolve: keeps a symbolic link to it


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(
            f"--sizes {text}: expected bytes separated by commas, such as 4096,1048576"
        )
    return tuple(map(int, parts))


def _compared(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yields a line for each collective call, group and size that lists the algorithms,
    the fastest first."""
    # Consecutive ones: ranks measure case by case.
    cases = groupby(measurements, lambda m: (m[0], m[2], m[3]))
    for (call, ranks, nbytes), of_case in cases:
        times: dict[str, list[float]] = {}
        for measurement in of_case:
            times.setdefault(measurement.algorithm, []).append(measurement.seconds)
        medians = sorted((median(times[name]), name) for name in times)
        words = ", ".join(f"{name} {1e3 * seconds:.2f}" for seconds, name in medians)
        yield f"{call:15} {ranks} ranks {size(nbytes):>10}  ms: {words}"
