"""``zstrat status``, ``zstrat doctor`` and ``zstrat dashboard``: what runs, and what is
wrong, as text or as a page for a browser.
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

from ._options import Seconds, cluster_options, failures, settings, spec
from ._signals import heard_by, interruptible
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
@click.option("--json", "as_json", is_flag=True, help="everything that the tasks tell")
@click.option("--watch", "again", is_flag=True, help="every second, until Ctrl-C")
def status(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool, again: bool
) -> None:
    """Show the tasks of a running cluster. Exit code 1 if one does not answer."""
    if again:
        sys.exit(_again(cluster, keys, timeout, as_json))
    chosen = settings(keys)
    with failures():
        seen = run_loop(observe(spec(cluster), chosen, timeout))
    if sys.stdout.isatty() and not as_json:
        Console().print(table(seen))
    else:
        _plainly(seen, as_json, 2)
    sys.exit(any(task.problem for task in seen))


def _plainly(seen: list[TaskStatus], as_json: bool, indent: int | None) -> None:
    told = [dataclasses.asdict(task) for task in seen] if as_json else []
    text = json.dumps(told, indent=indent) if as_json else "\n".join(lines(seen))
    click.echo(text)


def _again(
    cluster: str | None, keys: Path | None, timeout: float, as_json: bool
) -> int:
    looks = (cluster, keys, timeout, 1.0, None)
    if as_json or not sys.stdout.isatty():
        return watch(lambda seen: _plainly(seen, as_json, None), *looks)
    with Live(console=Console(), auto_refresh=False) as live:
        return watch(lambda seen: live.update(table(seen), refresh=True), *looks)


@click.command()
@cluster_options
@click.option("--run", is_flag=True, help="look at a live run, and say what limits it")
@click.option(
    "--seconds",
    type=Seconds(),
    default=60.0,
    show_default=True,
    help="with --run: how long to look",
)
@click.option("--json", "as_json", is_flag=True, help="with --run: all numbers")
def doctor(
    cluster: str | None,
    keys: Path | None,
    timeout: float,
    run: bool,
    seconds: float,
    as_json: bool,
) -> None:
    """Check versions, keys, addresses and clocks. Exit code 1 if something is wrong.

    With --run: look at a live run for a minute, and say what holds it up, the worst
    first, and what to change. Exit code 1 if a task does not answer.
    """
    if run:
        _examine_run(cluster, keys, timeout, seconds, as_json)
    if as_json:
        raise click.UsageError("--json goes with --run")
    asked = click.get_current_context().get_parameter_source("seconds")
    if asked is not ParameterSource.DEFAULT:
        raise click.UsageError("--seconds goes with --run")
    with failures():
        chosen = settings(keys)
        known = cluster is not None or environment().get("TF_CONFIG")
        tasks = spec(cluster) if known else None
        findings = run_loop(examine(tasks, chosen, timeout))
    for finding in findings:
        click.echo(_worded(finding))
    sys.exit(any(finding.ok is False for finding in findings))


def _examine_run(
    cluster: str | None,
    keys: Path | None,
    timeout: float,
    seconds: float,
    as_json: bool,
) -> NoReturn:
    chosen = settings(keys)
    err = Console(stderr=True)
    with failures():
        with err.status(f"looking for {seconds:g} s") if err.is_terminal else nothing():
            looking = _look_at_run(spec(cluster), chosen, seconds, timeout)
            found = run_loop(looking)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        click.echo("\n".join(_of_run(found)))
    sys.exit(bool(found.problems))


async def _look_at_run(
    spec: ClusterSpec, settings: Settings, seconds: float, timeout: float
) -> RunFindings:
    """Ends early when it is interrupted, with what was seen until then."""
    enough = asyncio.Event()
    with heard_by(lambda number: enough.set()):
        return await examine_run(spec, settings, seconds, timeout, enough)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _of_run(found: RunFindings) -> Iterator[str]:
    tasks = found.metrics["tasks"]
    jobs = [name.partition(":")[0] for name in tasks]
    yield (
        f"looked for {found.seconds:.0f} s: {found.metrics['steps_per_s']:.1f} steps/s "
        f"on {_count(jobs.count('worker'), 'worker')}, with "
        f"{_count(jobs.count('ps'), 'parameter server')}"
    )
    for name, problem in found.problems.items():
        yield f"WRONG {name}: {problem}"
    if not found.metrics["steps_per_s"]:
        asks = "" if found.limits else ": is it trained on this cluster?"
        yield f"no step has ended in this time{asks}"
    elif not found.limits:
        yield "nothing in particular holds it up"
    alike: dict[str, list[Limit]] = {}
    for limit in found.limits:
        alike.setdefault(limit.what, []).append(limit)
    for place, (worst, *others) in enumerate(alike.values(), 1):
        yield f"{place:2}. {worst.task} {worst.words}"
        if others:
            yield f"    and so, less: {', '.join(other.task for other in others)}"
        yield f"    -> {worst.advice}"
        numbers = [f"{name}={number:.3g}" for name, number in worst.numbers.items()]
        yield f"    {', '.join(numbers)}"


def _worded(finding: Finding) -> str:
    mark = {True: "ok   ", False: "WRONG", None: "     "}[finding.ok]
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{mark} {finding.what}: {finding.words}{advice}"


@click.command()
@cluster_options
@click.option(
    "--http",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="where the page is; 0 is any free port",
)
def dashboard(
    cluster: str | None, keys: Path | None, timeout: float, http: str
) -> None:
    """Serve a page that shows a running cluster, until Ctrl-C.

    At another address than one of loopback the page needs a token: ZSTRAT_HTTP_TOKEN,
    or one that is made and printed. A program can show more of its run: zs.dashboard().
    """
    chosen = settings(keys)
    with failures():
        # A signal is how it is meant to end: 0.
        run_loop(interruptible(_serve(spec(cluster), chosen, timeout, http)))


async def _serve(
    spec: ClusterSpec, settings: Settings, timeout: float, http: str
) -> int:
    async with Observer(spec, settings) as observer:
        silence = settings.timeouts.liveness
        with ObservedRun(observer, silence) as run, serve_page(http) as server:
            click.echo(server.url)
            run.take(await observer.look(timeout))
            if missing := run.readiness():
                click.echo(f"zstrat: {missing}, so far", err=True)
            await run.look_on()
