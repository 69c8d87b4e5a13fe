"""The session of a coordinator on a parameter server, and the telemetry of the server.

A session is opened, taken over by the next program, and closed. The variables of a
session stay until another session opens, whether its coordinator is connected or not.
Law: only `ServerSession` clears them. Lives on the event loop.

`ServiceTelemetry` has the statistics, telemetry and captures of time lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from zstrat.errors import (
    BusyError,
    InvalidArgumentError,
    PeerLostError,
    StaleSessionError,
)
from zstrat.telemetry import PS_PHASES, Phase, Recorder, SpanCapture
from zstrat.telemetry.timeline import columns_of
from zstrat.transport import moved_bytes
from zstrat.transport.health import TelemetryNotices, process_report, process_totals
from zstrat.wire import (
    AskClock,
    BeginCapture,
    Captured,
    ChangeProgram,
    ClockTime,
    Done,
    EndCapture,
    Message,
    Owner,
    SessionOpened,
)

from .store._ledger import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zstrat.config import Timeouts
    from zstrat.wire import CloseSession, OpenSession, Ownership, PlainTree

    from ._joining import Joining, WaitingWorkers
    from ._roles import Caller
    from ._serving import Serving
    from ._step_requests import RoundRequests
    from .replication._replica_role import ReplicaRole
    from .snapshots._snapshot_service import SnapshotService
    from .store._store import Store


Capturing = AskClock | BeginCapture | EndCapture


@dataclass(frozen=True)
class ServerParts:
    """The parts of a parameter server that a new session clears, and that its numbers
    are about."""

    ownership: Ownership
    store: Store
    serving: Serving
    rounds: RoundRequests
    snapshots: SnapshotService
    role: ReplicaRole
    joining: Joining
    waiting_workers: WaitingWorkers


@final
class ServiceTelemetry:
    """The telemetry of one `PsService`. Lives on the event loop.

    Args:
        clock: Seconds.
    """

    def __init__(self, parts: ServerParts, clock: Callable[[], float]) -> None:
        self._parts, self._clock = parts, clock
        self._store, self._serving = parts.store, parts.serving
        self._started_at = clock()
        self.failed = 0
        """Number of requests that were refused at once."""
        self._notices: TelemetryNotices | None = None
        self.recorder.start(self._sums(), clock())

    @property
    def recorder(self) -> Recorder:
        """The recorder of phases of the open session."""
        return self._serving.recorder

    def reset(self) -> None:
        """Drops the telemetry of the session, because the session is over."""
        # Not cleared: rates and steps of another program must not run into those of the
        # next.
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
        """Returns the values for `zstrat.telemetry.TaskReport`; those of the service
        are of the open session."""
        now, recorder = self._clock(), self.recorder
        recorder.reach(self._sums(), now)
        service: PlainTree = {**self.counts}
        return {**recorder.plain(now), **process_report(), "service": service}

    def statistics(self) -> dict[str, PlainTree]:
        """Returns bytes, seconds and counts of the service as plain numbers, cheap
        enough to read at any time."""
        owner, role = self._parts.ownership.owner, self._parts.role
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
            **self._parts.snapshots.statistics(),
        }

    @property
    def counts(self) -> dict[str, int]:
        """Counters of the service, which cost nothing to read."""
        return {
            "waiting": len(self._serving),
            "optimizers": len(self._store.engine),
            "programs": self._store.engine.programs,
        }

    def waited(self, began: float, ended: float) -> None:
        """Records how long an answer waited to be sent."""
        self.recorder.spent(Phase.SEND, UNNAMED, began, ended)

    def _sums(self) -> dict[str, float]:
        """Totals over all sessions, from which rates are computed."""
        pulls, pushes = self._store.counts.pulls, self._store.counts.pushes
        return {"pulls_per_s": pulls, "pushes_per_s": pushes, **process_totals()}

    def start_notices(self, notify: Callable[[Message], None]) -> None:
        """Starts to send a report about once a second, whenever the values have
        changed."""
        if self._notices is None:
            self._notices = TelemetryNotices(self.report, notify)

    def touch(self) -> None:
        """Notes that a request arrived, so that the next report is sent."""
        if self._notices is not None:
            self._notices.touch()

    def close(self) -> None:
        """Stops sending reports."""
        if self._notices is not None:
            self._notices.close()


def notify_coordinator(ownership: Ownership, message: Message) -> None:
    """Sends a notice to the owner of the session, if it is connected."""
    owner = ownership.owner
    if owner is not None and owner.alive:
        # A coordinator that is away learns of it when it is back.
        with contextlib.suppress(PeerLostError, BusyError):
            cast("Caller", owner.peer).notify(message)


@final
class ServerSession:
    """The session of one parameter server; errors name the server ``task``.

    Args:
        tells: Sends the telemetry to the coordinator, about once a second.
        clock: Seconds.
        on_exit: Called once, when the coordinator ends the process.
        on_cleared: Called when a session is over and its variables are dropped.
        on_new_owner: Called when another program takes over the variables of the
            session.
    """

    def __init__(
        self,
        task: str,
        parts: ServerParts,
        telemetry: ServiceTelemetry,
        timeouts: Timeouts,
        *,
        tells: bool,
        clock: Callable[[], float],
        on_exit: Callable[[], None] | None,
        on_cleared: Callable[[], None] | None,
        on_new_owner: Callable[[Owner], None] | None,
    ) -> None:
        self._task, self._parts, self._telemetry = task, parts, telemetry
        self._ownership = parts.ownership
        self._timeouts, self._tells, self._clock = timeouts, tells, clock
        self._on_exit, self._on_cleared = on_exit, on_cleared
        self._on_new_owner = on_new_owner
        self.coordinator_lost_at: float | None = None
        """When the coordinator that gave the last orders was lost, in seconds of
        ``clock``; None while it is connected. A program that takes the session over has
        given no orders yet, so the time stays until that program is lost, too."""

    def open(
        self, asked: OpenSession, remote: Caller
    ) -> SessionOpened | Awaitable[SessionOpened]:
        """Opens a session for the caller, or takes over the variables that another
        program has left.

        Raises:
            BusyError: Another coordinator has the session, and is connected.
            InvalidArgumentError: The program asks for fewer copies of stores than the
                program before had.
        """
        self._require_alone(asked)
        owner = Owner(
            asked.session,
            remote,
            remote.hello,
            time.time(),
            name=asked.name,
            origin=asked.origin,
            is_shared=asked.is_shared,
            program=asked.program,
            sent=asked.sent,
        )
        # `coordinator_lost_at` stays: the new program has given no orders yet.
        if self._ownership.adopt(owner):
            return self._adopted(asked)
        self.coordinator_lost_at = None
        # Several: one to the store, and one to the process (`Replication`).
        new = self._ownership.open(owner, several=True)
        role = self._parts.role
        if new:
            self._clear()
            if asked.views:  # before requests come for what another process has
                role.give_up(asked.views[0])
        # A session is opened over each connection of its program: what was asked for
        # stays.
        role.completeness.needs_backup |= asked.replicas > 0
        # The coordinator may have missed the notice of a loss while it was away.
        role.backups.report_losses()
        self._parts.joining.answer_ready()
        return self._opened(resumed=not new)

    def close(self, asked: CloseSession) -> Done:
        """Ends the session and drops its variables on this server. Does nothing if no
        session is open.

        Raises:
            StaleSessionError: Another session is open, or this session was opened
                again.
        """
        # A late message must not close a session that was opened again (`sent`).
        if self._ownership.close(asked.session, asked.sent):
            self._clear()
            self._parts.joining.answer_ready()
        if asked.exit and self._on_exit is not None:
            # Once, however often that is asked.
            on_exit, self._on_exit = self._on_exit, None
            on_exit()
        return Done()

    def lost(self, peer: object) -> None:
        """Handles the end of a connection, which may be that of the coordinator. The
        variables of its session stay until another session opens; its snapshots are
        released, because perhaps nobody else ever would."""
        if self._ownership.lost(peer):
            self.coordinator_lost_at = self._clock()
            self._parts.snapshots.clear()

    def take_over(self, owner: Owner) -> None:
        """Keeps the inherited variables for the coordinator that had them, and for no
        other, as long as for a coordinator whose connection has just broken."""
        self._ownership.inherit(owner)
        grace = self._timeouts.liveness + self._timeouts.reconnect
        asyncio.get_running_loop().call_later(grace, self.lost, owner.peer)

    def _require_alone(self, asked: OpenSession) -> None:
        """Refuses a program without backups that takes over a session with backups.

        Raises:
            InvalidArgumentError: The program has no backups, and the session that was
                left has some.
        """
        owner, role = self._ownership.owner, self._parts.role
        # The same program comes back, or it has copies.
        if owner is None or owner.session == asked.session or asked.replicas:
            return
        if asked.name and owner.name == asked.name and role.completeness.needs_backup:
            raise InvalidArgumentError(
                f"{self._task}: the session {asked.name!r} has second copies of the "
                "parameter servers: pass replicas=1 to continue it, or another name as "
                "resume= to start from the beginning"
            )

    def _adopted(self, asked: OpenSession) -> Awaitable[SessionOpened]:
        # Nobody is left who would write them or release them.
        self._parts.snapshots.clear()
        role = self._parts.role
        role.change_owner(self.coordinator_lost_at)
        role.completeness.needs_backup = asked.replicas > 0
        owner = self._ownership.owner
        if self._on_new_owner is not None and owner is not None:
            self._on_new_owner(owner)
        return self._change_program(asked.session)

    async def _change_program(self, session: int) -> SessionOpened:
        # The program before may have requests under way.
        await self._parts.serving.settled()
        # The session may have changed hands once more while it waited.
        self._ownership.check(session)
        store = self._parts.store
        store.change_program()
        # Its backup makes the change after all that was done for the program before.
        if store.log is not None:
            store.log.append(ChangeProgram(session))
        # Pulls of the program before are refused now.
        self._parts.rounds.wake()
        self._parts.joining.answer_ready()
        return self._opened(resumed=True)

    def _opened(self, *, resumed: bool) -> SessionOpened:
        owner = self._ownership.owner
        assert owner is not None, "nothing was awaited since it was opened"
        self._parts.waiting_workers.report_all()
        if self._tells:
            self._telemetry.start_notices(self._notify)
        return SessionOpened("cpu", 1, resumed=resumed, origin=owner.origin)

    def _notify(self, message: Message) -> None:
        notify_coordinator(self._ownership, message)

    def _clear(self) -> None:
        parts = self._parts
        # The role first: answers that wait for its backup fail, and its log ends.
        parts.role.end_session(StaleSessionError(f"{self._task}: the session ended"))
        parts.snapshots.clear()
        parts.store.clear()
        self._telemetry.reset()
        # Pulls that wait are refused, as their session is over.
        parts.rounds.wake()
        if self._on_cleared is not None:
            self._on_cleared()
