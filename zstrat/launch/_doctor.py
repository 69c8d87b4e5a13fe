"""What keeps a cluster from working, and what holds a run up; and what to do about it.

A cluster is looked at once. A run is looked at for a while: the tasks tell of their
last seconds, so looks follow each other as closely as those windows do, and all of them
together are of the whole time. Nothing of the run is touched: an observer asks for
statistics, as `zstrat status` does.
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
from zstrat.telemetry import RECENT, Limit, TaskReport, limits, over, report
from zstrat.transport import Security, key_names
from zstrat.wire import Job

from ._observe import Observer, observe, told_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings

    from ._observe import TaskStatus


SKEW: Final = 5.0
"""Seconds between two clocks above which logs of two machines no longer fit together.
zstrat itself never compares clocks of two machines."""

MUST_AGREE: Final = ("jax", "jaxlib", "numpy", "python")
"""Programs travel from one machine to another: the first two numbers should be the
same everywhere."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``ok`` None is neither good nor bad."""

    what: str
    ok: bool | None
    words: str
    advice: str = ""


async def examine(
    spec: ClusterSpec | None, settings: Settings, timeout: float
) -> list[Finding]:
    """Every check there is; those of the cluster only if there is a spec.

    Returns within about ``timeout`` seconds whatever the network does.
    """
    findings = [_python(), *_packages(), _keys(settings)]
    if spec is None:
        hint = "set TF_CONFIG or give --cluster FILE.toml to check the tasks as well"
        return [*findings, Finding("cluster", None, "none given", hint)]
    try:
        found = await observe(spec, settings, timeout)
    except ZstratError as error:
        return [*findings, Finding("cluster", False, str(error))]
    return [*findings, *(f for status in found for f in _task(status))]


def judge_versions(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """The packages whose first two numbers differ, with both versions."""
    return [
        f"{name} {theirs[name]} there, {mine[name]} here"
        for name in MUST_AGREE
        if name in mine
        and name in theirs
        and _feature(mine[name]) != _feature(theirs[name])
    ]


def _feature(version: str) -> list[str]:
    return version.split(".")[:2]


def _python() -> Finding:
    return Finding("python", True, f"{sys.version.split()[0]} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name in ("jax", "jaxlib", "numpy", "optax", "pyzmq", "uvloop"):
        try:
            yield Finding(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            missing = Finding(name, False, "not installed", f"pip install {name}")
            yield Finding(name, None, "not installed") if name == "uvloop" else missing


def _keys(settings: Settings) -> Finding:
    if settings.keys is None:
        advice = "zstrat keygen DIR, then ZSTRAT_KEYS=DIR"
        return Finding("keys", None, "none: loopback only", advice)
    names = [*map(str, Job), *[n for n in key_names(settings.keys) if "-" in n]]
    held = [name for name in names if (settings.keys / f"{name}.secret").exists()]
    wrong = []
    for name in held or [str(Job.CHIEF)]:
        job, _, index = name.partition("-")
        try:
            Security.load(settings.keys, job, int(index) if index else None)
        except (ZstratError, OSError, ValueError) as error:
            wrong.append(str(error))
    if wrong:  # of each secret the same, where a file is missing that all need
        return Finding("keys", False, "; ".join(dict.fromkeys(wrong)))
    return Finding("keys", True, f"{settings.keys} has the secret of {', '.join(held)}")


def _task(status: TaskStatus) -> Iterator[Finding]:
    if status.problem:
        yield Finding(status.task, False, status.problem)  # it says what to do
        return
    yield Finding(
        status.task,
        True,
        f"{status.address} answers in {status.round_trip * 1e3:.1f} ms, "
        f"up for {status.number('task', 'uptime'):.0f} s",
    )
    task = status.values.get("task")
    versions = task.get("versions") if isinstance(task, dict) else None
    theirs = (
        {k: str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}
    )
    different = judge_versions(_mine(theirs), theirs)
    if different:
        advice = "install the same versions on all machines"
        yield Finding(f"{status.task} versions", False, "; ".join(different), advice)
    skew = status.number("task", "time") - time.time()
    if abs(skew) > SKEW:
        words = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this one"
        yield Finding(f"{status.task} clock", False, words, "set up NTP or chrony")


def _mine(names: dict[str, str]) -> dict[str, str]:
    mine = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in names:
        try:
            mine.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue  # not ours to compare
    return mine


@dataclass(frozen=True, slots=True)
class RunFindings:
    """What a run was like for so many ``seconds``.

    ``metrics`` has the keys of `ClusterCoordinator.metrics` that tasks can tell of;
    ``limits`` is what follows from them, the worst first; ``problems``: who did not
    answer at the last look, and why, by task.
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
    """Looks for so long, or until there is ``enough``.

    Args:
        timeout: Seconds for each task to answer a look.

    Cancellation: nothing is found.
    """
    loop = asyncio.get_running_loop()
    looks: dict[str, list[TaskReport]] = {}
    async with Observer(spec, settings) as observer:
        began = loop.time()
        while True:
            left = began + seconds - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, RECENT)):
                    await enough.wait()
            seen = await observer.look(timeout)
            for status in seen:
                looks.setdefault(status.task, []).append(told_by(status))
            if enough.is_set() or loop.time() >= began + seconds:
                break
    return findings(looks, loop.time() - began)


def findings(looks: dict[str, list[TaskReport]], seconds: float) -> RunFindings:
    """What follows from the looks at each task."""
    tasks = {name: over(each) for name, each in looks.items()}
    metrics = report(tasks)
    problems = {
        name: task.last_error for name, task in tasks.items() if task.state == "lost"
    }
    return RunFindings(seconds, metrics, limits(metrics), problems)
