"""Looks at a run for a while, and says what holds it up.

The tasks tell of their last seconds; so looks follow each other as closely as those
windows do, and all of them together are of the whole time. Nothing of the run is
touched: an observer asks for statistics, as `zstrat status` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zstrat.telemetry import RECENT, Limit, TaskTold, limits, over, report

from ._observe import Observer
from ._observed_run import told_by

if TYPE_CHECKING:
    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


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
    looks: dict[str, list[TaskTold]] = {}
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


def findings(looks: dict[str, list[TaskTold]], seconds: float) -> RunFindings:
    """What follows from the looks at each task."""
    tasks = {name: over(each) for name, each in looks.items()}
    metrics = report(tasks)
    problems = {
        name: task.last_error for name, task in tasks.items() if task.state == "lost"
    }
    return RunFindings(seconds, metrics, limits(metrics), problems)
