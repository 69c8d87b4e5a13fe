"""The program ``zstrat``: a local cluster, a look at a running one, keys, units.

Law: this module words and draws; what is true is found out in `zstrat.launch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shlex
import signal
import sys
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from zstrat import __version__
from zstrat.cluster import ClusterSpec, TFConfigClusterResolver, TomlClusterResolver
from zstrat.collectives import fitted
from zstrat.config import LANES, environment, settings_from
from zstrat.errors import ZstratError
from zstrat.launch import (
    SIZES,
    Calibration,
    Copies,
    LocalCluster,
    Observer,
    calibrate,
    examine,
    observe,
    run_copies,
    write_units,
)
from zstrat.transport import generate_keys
from zstrat.transport import run as run_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from zstrat.collectives import Measurement
    from zstrat.config import Settings
    from zstrat.launch import Finding, Sight

REFRESH: Final = 1.0
"""Seconds between two looks of the live table."""

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a cluster in the foreground; the last when its terminal is closed."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zstrat")
def main() -> None:
    """Parameter-server training for JAX."""


def _cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--cluster``, ``--keys``, ``--timeout``: which cluster, how, for how long."""
    options = [
        click.option("--cluster", metavar="FILE.toml", help="default: TF_CONFIG"),
        click.option("--keys", type=Path, metavar="DIR", help="default: ZSTRAT_KEYS"),
        click.option("--timeout", default=5.0, show_default=True, help="seconds"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@click.option("--ps", default=1, show_default=True, help="parameter servers")
@click.option("--workers", default=1, show_default=True, help="workers")
@click.option("--lane", type=click.Choice(LANES), default="tcp", show_default=True)
@click.option("--worker-devices", type=int, help="virtual CPU devices per worker")
@click.option(
    "--dir", "directory", type=Path, help="for logs and the cluster file, kept"
)
def cluster(
    ps: int, workers: int, lane: str, worker_devices: int | None, directory: Path | None
) -> None:
    """Run local daemons in the foreground; Ctrl-C ends them all."""
    for number in ENDING:
        signal.signal(number, _as_interrupt)
    settings = _settings(None)
    try:
        with LocalCluster(
            ps,
            workers,
            lane=lane,
            worker_devices=worker_devices,
            directory=directory,
            settings=settings,
        ) as running:
            file = running.directory / "cluster.toml"
            file.write_text(toml(running.spec), "utf-8")
            click.echo(how_to_connect(running.spec, file))
            if settings.keys is None and has_ports(running.spec):
                click.echo(OPEN_PORTS, err=True)
            run_loop(_watch(running, settings))
            click.echo("ending all tasks")
    except KeyboardInterrupt:
        click.echo("interrupted; all tasks ended")
    except (ZstratError, ValueError) as error:
        _fail(error)


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("-n", "--workers", default=2, show_default=True, help="copies")
@click.option(
    "--lane", type=click.Choice(["ipc", "tcp"]), default="ipc", show_default=True
)
@click.option("--restarts", default=0, show_default=True, help="of copies that fail")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int, lane: str, restarts: int, script: str, arguments: tuple[str, ...]
) -> None:
    """Run copies of SCRIPT, each a worker of one cluster on this machine.

    Each finds itself and the others in TF_CONFIG, as MultiWorkerMirroredStrategy and
    zs.collectives.Group read it. The first that fails ends all; so does Ctrl-C.
    """
    command = (sys.executable, script, *arguments)
    try:
        drain = _settings(None).timeouts.drain
        copies = Copies(command, workers, lane, restarts, drain)
        code = run_loop(_interruptible(run_copies(copies, click.echo)))
    except (ValueError, OSError) as error:
        _fail(error)
    sys.exit(code)


@main.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@click.option("-n", "--ranks", default=4, show_default=True, help="largest group")
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
        found: list[Measurement] = []
        code = run_loop(_interruptible(_calibrated(plan, found)))
        click.echo("\n".join(_compared(found)))
        if file is not None and not code:
            file.write_text(fitted(found).to_toml(), "utf-8")
            click.echo(f"written: use it with ZSTRAT_CHOICES={shlex.quote(str(file))}")
    except (ZstratError, ValueError, OSError) as error:
        _fail(error)
    sys.exit(code)


async def _calibrated(plan: Calibration, found: list[Measurement]) -> int:
    def begins(ranks: int) -> None:
        click.echo(f"measuring {ranks} ranks", err=True)

    found += await calibrate(plan, begins)
    return 0


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


async def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    """The exit code of the work; 130, as shells say, if a signal cancels it."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + signal.SIGINT
    finally:
        for number in ENDING:  # uvloop leaves its own behind when it is closed
            loop.remove_signal_handler(number)


def how_to_connect(spec: ClusterSpec, file: Path) -> str:
    """The lines that a program's terminal needs, ready to be pasted."""
    config = {"cluster": spec.as_dict()}  # the program itself is none of the tasks
    return "\n".join(
        [
            "connect with either of",
            f"  export TF_CONFIG={shlex.quote(json.dumps(config))}",
            f"  --cluster {shlex.quote(str(file))}",
            "",
        ]
    )


OPEN_PORTS: Final = (
    "note: without keys every user of this machine can reach these ports and run code "
    "here; --lane ipc or ZSTRAT_KEYS avoids that"
)


def has_ports(spec: ClusterSpec) -> bool:
    """Whether some task listens on a port, and not on a socket in a folder."""
    return not all(
        spec.task_address(job, index).startswith("ipc://")
        for job in spec.jobs
        for index in spec.task_indices(job)
    )


def toml(spec: ClusterSpec) -> str:
    """A cluster file for `TomlClusterResolver`."""
    lines = [
        f"{job} = [{', '.join(json.dumps(address) for address in addresses)}]"
        for job, addresses in spec.as_dict().items()
    ]
    return "\n".join(["[cluster]", *lines, ""])


def _as_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


async def _watch(running: LocalCluster, settings: Settings) -> None:
    """Draws the table until interrupted; plain lines when nobody can see a table."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()
    for number in ENDING:
        loop.add_signal_handler(number, interrupted.set)
    console = Console()
    async with Observer(running.spec, settings) as observer:
        if not console.is_terminal:
            seen = await observer.look(settings.timeouts.connect)
            click.echo("\n".join(lines(seen)))
            await interrupted.wait()
            return
        with Live(console=console, auto_refresh=False) as live:
            while not interrupted.is_set():
                live.update(table(await observer.look(REFRESH)), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), REFRESH)


@main.command()
@_cluster_options
@click.option("--json", "as_json", is_flag=True, help="everything that the tasks tell")
def status(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool
) -> None:
    """Show the tasks of a running cluster. Exit code 1 if one does not answer."""
    settings = _settings(keys)
    try:
        seen = run_loop(observe(_spec(cluster), settings, timeout))
    except (ZstratError, ValueError, OSError) as error:
        _fail(error)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(sight) for sight in seen], indent=2))
    elif sys.stdout.isatty():
        Console().print(table(seen))
    else:
        click.echo("\n".join(lines(seen)))
    sys.exit(any(sight.problem for sight in seen))


COLUMNS: Final = (
    "task",
    "address",
    "incarnation",
    "uptime",
    "memory",
    "variables",
    "held",
)


def row(sight: Sight) -> list[str]:
    """The cells of one task, as people read them."""
    if sight.problem:
        return [sight.task, sight.address, f"unreachable: {sight.problem}", *[""] * 4]
    number = sight.number
    variables = (
        ""
        if sight.task.startswith("worker")
        else f"{number('service', 'variables'):.0f}"
    )
    held = (
        ""
        if sight.task.startswith("worker")
        else size(number("service", "bytes") + number("service", "slot_bytes"))
    )
    return [
        sight.task,
        sight.address,
        f"{int(number('task', 'incarnation')):016x}"[:8],
        span(number("task", "uptime")),
        size(number("task", "memory_bytes")),
        variables,
        held,
    ]


def table(seen: Sequence[Sight]) -> Table:
    """The tasks for a terminal."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    for sight in seen:
        made.add_row(*row(sight), style="red" if sight.problem else None)
    return made


def lines(seen: Sequence[Sight]) -> list[str]:
    """The tasks for a file or a pipe."""
    rows = [row(sight) for sight in seen]
    return [
        " ".join(
            f"{name}={cell}" for name, cell in zip(COLUMNS, cells, strict=True) if cell
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


@main.command()
@_cluster_options
def doctor(cluster: str | None, keys: Path | None, timeout: float) -> None:
    """Check versions, keys, addresses and clocks. Exit code 1 if something is wrong."""
    try:
        settings = _settings(keys)
        known = cluster is not None or environment().get("TF_CONFIG")
        spec = _spec(cluster) if known else None
        findings = run_loop(examine(spec, settings, timeout))
    except (ZstratError, ValueError, OSError) as error:
        _fail(error)
    for finding in findings:
        click.echo(_worded(finding))
    sys.exit(any(finding.ok is False for finding in findings))


def _worded(finding: Finding) -> str:
    mark = {True: "ok   ", False: "WRONG", None: "     "}[finding.ok]
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{mark} {finding.what}: {finding.words}{advice}"


@main.command()
@click.argument("directory", type=Path)
def keygen(directory: Path) -> None:
    """Make the keys of a cluster: one pair per role, in DIRECTORY (mode 0700)."""
    try:
        made = generate_keys(directory)
    except (ZstratError, OSError, ValueError) as error:
        _fail(error)
    for path in made:
        click.echo(path)


@main.command()
@click.option(
    "--bindir", type=Path, default=Path(sys.executable).parent, show_default=True
)
@click.option("--to", type=Path, default=Path("/etc/systemd/system"), show_default=True)
@click.option("--config", type=Path, default=Path("/etc/zstrat"), show_default=True)
def units(bindir: Path, to: Path, config: Path) -> None:
    """Write the systemd units, for programs in BINDIR and a cluster file in CONFIG."""
    try:
        for path in write_units(bindir, to, config):
            click.echo(path)
    except (OSError, ValueError) as error:
        _fail(error)


def _settings(keys: Path | None) -> Settings:
    try:
        settings = settings_from(environment())
    except ValueError as error:
        _fail(error)
    return settings if keys is None else dataclasses.replace(settings, keys=keys)


def _spec(file: str | None) -> ClusterSpec:
    if file is not None:
        return TomlClusterResolver(file).cluster_spec()
    if not environment().get("TF_CONFIG"):
        raise ValueError("which cluster? Set TF_CONFIG or give --cluster FILE.toml")
    return TFConfigClusterResolver().cluster_spec()


def _fail(error: Exception) -> NoReturn:
    click.echo(f"zstrat: {error}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
