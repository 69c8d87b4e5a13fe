"""The numbers of a run, written now and then for TensorBoard or whatever reads them.

Off the path of training: a thread of its own asks for what the coordinator knows
anyway, and writes it. A disk that is full or slow costs nothing but the curves.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, final

if TYPE_CHECKING:
    from types import TracebackType

    from ._evaluator import MetricsWriter

log = logging.getLogger("zstrat.saving")

EVERY: Final = 10.0
"""Seconds: the window of which rates and quantiles are."""

_RUN: Final = (
    "steps_per_s",
    "examples_per_s",
    "queued_closures",
    "inflight_closures",
    "recoverable_worker_failures",
)
_TASK: Final = (
    "steps_per_s",
    "bytes_in_per_s",
    "bytes_out_per_s",
    "busy",
    "memory",
    "waiting",
)
_QUANTILES: Final = ("p50", "p99")


class Measured(Protocol):
    """A coordinator, blocking or awaited."""

    def metrics(self) -> Mapping[str, Any]: ...


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a run that make curves, by name: ``run/steps_per_s``,
    ``phases/pull_p99`` (seconds), ``staleness/p50`` (versions), and
    ``worker:0/memory``. What is not known is absent.

    Args:
        metrics: As `ClusterCoordinator.metrics` gives them.
    """
    found = {f"run/{name}": metrics.get(name) for name in _RUN}
    for phase, summary in metrics.get("phases", {}).items():
        if summary["count"]:
            found |= {f"phases/{phase}_{q}": summary[q] for q in _QUANTILES}
    staleness = metrics.get("staleness", {})
    if staleness.get("count"):
        found |= {f"staleness/{q}": staleness[q] for q in _QUANTILES}
    for task, values in metrics.get("tasks", {}).items():
        found |= {f"{task}/{name}": values.get(name) for name in _TASK}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


@final
class MetricsLog:
    """What `write_metrics` returns: a context manager that writes while a block runs,
    and once more at its end; then it closes the writer."""

    def __init__(
        self, coordinator: Measured, writer: MetricsWriter, every: float
    ) -> None:
        self._coordinator, self._writer, self._every = coordinator, writer, every
        self._written: dict[str, float] = {}
        """Up to when the points of each scalar are written."""
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._live, name="zstrat metrics", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _live(self) -> None:
        try:
            while not self._over.wait(self._every):
                self._write()
            self._write()
            self._writer.close()
        except Exception as error:  # goes to the log: training goes on without it
            log.error(
                "the metrics of the run are not written any more: %s: %s",
                type(error).__name__,
                error,
            )

    def _write(self) -> None:
        metrics = self._coordinator.metrics()
        about = {"time": time.time()}
        for name, points in metrics.get("scalars", {}).items():
            before = self._written.get(name, -math.inf)
            for step, at, value in points:
                if at > before and value is not None:
                    self._writer.write(step, {name: value}, about)
            self._written[name] = points[-1][1]
        numbers = numbers_of(metrics)
        self._writer.write(int(metrics.get("low_water", 0)), numbers, about)


def write_metrics(
    coordinator: Measured, writer: MetricsWriter, *, every: float = EVERY
) -> MetricsLog:
    """Has the numbers of a run written while a block runs::

        with zs.write_metrics(coordinator, zs.TensorBoardEvents("logs/run")):
            train()

    Rates, phases, staleness and tasks are written at the number of steps that are over
    by then; points of `log_scalar` at their own steps, the last 1,000 of each name
    since they were written before.

    Args:
        writer: `TensorBoardEvents`, `JsonLines`, or anything else of their kind; it is
            called on a thread of its own, and closed at the end of the block. If it
            raises, that is logged, and nothing is written any more.
        every: Seconds between two times.

    Raises:
        ValueError: ``every`` is not above zero.
    """
    if not 0 < every < math.inf:
        raise ValueError(f"write_metrics: every={every!r}: expected seconds above 0")
    return MetricsLog(coordinator, writer, every)
