"""A parameter server as a handler of messages: everything but the sockets.

Runs on the event loop. `PsService` passes each message to the part that answers it:

- `_roles`: which peers may send which requests;
- `_serving`: requests about variables; `_step_requests`: about steps; `snapshots`:
  about snapshots;
- `_server_session`: sessions, and the numbers that the process reports;
- `_joining`: workers that wait for a program or for its variables;
- `replication._replica_role`: whether this process serves its store at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from zstrat.errors import ProtocolError, ZstratError
from zstrat.wire import (
    REQUESTS,
    AnswerReport,
    AskClock,
    AskLeases,
    AskParts,
    AskRounds,
    AttachBackup,
    BeginCapture,
    CloseSession,
    CreateOptimizer,
    CreateTables,
    CreateVariables,
    DetachBackup,
    Done,
    EndCapture,
    Exchange,
    Fence,
    InitializeVariables,
    Inspect,
    Job,
    JoinSession,
    Message,
    OpenSession,
    Ownership,
    PlainTree,
    PromoteBackup,
    PullRound,
    PullRows,
    Push,
    RaiseMark,
    ReportWorker,
    Statistics,
)

from ._joining import Joining, WaitingWorkers
from ._requests import StoreRequest, is_of_store
from ._roles import Caller, check_role, is_forged
from ._server_session import (
    Capturing,
    ServerParts,
    ServerSession,
    ServiceTelemetry,
    notify_coordinator,
)
from ._serving import Serving
from ._step_requests import RoundRequests, StepRequests
from ._thread import ComputeThread, MakeThread
from .engine._engine import OptimizerEngine
from .replication._replay import hand_over
from .replication._replica_role import ReplicaRole, ReplicationRequest
from .snapshots._snapshot_service import SnapshotRequest, SnapshotService
from .store._fold import Folded
from .store._lookups import promise_large_reply
from .store._store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from zstrat.config import Settings
    from zstrat.wire import ArraySpec, Owner, Sink

    from .handover._handover import HandedOverStore
    from .replication._log_link import Connect

log = logging.getLogger("zstrat.ps")

_LOOKUPS: Final = (PullRows, Exchange)
_REPORTS: Final = (ReportWorker, AnswerReport)
"""Requests about unknown workers, which every process of a program answers, whichever
stores it serves."""

_CREATING: Final = (
    CreateVariables,
    InitializeVariables,
    CreateTables,
    CreateOptimizer,
)


class PsService:
    """Answers the messages of one parameter server.

    Args:
        load_code: Unpickles shipped code to an optax transformation or an initializer;
            runs on the compute thread, and only for code that a coordinator has sent.
        task: Names this server in errors: ``"/job:ps/task:0"``.
        incarnation: That of the process, or of the copy that it hosts for another
            process.
        on_exit: Called once, on the loop, when the coordinator ends the process.
        connect: Makes a link to a backup; None: the store cannot have one.
        backup_of: Makes this service a backup until it is promoted: the owner of the
            session, the view, and the incarnation of the primary.
        on_cleared: Called when a session is over and its variables are dropped.
        on_new_owner: Called when another program takes over the variables of the
            session.
        clock: Returns seconds, for times that are not those of the event loop.
        make_thread: Makes the threads for work that would block the event loop.
        keeps_state: When this process ends, the next one takes over its store
            (`ReplicaRole.state_for_successor`).
        tells: Sends the telemetry to the coordinator, about once a second.
        inherited: The state that the process before has left.
    """

    def __init__(
        self,
        *,
        load_code: Callable[[bytes], object],
        settings: Settings,
        task: str,
        incarnation: int = 0,
        on_exit: Callable[[], None] | None = None,
        connect: Connect | None = None,
        backup_of: tuple[Owner, int, int] | None = None,
        on_cleared: Callable[[], None] | None = None,
        on_new_owner: Callable[[Owner], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_thread: MakeThread = ComputeThread,
        keeps_state: bool = False,
        tells: bool = False,
        inherited: HandedOverStore | None = None,
    ) -> None:
        self._settings = settings
        self._task = task
        if inherited is None or inherited.store is None:
            # `largest`: an answer may be no larger than a message that the transport
            # takes.
            engine, largest = OptimizerEngine(load_code), settings.limits.body
            spill = settings.spill
            self._store = Store(engine, task=task, largest=largest, spill=spill)
        else:
            self._store = inherited.store
        self._ownership = Ownership(task)
        self._keeps_state = keeps_state
        self._thread = make_thread(f"compute {task}")
        # Late, by the ownership: the coordinator changes from session to session.
        notify = partial(notify_coordinator, self._ownership)
        self._serving = Serving(
            self._store,
            self._thread,
            check=self._ownership.check,
            admit=self._require_open,
            # Asked late: the role is made below, of what serving has.
            objection=lambda: self.role.objection,
            clock=clock,
        )
        self._steps = StepRequests(self._store, self._serving, self._require_place)
        self._rounds = RoundRequests(self._store, self._serving, self._require_waiting)
        turn, thread = self._serving.turn, self._thread
        self._snapshots = SnapshotService(
            task, self._store, turn, self._require_place, thread, make_thread
        )
        timeouts = settings.timeouts
        self.role: Final = ReplicaRole(
            task,
            self._store,
            self._ownership,
            turn,
            timeouts,
            incarnation=incarnation,
            notify=notify,
            connect=connect,
            clock=clock,
        )
        # A pull that waits for a round must not wait on a process that serves no
        # longer.
        self.role.on_change = self._rounds.wake
        self._joining = Joining(task, self._ownership, self._store)
        self._waiting_workers = WaitingWorkers(task, self._ownership, notify)
        if backup_of is not None:
            # Before the first message: a backup and a returning store refuse most of
            # them.
            self.role.be_backup(*backup_of, thread, self._serving.replayed)
        if inherited is not None:
            self.role.inherit(inherited)
        self._draining = False
        parts = ServerParts(
            self._ownership,
            self._store,
            self._serving,
            self._rounds,
            self._snapshots,
            self.role,
            self._joining,
            self._waiting_workers,
        )
        self._telemetry = ServiceTelemetry(parts, clock)
        self._session = ServerSession(
            task,
            parts,
            self._telemetry,
            timeouts,
            tells=tells,
            clock=clock,
            on_exit=on_exit,
            on_cleared=on_cleared,
            on_new_owner=on_new_owner,
        )

    @property
    def coordinator_lost_at(self) -> float | None:
        """When the coordinator that gave the last orders was lost, in seconds of
        ``clock``; None while it is connected."""
        return self._session.coordinator_lost_at

    @property
    def session(self) -> int | None:
        """The number of the open session."""
        return self._ownership.session

    @property
    def owner(self) -> Owner | None:
        """The owner of the open session, connected or not; None if no session is
        open."""
        return self._ownership.owner

    def handle(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers one request: at once, or by a future if the request must wait for its
        turn. Returns None for notices of a primary, which have no answer.

        Raises:
            ZstratError: The request is refused; nothing has changed.
        """
        silence, is_serving = self.role.silence, self.role.is_serving
        # Silent, so that senders repeat the request to the next process. Inspecting
        # changes nothing, and shows that the process is still there.
        if silence is not None and not isinstance(message, Inspect):
            return silence
        try:
            if not is_serving and not isinstance(message, _REPORTS):
                return self._handle_aside(remote, message)
            check_role(self._task, remote, message)
            if is_of_store(message):
                # Before it is computed, and before it waits for its turn: the promise
                # bounds both.
                if isinstance(message, _LOOKUPS) and message.rows:
                    promise_large_reply(self._store.variables, message, remote.promise)
                return self._served(message)
            match message:
                case OpenSession():
                    # A process that drains takes no new sessions, but the open one may
                    # still be closed.
                    self._require_open()
                    return self._session.open(message, remote)
                case JoinSession():
                    self._require_open()
                    return self._joining.ask(remote, message)
                case CloseSession():
                    return self._session.close(message)
                case ReportWorker():
                    self._require_open()
                    return self._waiting_workers.ask(remote, message)
                case AnswerReport():
                    self._ownership.check(message.session)
                    self._waiting_workers.answered(message)
                    return Done()
                case AskRounds() | PullRound():
                    self._ownership.check(message.session)
                    self._require_open()
                    return self._rounds.handle(message)
                case AskLeases() | AskParts() | Fence() | RaiseMark():
                    self._ownership.check(message.session)
                    return self._steps.handle(message)
                case Inspect():
                    return Statistics(self.statistics())
                case AskClock() | BeginCapture() | EndCapture():
                    self._ownership.check(message.session)
                    return self._telemetry.handle(message)
                case AttachBackup() | DetachBackup() | PromoteBackup():
                    return self._replicate(remote, message)
                case _ if isinstance(message, SnapshotRequest):
                    self._ownership.check(message.session)
                    self._require_open()
                    return self._snapshots.handle(message)
                case _:
                    raise ProtocolError(
                        f"{self._task} is a parameter server and does not answer "
                        f"{type(message).__name__}"
                    )
        except ZstratError:  # counted, and on to the caller
            self._telemetry.failed += 1
            raise

    def _served(self, message: StoreRequest) -> Message | Awaitable[Message]:
        self._telemetry.touch()
        served = self._serving.answer_request(message)
        # Programs that have joined may wait for this variable (`Joining`), which is
        # there only when the creation has had its turn.
        if isinstance(message, _CREATING):
            if isinstance(served, asyncio.Future):
                served.add_done_callback(lambda _: self._joining.answer_ready())
            else:
                self._joining.answer_ready()
        return served

    def _take_folded(self, folded: Folded) -> Message | Awaitable[Message]:
        if self.role.silence is not None:
            return self.role.silence
        try:
            # It may have served when the push began to arrive, and no longer.
            if not self.role.is_serving:
                raise self.role.refusal
            return self._serving.answer_request(folded)
        except ZstratError:  # counted, and on to the caller
            self._telemetry.failed += 1
            raise

    def absorb(
        self, remote: Caller, message: Message, specs: Sequence[ArraySpec]
    ) -> Sink | None:
        """Returns a sink that applies a large push while its body arrives; None if that
        is not possible."""
        # A backup is sent operands by its primary, never by those who push.
        if not isinstance(message, Push | Exchange) or not self.role.is_serving:
            return None
        if remote.role not in REQUESTS[type(message)].senders:
            return None
        if is_forged(remote, message):
            return None  # it is refused when the whole message is here
        fold = self._serving.fold(message, specs)
        return None if fold is None else Folded(message, fold, self._take_folded)

    def lost(self, remote: Caller, reason: str) -> None:
        """Handles the end of a connection. The variables of its session stay until
        another session opens; its snapshots are released, because perhaps nobody else
        ever would."""
        self._joining.lost(remote)
        self._waiting_workers.lost(remote)
        # Its primary is a peer of this process like any other, and no owner of the
        # session.
        backup = self.role.backup
        if backup is not None and backup.is_primary(remote):
            self.role.primary_lost()
        self._session.lost(remote)

    def take_over(self, owner: Owner) -> None:
        """Keeps the inherited variables for the coordinator that had them, and for no
        other."""
        self._session.take_over(owner)

    async def drain(self) -> bool:
        """Finishes the requests that were accepted, and ends the thread. New requests
        are refused; if the next process takes over the store, they stay unanswered
        instead, so that their senders ask that process.

        Returns:
            False if an accepted request was not done after ``timeouts.drain``.

        Cancellation: accepted requests may stay unanswered.
        """
        owner = self._ownership.owner
        if self._keeps_state and (owner is not None or self.role.is_backup):
            self.role.fall_silent()
            # Requests that the transport has passed on already begin now.
            await asyncio.sleep(0)
        elif owner is not None and len(self._store) and not self.role.is_replicated:
            log.warning(
                "the %d variables of session %#x of %s end with this process: with a "
                "state folder (--state-dir, ZSTRAT_STATE) the next one would go on "
                "with them, and strategy.parameter_servers.drain would have moved "
                "them before",
                len(self._store),
                owner.session,
                owner,
            )
        return await self._finish()

    async def _finish(self) -> bool:
        self._draining = True
        quietly = self.role.silence is not None
        self._telemetry.close()
        # In the order in which work moves on, within one deadline: a request may leave
        # an answer that waits for the backup, and both may use the thread.
        self.role.give_way()
        if not quietly:
            self._joining.close(self.role.shutdown_error)
            self._waiting_workers.close(self.role.shutdown_error)
            self._rounds.wake()
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.drain
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._serving.idle.wait()
        await self.role.close(deadline)
        saved = await self._snapshots.close(deadline)
        ended = await self._thread.close(deadline)
        return saved and ended and self._serving.idle.is_set()

    def statistics(self) -> dict[str, PlainTree]:
        """Returns counts, bytes and seconds as plain numbers: see
        `ServiceTelemetry.statistics`."""
        return self._telemetry.statistics()

    def telemetry(self) -> dict[str, PlainTree]:
        """Returns the values for `zstrat.telemetry.TaskReport`."""
        return self._telemetry.report()

    def waited(self, began: float, ended: float) -> None:
        """Records how long an answer waited to be sent."""
        self._telemetry.waited(began, ended)

    def give_up(self, view: int) -> None:
        """Drops the store, because another process has served it since this view.

        Raises:
            StaleSessionError: There is a newer view.
        """
        # First: it refuses a view that is over before anything is dropped.
        self.role.give_up(view)
        self._snapshots.clear()
        self._store.clear()

    async def hand_to(self, backup: PsService) -> None:
        """Stops serving the store, and moves its content to the service of an empty
        copy in this process, which then is the backup of another primary.

        Raises:
            UnavailableError: The future primary is lost; this service serves as before.

        Cancellation: this service serves as before.
        """
        await self.role.hand_over()
        self._snapshots.clear()
        # Nothing is awaited from here on: one of the two services has the store.
        hand_over(self._store, backup._store)
        backup.role.be_whole()

    async def _replicate(self, remote: Caller, message: ReplicationRequest) -> Message:
        self._ownership.check(message.session)
        self._require_open()
        done = await self.role.handle(message)
        if isinstance(message, PromoteBackup):  # also if asked again: it may be a retry
            self.role.promoted(remote, message)
        return done

    def _handle_aside(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers requests to a process that does not serve the store: those that its
        primary and a coordinator send to a backup, and orders to serve the store
        again."""
        if isinstance(message, Inspect):
            return Statistics(self.statistics())
        # Time lines show backups, too; the session that its primary has is not open
        # here.
        backup = self.role.backup
        if backup is not None and isinstance(message, Capturing):
            check_role(self._task, remote, message)
            backup.require(message.session, backup.view)
            return self._telemetry.handle(message)
        if backup is not None:
            return backup.handle(remote, message)
        if remote.role is Job.CHIEF:
            match message:
                case OpenSession():
                    self._require_open()
                    return self._session.open(message, remote)
                case CloseSession():
                    return self._session.close(message)
                case DetachBackup() | PromoteBackup():
                    return self._replicate(remote, message)
        raise self.role.shutdown_error if self._draining else self.role.refusal

    def _require_place(self, session: int) -> None:
        """Refuses a request that had to wait if the session has ended meanwhile, or
        another process serves the store by now."""
        self._ownership.check(session)
        if (objection := self.role.objection) is not None:
            raise objection

    def _require_waiting(self, session: int) -> None:
        """Refuses what `_require_place` refuses, for a request that waits for other
        requests."""
        self._require_place(session)
        self._require_open()

    def _require_open(self) -> None:
        if self._draining:
            raise self.role.shutdown_error
