"""Sends the metrics of a run to writers: to TensorBoard, into a file.

Law of the file: training never waits for a writer, nor fails because of one. A thread
asks the coordinator from time to time; a full disk or a folder that hangs costs points,
and is logged.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from zstrat.threads import Latch, SteadyThread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from ._evaluator import MetricsWriter

log = logging.getLogger("zstrat.saving")

_CLOSING: Final = 10.0
"""Seconds that writers have for the last points."""
_QUANTILES: Final = ("p50", "p99")

Point = tuple[int, dict[str, float]]
"""A step, and the values at it."""


class TellsMetrics(Protocol):
    """A coordinator, as far as it reports metrics."""

    def metrics(self) -> Mapping[str, Any]: ...


@dataclass
class ExportedPoints:
    """Which points are new. What `zs.log_scalar` was given has its name and its step;
    other metrics of the run are below ``run/``, at the number of steps done."""

    _until: dict[str, float] = field(default_factory=dict)

    def take(self, metrics: Mapping[str, Any]) -> list[Point]:
        """Returns the points of the metrics that were not taken before."""
        found = [*self._scalars(metrics.get("scalars", {}))]
        done = _number(metrics.get("scheduled_closures")) - sum(
            _number(metrics.get(name))
            for name in ("queued_closures", "inflight_closures")
        )
        return [*found, (int(done), dict(_rates(metrics)))]

    def _scalars(self, scalars: Mapping[str, Any]) -> Iterator[Point]:
        for name, points in scalars.items():
            for step, seconds, value in points:
                if seconds > self._until.get(name, -math.inf):
                    self._until[name] = seconds
                    yield step, {name: math.nan if value is None else value}


def _rates(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name in ("steps_per_s", "examples_per_s"):
        if metrics.get(name) is not None:
            yield f"run/{name}", _number(metrics[name])
    summaries = {
        "staleness": metrics.get("staleness", {}),
        **{f"{name}_s": each for name, each in metrics.get("phases", {}).items()},
    }
    for name, summary in summaries.items():
        if summary.get("count"):
            for key in _QUANTILES:
                yield f"run/{name}/{key}", _number(summary[key])


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


@final
class MetricsExport:
    """Writes the metrics of a run, for as long as it is open: the scalars of
    `log_scalar`, steps and examples per second, staleness, and the phases of steps.

    A context manager. A writer that fails is logged once, and written to again; the
    program is not notified.

    Args:
        coordinator: Whose metrics.
        writers: Such as `TensorBoardEvents`; they are closed with this.
        every: Seconds between two looks. Of a scalar that gets more than 1,000 points
            in that time the last 1,000 are written.

    Raises:
        ValueError: ``every`` is not a time.
    """

    def __init__(
        self,
        coordinator: TellsMetrics,
        writers: Sequence[MetricsWriter],
        *,
        every: float = 10.0,
    ) -> None:
        if not 0 < every < math.inf:
            raise ValueError(f"every={every!r}: expected seconds, above 0")
        self._coordinator, self._every = coordinator, every
        self._writers = [_Guarded(writer) for writer in writers]
        self._points = ExportedPoints()
        self._ends = Latch()
        # A daemon: a folder that hangs must not keep the program from ending.
        self._thread = SteadyThread(self._run, name="zstrat metrics export")
        self._thread.start()

    def close(self) -> None:
        """Writes what is new, and closes the writers; waits ten seconds at most.
        Idempotent."""
        self._ends.open()
        self._thread.join(_CLOSING)
        if self._thread.is_alive():
            log.warning("a writer of metrics hangs, and its last points are lost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        ends = False
        while not ends:
            ends = self._ends.wait(self._every)
            try:
                points = self._points.take(self._coordinator.metrics())
            except Exception:  # to the log: no caller waits
                log.exception("asking for metrics")
                continue
            for writer in self._writers:
                writer.write(points)
        for writer in self._writers:
            writer.close()


class _Guarded:
    """Wraps a metrics writer and logs its errors; of consecutive failures it logs only
    the first."""

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer = writer
        self._fails = False

    def write(self, points: Sequence[Point]) -> None:
        try:
            for step, values in points:
                self._writer.write(step, values, {})
        except Exception:  # to the log: training continues without these points
            if not self._fails:
                log.exception("%s: points are lost", type(self._writer).__name__)
            self._fails = True
        else:
            self._fails = False

    def close(self) -> None:
        try:
            self._writer.close()
        except Exception:  # to the log, as above
            log.exception("closing %s", type(self._writer).__name__)
