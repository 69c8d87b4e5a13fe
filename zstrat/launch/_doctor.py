"""Diagnoses what is wrong with a running cluster: ``zstrat doctor``.

Finds why a cluster does not work, or a run is slow, with a remedy for each finding. A
cluster is checked once. A run is sampled for a while: each task reports the numbers of
its last seconds, so the samples follow each other at the length of that window and
cover the whole time. The run is not disturbed: an observer requests statistics, as
`zstrat status` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zstrat.errors import ZstratError
from zstrat.native import IS_BUILT
from zstrat.telemetry import RECENT, Limit, TaskReport, limits, over, report
from zstrat.transport import Security, key_names
from zstrat.wire import Job

from ._observer import Observer, TaskStatus, observe, report_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


SKEW: Final = 5.0
"""Seconds of clock skew between two machines above which their logs are hard to merge.
zstrat itself never compares the clocks of two machines."""

MUST_AGREE: Final = ("jax", "jaxlib", "numpy", "python")
"""Packages whose major and minor versions should be equal everywhere, as programs are
sent from one machine to another."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``ok`` is None if it is neither good nor bad."""

    what: str
    ok: bool | None
    words: str
    advice: str = ""


async def examine(
    spec: ClusterSpec | None, settings: Settings, timeout: float
) -> list[Finding]:
    """Runs all checks; those of the tasks only if there is a cluster spec.

    Returns within about ``timeout`` seconds, even if the network fails.
    """
    python = f"{sys.version.split()[0]} at {sys.executable}"
    findings = [Finding("python", True, python), *_packages(), _keys(settings)]
    if spec is None:
        hint = "set TF_CONFIG or pass --cluster FILE.toml to check the tasks as well"
        return [*findings, Finding("cluster", None, "not specified", hint)]
    try:
        statuses = await observe(spec, settings, timeout)
    except ZstratError as error:
        return [*findings, Finding("cluster", False, str(error))]
    return [*findings, *(f for status in statuses for f in _task(status))]


def version_differences(here: dict[str, str], there: dict[str, str]) -> list[str]:
    """Lists the packages whose major or minor versions differ, with both versions."""
    return [
        f"{name} {there[name]} there, {here[name]} here"
        for name in MUST_AGREE
        if name in here
        and name in there
        # Patch versions may differ: they change neither bytecode nor names.
        and here[name].split(".")[:2] != there[name].split(".")[:2]
    ]


def _packages() -> Iterator[Finding]:
    for name in ("jax", "jaxlib", "numpy", "optax", "pyzmq", "uvloop"):
        try:
            yield Finding(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            missing = Finding(name, False, "not installed", f"pip install {name}")
            # It is optional: asyncio's own loop does the same.
            yield Finding(name, None, "not installed") if name == "uvloop" else missing
    words = "built" if IS_BUILT else "not built: numpy and XLA update rows, more slowly"
    advice = "" if IS_BUILT else "install a C compiler, then zstrat again"
    yield Finding("loops for rows", IS_BUILT or None, words, advice)


def _keys(settings: Settings) -> Finding:
    if settings.keys is None:
        advice = "run `zstrat keygen DIR` and set ZSTRAT_KEYS=DIR"
        return Finding("keys", None, "none: connections on loopback only", advice)
    names = [*map(str, Job), *[n for n in key_names(settings.keys) if "-" in n]]
    secrets = [name for name in names if (settings.keys / f"{name}.secret").exists()]
    wrong = []
    # A folder without secrets is checked for that of a program, whose error says what
    # is missing.
    for name in secrets or [str(Job.CHIEF)]:
        job, _, index = name.partition("-")
        try:
            Security.load(settings.keys, job, int(index) if index else None)
        except (ZstratError, OSError, ValueError) as error:
            wrong.append(str(error))
    # Without duplicates: all secrets need the same public files.
    if wrong:
        return Finding("keys", False, "; ".join(dict.fromkeys(wrong)))
    words = f"{settings.keys} has the secrets of {', '.join(secrets)}"
    return Finding("keys", True, words)


def _task(status: TaskStatus) -> Iterator[Finding]:
    if status.problem:
        yield Finding(status.task, False, status.problem)  # contains its own remedy
        return
    yield Finding(
        status.task,
        True,
        f"{status.address} answers in {status.round_trip * 1e3:.1f} ms, "
        f"up for {status.number('task', 'uptime'):.0f} s",
    )
    task = status.values.get("task")
    versions = task.get("versions") if isinstance(task, dict) else None
    there = (
        {k: str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}
    )
    differences = version_differences(_versions_here(there), there)
    if differences:
        advice = "install the same versions on all machines"
        yield Finding(f"{status.task} versions", False, "; ".join(differences), advice)
    skew = status.number("task", "time") - time.time()
    if abs(skew) > SKEW:
        direction = "ahead of" if skew > 0 else "behind"
        words = f"{abs(skew):.0f} s {direction} the clock of this machine"
        yield Finding(f"{status.task} clock", False, words, "set up NTP or chrony")


def _versions_here(names: dict[str, str]) -> dict[str, str]:
    # Not `sys.version`, which may end in "+" or the name of a build.
    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in names:
        try:
            versions.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed here, nothing to compare
    return versions


@dataclass(frozen=True, slots=True)
class RunFindings:
    """The diagnosis of a run over ``seconds``.

    Args:
        metrics: The entries of `ClusterCoordinator.metrics` that tasks report.
        limits: What slows the run down, the worst first.
        problems: By task, why it did not answer the last request.
    """

    seconds: float
    metrics: dict[str, Any]
    limits: list[Limit]
    problems: dict[str, str]


async def examine_run(
    spec: ClusterSpec,
    settings: Settings,
    seconds: float,
    timeout: float,
    enough: asyncio.Event,
) -> RunFindings:
    """Samples the run for ``seconds``, or until ``enough`` is set.

    Args:
        timeout: Seconds for each task to answer a request.

    Cancellation: discards the samples.
    """
    loop = asyncio.get_running_loop()
    samples: dict[str, list[TaskReport]] = {}
    async with Observer(spec, settings) as observer:
        began = loop.time()
        while True:
            # At the end of each window of `RECENT` seconds, so that samples cover all
            # of the time and none of it twice; the last window may be cut short.
            left = began + seconds - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, RECENT)):
                    await enough.wait()
            for status in await observer.inspect(timeout):
                samples.setdefault(status.task, []).append(report_of(status))
            if enough.is_set() or loop.time() >= began + seconds:
                break
    return diagnose(samples, loop.time() - began)


def diagnose(samples: dict[str, list[TaskReport]], seconds: float) -> RunFindings:
    """Derives the limits of a run from the samples of each task."""
    tasks = {name: over(reports) for name, reports in samples.items()}
    metrics = report(tasks)
    problems = {
        name: task.last_error for name, task in tasks.items() if task.state == "lost"
    }
    return RunFindings(seconds, metrics, limits(metrics), problems)
