"""What a parameter server tells of its time and traffic, and of a time line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from zstrat.telemetry import (
    PS_PHASES,
    Phase,
    Recorder,
    SpanCapture,
    log_file,
    resident_bytes,
)
from zstrat.telemetry.timeline import columns_of
from zstrat.transport import lanes, moved_bytes
from zstrat.transport.health import TelemetryNotices
from zstrat.wire import (
    AskClock,
    BeginCapture,
    Captured,
    ClockTold,
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

    def begin_anew(self) -> None:
        """The session is over: the next one begins with nothing."""
        self._serving.recorder = Recorder(PS_PHASES)
        self.recorder.start(self._sums(), self._clock())

    def handle(self, message: Capturing) -> Message:
        """Begins or ends the capture of a time line, or tells the clock."""
        now, recorder = self._clock(), self.recorder
        match message:
            case AskClock():
                return ClockTold(now)
            case BeginCapture(spans=spans, seconds=seconds):
                capture = SpanCapture(spans, now + seconds, moved_bytes)
                recorder.begin_capture(capture, now)
                return Done()
            case EndCapture():
                capture = recorder.end_capture(now)
                phases, columns = columns_of(capture)
                return Captured(phases, capture.is_cut, "", "", tuple(columns))

    def told(self) -> dict[str, PlainTree]:
        """What `zstrat.telemetry.TaskTold` has of this server: of its present session,
        but for lanes and gauges, which are those of the process."""
        now, recorder = self._clock(), self.recorder
        recorder.reach(self._sums(), now)
        gauges: dict[str, PlainTree] = {
            "memory": resident_bytes(),
            "cpu_seconds": time.process_time(),
            "waiting": len(self._serving),
            "programs": self._store.engine.programs,
        }
        told: PlainTree = {name: dict(lane) for name, lane in lanes().items()}
        more: dict[str, PlainTree] = {
            "lanes": told,
            "gauges": gauges,
            "log": log_file(),
        }
        return {**recorder.plain(now), **more}

    def waited(self, began: float, ended: float) -> None:
        """An answer had to wait for its way, or for its reader."""
        self.recorder.spent(Phase.SEND, UNNAMED, began, ended)

    def _sums(self) -> dict[str, float]:
        """The counts whose rates are told. They are of all sessions; the bytes are
        those of the whole process."""
        counts, (got, sent) = self._store.counts, moved_bytes()
        return {
            "pulls": counts.pulls,
            "pushes": counts.pushes,
            "bytes_in": got,
            "bytes_out": sent,
            "cpu": time.process_time(),
        }

    def start_notices(self, tell: Callable[[Message], None]) -> None:
        """Tells the coordinator about once a second from now on, if that changes."""
        if self._notices is None:
            self._notices = TelemetryNotices(self.told, tell)

    def touch(self) -> None:
        """A request came: there is something to tell."""
        if self._notices is not None:
            self._notices.touch()

    def close(self) -> None:
        """Tells nothing more."""
        if self._notices is not None:
            self._notices.close()
