"""A parameter server as a handler of messages: everything but the sockets.

Runs on the loop. It hands each message to who answers it, and knows when the process is
to end. Who may ask for what is in `_roles`; requests for variables are served by
`_serving`, those about snapshots by `snapshots`; sessions are in `_server_session`, the
telemetry in `_service_telemetry`; whether this process serves its store at all, or
another one does, is in `replication._role`.
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
    AnswerReport,
    AppliedParts,
    AskClock,
    AskParts,
    AttachBackup,
    BeginCapture,
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    DetachBackup,
    Done,
    EndCapture,
    Exchange,
    Fence,
    Fenced,
    InitializeVariables,
    Inspect,
    Job,
    JoinSession,
    Message,
    OpenSession,
    Ownership,
    PlainTree,
    PromoteBackup,
    PullRows,
    Push,
    RaiseMark,
    ReportWorker,
    Statistics,
)

from ._joining import Joining
from ._requests import Stored
from ._roles import ROLES, Caller, check_role, is_forged
from ._server_session import ServerParts, ServerSession, tell_coordinator
from ._service_telemetry import Capturing, ServiceTelemetry
from ._serving import Serving
from ._thread import ComputeThread, MakeThread
from ._waiting_workers import WaitingWorkers
from .engine._engine import OptimizerEngine
from .replication._backup import Backup
from .replication._copying import hand_over
from .replication._replica_role import ReplicaRole, ReplicationRequest
from .snapshots._snapshot_service import SnapshotRequest, SnapshotService
from .store._changes import acknowledged
from .store._fold import Folded
from .store._lookups import row_bytes
from .store._store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from zstrat.config import Settings
    from zstrat.wire import ArraySpec, Owner, Sink

    from .handover._handover import HandedOverStore
    from .replication._log_link import Connect

log = logging.getLogger("zstrat.ps")

_LOOKUPS: Final = (PullRows, Exchange)

_LARGE_REPLY: Final = 2**20
"""Bytes of rows from which on a caller is told what it will get: see `Caller.promise`.
"""

_REPORTS: Final = (ReportWorker, AnswerReport)
"""What is answered by any process that a program has, whichever stores it serves."""

_CREATING: Final = (CreateVariables, InitializeVariables, CreateOptimizer)


class PsService:
    """Answers the messages of one parameter server.

    Args:
        load_code: Turns shipped bytes into an optax transformation or an initializer;
            runs on the compute thread, and only for code that a coordinator has sent.
        settings: Its timeouts and limits.
        task: Names this server in errors: ``"/job:ps/task:0"``.
        incarnation: Of the process, or of the copy that it keeps for another one.
        on_exit: Called once, on the loop, when the coordinator ends the process.
        connect: Makes a link to a backup; None: there cannot be one.
        backup_of: Whose session, the view in it, and the incarnation of the primary, of
            which this is the backup until it is made the primary itself.
        on_cleared: Called when a session is over, and all that it had.
        on_new_owner: Called when another program goes on with what is here.
        clock: Seconds, of those times that are not the loop's.
        make_thread: Makes the threads that do what would hold up the loop.
        keeps_state: What is here when it ends is left for another process
            (`ReplicaRole.state_for_successor`).
        tells: It tells its coordinator how it is, about once a second.
        inherited: What the process before has left.
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
        self._incarnation = incarnation
        self._clock, self._started_at = clock, clock()
        if inherited is None or inherited.store is None:
            engine, largest = OptimizerEngine(load_code), settings.limits.body
            self._store = Store(engine, task=task, largest=largest)
        else:
            self._store = inherited.store
        self._ownership = Ownership(task)
        self._keeps_state = keeps_state
        self._thread = make_thread(f"compute {task}")
        check = self._ownership.check
        tell = partial(tell_coordinator, self._ownership)
        self._serving = Serving(
            self._store,
            self._thread,
            check=check,
            admit=self._require_open,
            # Asked late: the role is made below, of what serving has.
            objection=lambda: self.role.objection,
            clock=clock,
        )
        self._snapshots = SnapshotService(
            task,
            self._store,
            self._serving.turn,
            self._require_place,
            self._thread,
            make_thread,
        )
        timeouts = settings.timeouts
        self.role: Final = ReplicaRole(
            task,
            self._store,
            self._ownership,
            self._serving.turn,
            timeouts,
            incarnation=incarnation,
            notify=tell,
            connect=connect,
            clock=clock,
        )
        self._joining = Joining(task, self._ownership, self._store)
        self._waiting_workers = WaitingWorkers(task, self._ownership, tell)
        if backup_of is not None:
            owner, view, named = backup_of
            backup = Backup(
                task,
                self._store,
                self._thread,
                owner.session,
                view,
                named,
                self.role.promoted,
                clock,
                self._serving.replayed,
            )
            self.role.be_backup(owner, backup)
        if inherited is not None:
            self.role.inherit(inherited)
        self._draining = False
        self._failed = 0
        self._telemetry = ServiceTelemetry(self._store, self._serving, clock)
        self._session = ServerSession(
            task,
            self._ownership,
            ServerParts(
                self._store,
                self._serving,
                self._snapshots,
                self.role,
                self._joining,
                self._waiting_workers,
                self._telemetry,
            ),
            timeouts,
            tells=tells,
            clock=clock,
            on_exit=on_exit,
            on_cleared=on_cleared,
            on_new_owner=on_new_owner,
        )

    @property
    def coordinator_lost_at(self) -> float | None:
        """When the coordinator was lost that has given the last orders, in seconds of
        ``clock``; None: it is there."""
        return self._session.coordinator_lost_at

    @property
    def session(self) -> int | None:
        """The one that is open."""
        return self._ownership.session

    @property
    def owner(self) -> Owner | None:
        """Whose session it is, whether he is there or not."""
        return self._ownership.owner

    def handle(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers one request: at once, or later if it must wait for its turn. Notices
        of a primary are not answered.

        Raises:
            ZstratError: The request is refused; nothing has changed.
        """
        silence, is_serving = self.role.silence, self.role.is_serving
        # A look changes nothing: it is answered even while all else is left to the next
        # process.
        if silence is not None and not isinstance(message, Inspect):
            return silence
        try:
            if not is_serving and not isinstance(message, _REPORTS):
                return self._handle_aside(remote, message)
            check_role(self._task, remote, message)
            if isinstance(message, Stored):
                if isinstance(message, _LOOKUPS) and message.rows:
                    self._promise_large_reply(remote, message)
                return self._served(message)
            match message:
                case OpenSession():
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
                case AskParts():
                    self._ownership.check(message.session)
                    # Now, before what waits: earlier runs of the step push in vain from
                    # here on.
                    self._store.claim(message.step, message.attempt)
                    return self._applied_parts(message)
                case Fence():
                    self._ownership.check(message.session)
                    # Now, so that nothing of these steps begins any more; they are
                    # forgotten when what is under way has ended (`_fenced`).
                    self._store.close_steps(message.low_water, message.over)
                    return self._fenced(message)
                case RaiseMark(session=session, low_water=low_water):
                    self._ownership.check(session)
                    self._store.raise_mark(low_water)
                    return Done()
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
            self._failed += 1
            raise

    def _promise_large_reply(
        self, remote: Caller, message: PullRows | Exchange
    ) -> None:
        """Counts a large answer as waiting before it is made: a short message may ask
        for much, and the peer must not ask for more before it has read that."""
        operands = len(message.arrays) - len(message.rows)
        indices = message.arrays[operands:]
        nbytes = row_bytes(self._store.variables, message.rows, indices)
        if nbytes > _LARGE_REPLY:
            remote.promise(nbytes)

    def _served(self, message: Stored) -> Message | Awaitable[Message]:
        self._telemetry.touch()
        served = self._serving.take(message)
        # Programs that have joined may be waiting for just this (`Joining`).
        if isinstance(message, _CREATING):
            if isinstance(served, asyncio.Future):
                served.add_done_callback(lambda _: self._joining.look())
            else:
                self._joining.look()
        return served

    async def _applied_parts(self, asked: AskParts) -> AppliedParts:
        await self._serving.settled()  # an earlier run may have a part under way
        self._require_place(asked.session)
        applied = self._store.applied_parts(asked.step, asked.first)
        return await acknowledged(self._store.log, applied)

    async def _fenced(self, fence: Fence) -> Fenced:
        await self._serving.settled()  # what was pushed before may be under way
        self._require_place(fence.session)
        fenced = Fenced(self._store.end_steps(fence.low_water, fence.asked))
        return await acknowledged(self._store.log, fenced)

    def _take(self, folded: Folded) -> Message | Awaitable[Message]:
        if self.role.silence is not None:
            return self.role.silence
        try:
            if not self.role.is_serving:
                raise self.role.refusal
            return self._serving.take(folded)
        except ZstratError:  # counted, and on to the caller
            self._failed += 1
            raise

    def absorb(
        self, remote: Caller, message: Message, specs: Sequence[ArraySpec]
    ) -> Sink | None:
        """Works on the body of a large push while it arrives, if that can be."""
        if not isinstance(message, Push | Exchange) or not self.role.is_serving:
            return None
        if remote.role not in ROLES[type(message)]:
            return None
        if is_forged(remote, message):
            return None  # and refused when it is all there
        fold = self._serving.fold(message, specs)
        return None if fold is None else Folded(message, fold, self._take)

    def lost(self, remote: Caller, reason: str) -> None:
        """A connection ended. What its session has here stays until another opens, but
        for its snapshots: nobody might ever release them."""
        self._joining.lost(remote)
        self._waiting_workers.lost(remote)
        backup = self.role.backup
        if backup is not None and backup.is_primary(remote):
            self.role.primary_lost()
        self._session.lost(remote)

    def take_over(self, owner: Owner) -> None:
        """From now on what was inherited is there for the coordinator that had it, and
        nobody else may have it."""
        self._session.take_over(owner)

    async def drain(self) -> bool:
        """Finishes the requests that were accepted, and ends the thread. New requests
        are refused; if what is here is left to the next process, they are not answered
        at all, so that their senders ask that one.

        Returns:
            False if something accepted was not done after ``timeouts.drain``.

        Cancellation: what was accepted may not be answered any more.
        """
        owner = self._ownership.owner
        if self._keeps_state and (owner is not None or self.role.is_backup):
            self.role.fall_silent()
            await asyncio.sleep(0)  # what was handed on before has begun by then
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
        # In the order in which work is handed on, within one deadline: a request may
        # leave an answer that waits for the backup, and both may use the thread.
        self.role.give_way()
        if not quietly:
            self._joining.close(self.role.shutdown_error)
            self._waiting_workers.close(self.role.shutdown_error)
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.drain
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._serving.idle.wait()
        await self.role.close(deadline)
        saved = await self._snapshots.close(deadline)
        ended = await self._thread.close(deadline)
        return saved and ended and self._serving.idle.is_set()

    def statistics(self) -> dict[str, PlainTree]:
        """Plain numbers, cheap enough to ask for at any time. Bytes and seconds."""
        owner = self._ownership.owner
        values: dict[str, PlainTree] = {
            "job": "ps",
            "task": self._task,
            "incarnation": self._incarnation,
            "uptime": self._clock() - self._started_at,
            "session": 0 if owner is None else owner.session,
            "session_name": "" if owner is None else owner.name,
            "owner": "" if owner is None else str(owner),
            "owner_alive": owner is not None and owner.alive,
            **self._telemetry.counts,
            "failed": self._failed + self._serving.failed,
        }
        values["replication"] = self.role.statistics()
        values.update(self._store.statistics())
        values.update(self._snapshots.statistics())
        return values

    def telemetry(self) -> dict[str, PlainTree]:
        """The values of `zstrat.telemetry.TaskReport`."""
        return self._telemetry.report()

    def waited(self, began: float, ended: float) -> None:
        """An answer had to wait for its way, or for its reader."""
        self._telemetry.waited(began, ended)

    def give_up(self, view: int) -> None:
        """Another process serves the store since this view: drops what is here of it.

        Raises:
            StaleSessionError: The view is over.
        """
        # First: it refuses a view that is over, before anything is dropped.
        self.role.give_up(view)
        self._snapshots.clear()
        self._store.clear()

    async def hand_to(self, backup: PsService) -> None:
        """Ends to serve the store: all that is here becomes the content of the service
        of an empty backup, which follows another primary.

        Raises:
            UnavailableError: The backup that is to be the primary is lost; this service
                serves as before.

        Cancellation: as an error.
        """
        await self.role.hand_over()
        self._snapshots.clear()
        hand_over(self._store, backup._store)
        backup.role.be_whole()

    async def _replicate(self, remote: Caller, message: ReplicationRequest) -> Message:
        self._ownership.check(message.session)
        self._require_open()
        done = await self.role.handle(message)
        if isinstance(message, PromoteBackup):  # it is asked again, maybe by a new line
            self.role.promoted(remote, message)
        return done

    def _handle_aside(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers what a process is asked that does not serve the store: what its
        primary and a coordinator say to a backup, and who wants to serve it again."""
        if isinstance(message, Inspect):
            return Statistics(self.statistics())
        backup = self.role.backup
        if backup is not None and isinstance(message, Capturing):
            check_role(self._task, remote, message)
            backup.require(message.session, backup.view)
            return self._telemetry.handle(message)
        if backup is not None:
            return backup.handle(remote, message)
        if isinstance(message, OpenSession) and remote.role is Job.CHIEF:
            self._require_open()
            return self._session.open(message, remote)
        if isinstance(message, CloseSession) and remote.role is Job.CHIEF:
            return self._session.close(message)
        if remote.role is Job.CHIEF and isinstance(
            message, DetachBackup | PromoteBackup
        ):
            return self._replicate(remote, message)
        raise self.role.shutdown_error if self._draining else self.role.refusal

    def _require_place(self, session: int) -> None:
        """For what has waited: the session, or the place, may be another's by now."""
        self._ownership.check(session)
        if (objection := self.role.objection) is not None:
            raise objection

    def _require_open(self) -> None:
        if self._draining:
            raise self.role.shutdown_error
