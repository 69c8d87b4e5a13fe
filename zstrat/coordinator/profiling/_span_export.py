"""`OpenTelemetryExport`: sends samples of a run's spans to an OpenTelemetry collector.

The law of this file: training never waits for the collector, and gets none of its
errors. From time to time a thread records a time line of a few steps, and sends its
spans before it records the next. Spans that the collector does not take are counted,
and logged once.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from typing import TYPE_CHECKING, Final, Self, SupportsIndex, final

from zstrat.coordinator._placeholders import in_step
from zstrat.errors import ClosedError
from zstrat.program import worker_context
from zstrat.telemetry.timeline import has_arrived, http_exporter, sdk_spans
from zstrat.threads import Latch, SteadyThread
from zstrat.variables import recorder

from ._profile import WAITING, require_above_0, timeline_of
from ._timeline_run import TimelineBounds, TimelineRun

if TYPE_CHECKING:
    from zstrat.coordinator._coordinator import CoordinatorFace
    from zstrat.telemetry.timeline import ReadableSpan, SpanExporter

    from ._timeline_run import CollectedRun

log = logging.getLogger("zstrat.coordinator")

BATCH: Final = 512
"""The most spans of one request, as in the SDK's own processor."""
NBYTES: Final = 4 * 2**20
"""The most bytes of a sample, if it were a file: twenty thousand spans."""
CLOSING: Final = 10.0
"""Seconds that `close` waits for the last sample to arrive."""


@final
class OpenTelemetryExport:
    """Sends spans of a run to an OpenTelemetry collector while it is open. From time to
    time it sends all spans of some steps, of the program, the workers and the parameter
    servers. Each step is a trace.

    A context manager. Spans that the collector does not take are counted in `dropped`,
    and logged once; the program gets no error.

    Args:
        coordinator: The coordinator whose steps are sent.
        exporter: A span exporter of OpenTelemetry's SDK, which `close` shuts down.
            Default: OTLP over HTTP to ``OTEL_EXPORTER_OTLP_ENDPOINT``, with
            ``OTEL_EXPORTER_OTLP_HEADERS``.
        every: Seconds between the end of a sample and the start of the next.
        steps: A sample ends when so many closures have ended.
        seconds: A sample ends after so long.

    Raises:
        ModuleNotFoundError: OpenTelemetry is not installed; says what to install.
        RuntimeError: Used in a step function.
        ValueError: A number is not above zero.
    """

    def __init__(
        self,
        coordinator: CoordinatorFace,
        exporter: SpanExporter | None = None,
        *,
        every: float = 10.0,
        steps: SupportsIndex = 100,
        seconds: float = 1.0,
    ) -> None:
        if worker_context.get() is not None or recorder.get() is not None:
            raise RuntimeError(in_step("zs.OpenTelemetryExport"))
        count = operator.index(steps)
        bounds = {"every": every, "steps": count, "seconds": seconds}
        require_above_0("zs.OpenTelemetryExport", **bounds)
        self.sent = 0
        """Number of spans that the collector took."""
        self.dropped = 0
        """Number of spans that the collector did not take."""
        self._core, self._every = coordinator._core, every
        self._bounds: Final = TimelineBounds(count, float(seconds), NBYTES, False)
        self._exporter = http_exporter() if exporter is None else exporter
        self._was_logged = False
        self._run: TimelineRun | None = None
        self._ends = Latch()
        # A daemon thread: a collector that hangs must not keep the program alive.
        self._thread = SteadyThread(self._live, name="zstrat opentelemetry")
        self._logger = logging.getLogger(type(self._exporter).__module__)
        self._logger.addFilter(self._is_from_others)
        self._thread.start()

    def close(self) -> None:
        """Ends and sends the current sample, and shuts the exporter down. Waits ten
        seconds at most. Idempotent."""
        # First, so that a sample that begins meanwhile ends at once.
        self._ends.open()
        run = self._run
        if run is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._core.session.portal.loop.call_soon_threadsafe(run.enough)
        # At most so long: a program must end although its collector does not answer.
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            log.warning(
                "the OpenTelemetry collector does not answer: the last spans are lost"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> None:
        while True:
            try:
                self._send(self._record_sample())
            except ClosedError:
                break  # the session is over
            except Exception as error:  # to the log
                self._log_once(f"{type(error).__name__}: {error}")
            if self._ends.wait(self._every):
                break
        try:
            self._exporter.shutdown()
        except Exception:  # to the log
            log.exception("shutting down the OpenTelemetry exporter")
        self._logger.removeFilter(self._is_from_others)

    def _record_sample(self) -> list[ReadableSpan]:
        """Records a sample and returns its spans; none while a `Profile` is
        recorded."""
        session, bounds = self._core.session, self._bounds

        async def record() -> CollectedRun | None:
            if session.cluster.timeline is not None:
                # A user's profile is being recorded: this sample is left out.
                return None
            run = TimelineRun(session.cluster, self._core.engine, bounds, yields=True)
            await run.begin()
            self._run = run
            # `close` may have come before `_run` was set, and has not ended it then.
            if self._ends.is_open:
                run.enough()
            await run.wait_over()
            await run.end()
            return run.collected

        what = "recording a sample of the time line"
        collected = session.run(record(), what, WAITING + bounds.seconds)
        self._run = None
        if collected is None:
            return []
        # OpenTelemetry has the time of day, our spans the monotonic clock.
        return sdk_spans(timeline_of(collected), time.time() - time.monotonic())

    def _send(self, spans: list[ReadableSpan]) -> None:
        for start in range(0, len(spans), BATCH):
            batch = spans[start : start + BATCH]
            try:
                arrived = has_arrived(self._exporter, batch)
                reason = "the collector refused them"
            except Exception as error:  # to the log
                arrived, reason = False, f"{type(error).__name__}: {error}"
            if not arrived:  # the rest would fail, too
                self.dropped += len(spans) - start
                self._log_once(reason)
                return
            self.sent += len(batch)
            self._was_logged = False

    def _log_once(self, reason: str) -> None:
        """Logs that spans were lost: once until some arrive again."""
        if not self._was_logged:
            self._was_logged = True
            log.warning(
                "%d spans for the OpenTelemetry collector are lost so far: %s; "
                "training continues, and this is not logged again until it takes some",
                self.dropped,
                reason,
            )

    def _is_from_others(self, record: logging.LogRecord) -> bool:
        """Returns whether a log record is not one of the exporter's, which logs each
        failed attempt: `_log_once` logs failures."""
        return record.thread != self._thread.ident
