"""What a run does on its way to a collector of OpenTelemetry, a sample at a time.

Law of the file: the training never waits for the collector, and never hears of it. A
thread takes a time line of a few steps from time to time and sends its spans; while one
is sent none is taken. What a collector does not take is counted, and told once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from typing import TYPE_CHECKING, Final, Self, SupportsIndex, final

from zstrat.coordinator._on_worker import in_step
from zstrat.errors import ClosedError
from zstrat.program import worker_context
from zstrat.telemetry.timeline import has_arrived, http_exporter, sdk_spans
from zstrat.threads import Latch, SteadyThread
from zstrat.variables import recorder

from ._profile import WAITING, timeline_of
from ._timeline_run import TimelineBounds, TimelineRun

if TYPE_CHECKING:
    from zstrat.coordinator._coordinator import CoordinatorFace
    from zstrat.telemetry.timeline import ReadableSpan, SpanExporter

    from ._timeline_run import CollectedRun

log = logging.getLogger("zstrat.coordinator")

BATCH: Final = 512
"""Spans of one request, as the SDK's own processor has it."""
NBYTES: Final = 4 * 2**20
"""Of a sample, as a file: twenty thousand spans."""
CLOSING: Final = 10.0
"""Seconds that the last sample has to arrive."""


@final
class OpenTelemetryExport:
    """Sends spans of a run to a collector of OpenTelemetry, for as long as it is open:
    from time to time all those of some steps, of the program, the workers and the
    parameter servers, each step a trace.

    A context manager. What the collector does not take, as it is away or slow, is
    counted in `dropped`, and logged once; the program hears nothing of it.

    Args:
        coordinator: Whose steps.
        exporter: One of OpenTelemetry's SDK; left out: OTLP over HTTP, to where
            ``OTEL_EXPORTER_OTLP_ENDPOINT`` says, with ``OTEL_EXPORTER_OTLP_HEADERS``.
            It is shut down with this.
        every: Seconds between the end of one sample and the begin of the next.
        steps: A sample ends when so many closures have ended,
        seconds: or after so long.

    Raises:
        ModuleNotFoundError: OpenTelemetry is not installed; says what to install.
        RuntimeError: It is used in a step function.
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
        for name, number in (("every", every), ("steps", count), ("seconds", seconds)):
            if not 0 < number < math.inf:
                raise ValueError(
                    f"zs.OpenTelemetryExport: {name}={number!r}: expected more than 0"
                )
        self.sent = 0
        """Spans that the collector has taken,"""
        self.dropped = 0
        """and those that are lost."""
        self._core, self._every = coordinator._core, every
        self._bounds: Final = TimelineBounds(count, float(seconds), NBYTES, False)
        self._exporter = http_exporter() if exporter is None else exporter
        self._is_told = False
        self._run: TimelineRun | None = None
        self._ends = Latch()
        # A daemon: a collector that hangs must not keep the program from ending.
        self._thread = SteadyThread(self._live, name="zstrat opentelemetry")
        self._logger = logging.getLogger(type(self._exporter).__module__)
        self._logger.addFilter(self._is_of_others)
        self._thread.start()

    def close(self) -> None:
        """Ends the sample that is taken, sends it, and shuts the exporter down; waits
        ten seconds at most. Idempotent."""
        self._ends.open()
        run = self._run
        if run is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._core.session.portal.loop.call_soon_threadsafe(run.enough)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            log.warning("the collector of OpenTelemetry hangs: its last spans are lost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> None:
        while True:
            try:
                self._send(self._taken())
            except ClosedError:
                break  # the session is over
            except Exception as error:  # to the log: nobody else is there to hear it
                self._tell(f"{type(error).__name__}: {error}")
            if self._ends.wait(self._every):
                break
        try:
            self._exporter.shutdown()
        except Exception:  # to the log, as above
            log.exception("ending the exporter of OpenTelemetry")
        self._logger.removeFilter(self._is_of_others)

    def _taken(self) -> list[ReadableSpan]:
        """The spans of a sample; none while somebody takes a time line."""
        session, bounds = self._core.session, self._bounds

        async def take() -> CollectedRun | None:
            if session.cluster.timeline is not None:
                return None
            run = TimelineRun(session.cluster, self._core.engine, bounds, yields=True)
            await run.begin()
            self._run = run
            if self._ends.is_open:
                run.enough()
            await run.wait_over()
            await run.end()
            return run.collected

        what = "taking a sample of the time line"
        collected = session.run(take(), what, WAITING + bounds.seconds)
        self._run = None
        if collected is None:
            return []
        return sdk_spans(timeline_of(collected), time.time() - time.monotonic())

    def _send(self, spans: list[ReadableSpan]) -> None:
        for start in range(0, len(spans), BATCH):
            batch = spans[start : start + BATCH]
            try:
                arrived, why = has_arrived(self._exporter, batch), "it takes none"
            except Exception as error:  # told, as what is not taken
                arrived, why = False, f"{type(error).__name__}: {error}"
            if not arrived:  # nor will it take the rest
                self.dropped += len(spans) - start
                self._tell(why)
                return
            self.sent += len(batch)
            self._is_told = False

    def _tell(self, why: str) -> None:
        """Once, until something arrives again."""
        if not self._is_told:
            self._is_told = True
            log.warning(
                "spans for the collector of OpenTelemetry are lost, %d so far (%s); "
                "training goes on without, and this is not said again until it takes "
                "some",
                self.dropped,
                why,
            )

    def _is_of_others(self, record: logging.LogRecord) -> bool:
        """What the exporter logs of each attempt is told once, by `_tell`."""
        return record.thread != self._thread.ident
