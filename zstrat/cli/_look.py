"""``zstrat status``, ``zstrat doctor`` and ``zstrat dashboard``: the state of a cluster
and its problems, as text or as a web page.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from contextlib import nullcontext as nothing
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live

from zstrat.config import environment
from zstrat.launch import ObservedRun, Observer, examine, examine_run, observe
from zstrat.transport import run as run_loop
from zstrat.transport.health import dashboard as serve_page

from ._options import (
    Seconds,
    cluster_options,
    failures,
    handled_by,
    interruptible,
    settings,
    spec,
)
from ._tables import lines, table
from ._top import watch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.launch import Finding, RunFindings, TaskStatus
    from zstrat.telemetry import Limit


@click.command()
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="print all statistics as JSON")
@click.option("--watch", "again", is_flag=True, help="repeat every second until Ctrl-C")
def status(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool, again: bool
) -> None:
    """Show the tasks of a running cluster. The exit code is 1 if a task does not
    answer."""
    if again:
        sys.exit(_watch_status(cluster, keys, timeout, as_json))
    chosen = settings(keys)
    with failures():
        statuses = run_loop(observe(spec(cluster), chosen, timeout))
    if sys.stdout.isatty() and not as_json:
        Console().print(table(statuses))
    else:
        _print_plain(statuses, as_json, 2)
    sys.exit(any(status.problem for status in statuses))


def _print_plain(statuses: list[TaskStatus], as_json: bool, indent: int | None) -> None:
    if as_json:
        values = [dataclasses.asdict(status) for status in statuses]
        click.echo(json.dumps(values, indent=indent))
    else:
        click.echo("\n".join(lines(statuses)))


def _watch_status(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool
) -> int:
    arguments = (cluster, keys, timeout, 1.0, None)
    if as_json or not sys.stdout.isatty():
        return watch(lambda found: _print_plain(found, as_json, None), *arguments)
    with Live(console=Console(), auto_refresh=False) as live:
        return watch(lambda found: live.update(table(found), refresh=True), *arguments)


@click.command()
@cluster_options
@click.option("--run", is_flag=True, help="diagnose what slows down a live run")
@click.option(
    "--seconds",
    type=Seconds(),
    default=60.0,
    show_default=True,
    help="with --run: how long to observe the run",
)
@click.option("--json", "as_json", is_flag=True, help="with --run: print JSON")
def doctor(
    cluster: str | None,
    keys: Path | None,
    timeout: float,
    run: bool,
    seconds: float,
    as_json: bool,
) -> None:
    """Check versions, keys, addresses and clocks. The exit code is 1 if a check fails.

    With --run: observe a live run for a minute and print what slows it down, the worst
    first, with a remedy. The exit code is 1 if a task does not answer.
    """
    if run:
        _diagnose_run(cluster, keys, timeout, seconds, as_json)
    if as_json:
        raise click.UsageError("--json requires --run")
    # By its source, as a user may pass the default value.
    source = click.get_current_context().get_parameter_source("seconds")
    if source is not ParameterSource.DEFAULT:
        raise click.UsageError("--seconds requires --run")
    with failures():
        chosen = settings(keys)
        # Without a cluster the checks of this machine are of use as well.
        known = cluster is not None or environment().get("TF_CONFIG")
        tasks = spec(cluster) if known else None
        findings = run_loop(examine(tasks, chosen, timeout))
    for finding in findings:
        click.echo(_line(finding))
    sys.exit(any(finding.ok is False for finding in findings))


def _diagnose_run(
    cluster: str | None,
    keys: Path | None,
    timeout: float,
    seconds: float,
    as_json: bool,
) -> NoReturn:
    chosen = settings(keys)
    # On standard error: standard output is for the findings, maybe as JSON.
    err = Console(stderr=True)
    with failures():
        words = f"observing the run for {seconds:g} s"
        with err.status(words) if err.is_terminal else nothing():
            findings = run_loop(_observe_run(spec(cluster), chosen, seconds, timeout))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(findings), indent=2))
    else:
        click.echo("\n".join(_run_lines(findings)))
    sys.exit(bool(findings.problems))


async def _observe_run(
    spec: ClusterSpec, settings: Settings, seconds: float, timeout: float
) -> RunFindings:
    """Observes a live run for ``seconds``; a signal ends it early, with the samples
    taken until then."""
    enough = asyncio.Event()
    with handled_by(lambda number: enough.set()):
        return await examine_run(spec, settings, seconds, timeout, enough)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _run_lines(findings: RunFindings) -> Iterator[str]:
    metrics = findings.metrics
    jobs = [name.partition(":")[0] for name in metrics["tasks"]]
    yield (
        f"observed for {findings.seconds:.0f} s: {metrics['steps_per_s']:.1f} steps/s "
        f"on {_count(jobs.count('worker'), 'worker')}, with "
        f"{_count(jobs.count('ps'), 'parameter server')}"
    )
    for name, problem in findings.problems.items():
        yield f"FAIL  {name}: {problem}"
    if not metrics["steps_per_s"]:
        hint = (
            "" if findings.limits else "; check that a program trains on this cluster"
        )
        yield f"no step ended in this time{hint}"
    elif not findings.limits:
        yield "found no bottleneck"
    # One entry for each kind of limit, with its worst task: a hundred workers may all
    # wait for the same server.
    by_kind: dict[str, list[Limit]] = {}
    for limit in findings.limits:
        by_kind.setdefault(limit.what, []).append(limit)
    for number, (worst, *others) in enumerate(by_kind.values(), 1):
        yield f"{number:2}. {worst.task} {worst.words}"
        if others:
            yield f"    also, but less: {', '.join(other.task for other in others)}"
        yield f"    -> {worst.advice}"
        numbers = [f"{name}={value:.3g}" for name, value in worst.numbers.items()]
        yield f"    {', '.join(numbers)}"


def _line(finding: Finding) -> str:
    mark = {True: "ok   ", False: "FAIL ", None: "     "}[finding.ok]
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{mark} {finding.what}: {finding.words}{advice}"


@click.command()
@cluster_options
@click.option(
    "--http",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="address of the page; port 0: any free port",
)
def dashboard(
    cluster: str | None, keys: Path | None, timeout: float, http: str
) -> None:
    """Serve a status page of a running cluster until Ctrl-C.

    On other addresses than localhost the page requires a token: ZSTRAT_HTTP_TOKEN, or a
    generated one that is printed. A program can show more of its run: zs.dashboard().
    """
    chosen = settings(keys)
    with failures():
        # The exit code is 0: a signal is the normal end.
        run_loop(interruptible(_serve(spec(cluster), chosen, timeout, http)))


async def _serve(
    spec: ClusterSpec, settings: Settings, timeout: float, http: str
) -> int:
    async with Observer(spec, settings) as observer:
        silence = settings.timeouts.liveness
        with ObservedRun(observer, silence) as run, serve_page(http) as server:
            click.echo(server.url)
            run.update(await observer.inspect(timeout))
            if missing := run.readiness():
                click.echo(f"zstrat: {missing} yet", err=True)
            await run.watch()
