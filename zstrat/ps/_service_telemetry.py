"""Numbers of a parameter server: statistics, telemetry and captures of time lines."""

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

    from zstrat.wire import Ownership, PlainTree

    from ._serving import Serving
    from .replication._replica_role import ReplicaRole
    from .snapshots._snapshot_service import SnapshotService
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
        self,
        ownership: Ownership,
        store: Store,
        serving: Serving,
        snapshots: SnapshotService,
        role: ReplicaRole,
        clock: Callable[[], float],
    ) -> None:
        self._ownership, self._store, self._serving = ownership, store, serving
        self._snapshots, self._role, self._clock = snapshots, role, clock
        self._started_at = clock()
        self.failed = 0
        """Requests that were refused at once."""
        self._notices: TelemetryNotices | None = None
        self.recorder.start(self._sums(), clock())

    @property
    def recorder(self) -> Recorder:
        """The recorder of the present session."""
        return self._serving.recorder

    def reset(self) -> None:
        """Drops the telemetry of the session, as it is over."""
        self._serving.recorder = Recorder(PS_PHASES)
        self.recorder.start(self._sums(), self._clock())

    def handle(self, message: Capturing) -> Message:
        """Begins or ends the capture of a time line, or reads the clock."""
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
        """Returns the values of `zstrat.telemetry.TaskReport`: those of the service are
        of the present session."""
        now, recorder = self._clock(), self.recorder
        recorder.reach(self._sums(), now)
        service: PlainTree = {**self.counts}
        return {**recorder.plain(now), **process_report(), "service": service}

    def statistics(self) -> dict[str, PlainTree]:
        """Returns plain numbers, cheap enough to ask for at any time: bytes, seconds,
        counts."""
        owner, role = self._ownership.owner, self._role
        return {
            "job": "ps",
            "task": role.task,
            "incarnation": role.incarnation,
            "uptime": self._clock() - self._started_at,
            "session": 0 if owner is None else owner.session,
            "session_name": "" if owner is None else owner.name,
            "owner": "" if owner is None else str(owner),
            "owner_alive": owner is not None and owner.alive,
            **self.counts,
            "failed": self.failed + self._serving.failed,
            "replication": role.statistics(),
            **self._store.statistics(),
            **self._snapshots.statistics(),
        }

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of the service that cost nothing to read."""
        return {
            "waiting": len(self._serving),
            "optimizers": len(self._store.engine),
            "programs": self._store.engine.programs,
        }

    def waited(self, began: float, ended: float) -> None:
        """Records how long an answer waited to be sent."""
        self.recorder.spent(Phase.SEND, UNNAMED, began, ended)

    def _sums(self) -> dict[str, float]:
        """Totals of all sessions, whose rates are reported."""
        pulls, pushes = self._store.counts.pulls, self._store.counts.pushes
        return {"pulls_per_s": pulls, "pushes_per_s": pushes, **process_totals()}

    def start_notices(self, tell: Callable[[Message], None]) -> None:
        """Starts to send a report about once a second, if it has changed."""
        if self._notices is None:
            self._notices = TelemetryNotices(self.report, tell)

    def touch(self) -> None:
        """Notes that a request came, so that the report has changed."""
        if self._notices is not None:
            self._notices.touch()

    def close(self) -> None:
        """Stops sending reports."""
        if self._notices is not None:
            self._notices.close()
