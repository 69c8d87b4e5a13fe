"""What a parameter server tells of its time and traffic, and of a time line."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from zstrat.telemetry import PS_PHASES, Phase, Recorder, SpanCapture
from zstrat.telemetry.timeline import columns_of
from zstrat.transport import moved_bytes
from zstrat.transport.health import TelemetryNotices, process_report, process_totals
from zstrat.wire import (
    AskClock,
    BeginCapture,
    Captured,
    ClockTime,
    Done,
    EndCapture,
    Message,
)

from .store._ledger import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.wire import PlainTree

    from ._serving import Serving
    from .store._store import Store

Capturing = AskClock | BeginCapture | EndCapture


@final
class ServiceTelemetry:
    """The telemetry of one `PsService`. Lives on the loop.

    Args:
        serving: Has the recorder of the present session.
        clock: Seconds.
    """

    def __init__(
        self, store: Store, serving: Serving, clock: Callable[[], float]
    ) -> None:
        self._store, self._serving, self._clock = store, serving, clock
        self._notices: TelemetryNotices | None = None
        self.recorder.start(self._sums(), clock())

    @property
    def recorder(self) -> Recorder:
        """The recorder of the present session."""
        return self._serving.recorder

    def reset(self) -> None:
        """The session is over: the next one begins with nothing."""
        self._serving.recorder = Recorder(PS_PHASES)
        self.recorder.start(self._sums(), self._clock())

    def handle(self, message: Capturing) -> Message:
        """Begins or ends the capture of a time line, or tells the clock."""
        now, recorder = self._clock(), self.recorder
        match message:
            case AskClock():
                return ClockTime(now)
            case BeginCapture(spans=spans, seconds=seconds):
                capture = SpanCapture(spans, now + seconds, moved_bytes)
                recorder.begin_capture(capture, now)
                return Done()
            case EndCapture():
                capture = recorder.end_capture(now)
                phases, columns = columns_of(capture)
                return Captured(phases, capture.is_cut, "", "", tuple(columns))

    def report(self) -> dict[str, PlainTree]:
        """The values of `zstrat.telemetry.TaskReport`: of the present session, but for
        those of the process."""
        now, recorder = self._clock(), self.recorder
        recorder.reach(self._sums(), now)
        service: PlainTree = {**self.counts}
        return {**recorder.plain(now), **process_report(), "service": service}

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of the service that cost nothing to look at."""
        return {
            "waiting": len(self._serving),
            "optimizers": len(self._store.engine),
            "programs": self._store.engine.programs,
        }

    def waited(self, began: float, ended: float) -> None:
        """An answer had to wait for its way, or for its reader."""
        self.recorder.spent(Phase.SEND, UNNAMED, began, ended)

    def _sums(self) -> dict[str, float]:
        """The totals whose rates are reported, of all sessions."""
        pulls, pushes = self._store.counts.pulls, self._store.counts.pushes
        return {"pulls_per_s": pulls, "pushes_per_s": pushes, **process_totals()}

    def start_notices(self, tell: Callable[[Message], None]) -> None:
        """Tells the coordinator about once a second from now on, if that changes."""
        if self._notices is None:
            self._notices = TelemetryNotices(self.report, tell)

    def touch(self) -> None:
        """A request came: there is something to tell."""
        if self._notices is not None:
            self._notices.touch()

    def close(self) -> None:
        """Tells nothing more."""
        if self._notices is not None:
            self._notices.close()
