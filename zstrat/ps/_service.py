"""A parameter server as a handler of messages: everything but the sockets.

Runs on the loop. It knows whose session is open, and when to leave; who may ask for
what is known by `_roles`, requests for variables are served by `_serving`, those about
snapshots by `zstrat.ps.snapshots._snapshot_service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, cast

from zstrat.errors import (
    InvalidArgumentError,
    StaleSessionError,
    ZstratError,
)
from zstrat.telemetry import PS_PHASES, Phase, Recorder, SpanCapture, resident_bytes
from zstrat.telemetry.timeline import columns_of
from zstrat.transport import lanes, moved_bytes
from zstrat.transport.health import TelemetryNotices
from zstrat.wire import (
    AnswerReport,
    AppliedParts,
    AskClock,
    AskParts,
    AttachBackup,
    BeginCapture,
    Captured,
    ClockTold,
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
    LeftCopy,
    Message,
    OpenSession,
    Ownership,
    PlainTree,
    PromoteBackup,
    PullRows,
    Push,
    RaiseMark,
    ReportWorker,
    SessionOpened,
    Statistics,
)

from ._joining import Joining
from ._reports import WorkerReports
from ._requests import Stored
from ._roles import ROLES, Caller, check_role, is_forged
from ._serving import Serving
from ._thread import ComputeThread, MakeThread
from .engine._engine import OptimizerEngine
from .handover._handover import LeftStore, StoreRole
from .replication._following import Following
from .replication._standing import ReplicationRequest, Standing, tell_owner
from .snapshots._snapshot_service import SnapshotRequest, SnapshotService
from .store._changes import acknowledged
from .store._fold import Folded
from .store._ledger import UNNAMED
from .store._lookups import row_bytes
from .store._store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from zstrat.config import Settings
    from zstrat.wire import ArraySpec, Owner, Sink

    from .replication._following import Primary
    from .replication._forwarding import Connect

log = logging.getLogger("zstrat.ps")

_LOOKUPS: Final = (PullRows, Exchange)

_LARGE: Final = 2**20
"""Bytes of rows from which on a caller is told what it will get: see `Remote.promise`.
"""


_REPORTS: Final = (ReportWorker, AnswerReport)
"""What is answered by any process that a program has, whichever stores it serves."""

Capturing = AskClock | BeginCapture | EndCapture
_CREATING: Final = (CreateVariables, InitializeVariables, CreateOptimizer)


class PsService:
    """Answers the messages of one parameter server.

    Args:
        load_code: Turns shipped bytes into an optax transformation or an initializer;
            runs on the compute thread, and only for code that a coordinator has sent.
        task: Names this server in errors: ``"/job:ps/task:0"``.
        on_exit: Called once, on the loop, when the coordinator ends the process.
        connect: Makes a link to a backup; None: there cannot be one.
        backup_of: Whose session, the view in it, and the incarnation of the primary, of
            which this is the backup until it is made the primary itself.
        on_cleared: Called when a session is over, and all that it had.
        on_adopted: Called when another program goes on with what is here.
        make_thread: Makes the threads that do what would hold up the loop.
        leaves: What is here when it ends is left for another process (`left`).
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
        on_adopted: Callable[[Owner], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_thread: MakeThread = ComputeThread,
        leaves: bool = False,
        tells: bool = False,
        inherited: LeftStore | None = None,
    ) -> None:
        self._settings = settings
        self._task = task
        self._incarnation = incarnation
        self._on_exit, self._on_cleared = on_exit, on_cleared
        self._on_adopted = on_adopted
        self.left_at: float | None = None
        """When the coordinator was lost; None: it is there. Seconds of ``clock``."""
        self._clock, self._started_at = clock, clock()
        if inherited is None or inherited.store is None:
            engine, largest = OptimizerEngine(load_code), settings.limits.body
            self._store = Store(engine, task=task, largest=largest)
        else:
            self._store = inherited.store
        self._engine = self._store.engine
        self._ownership = Ownership(task)
        self._leaves = leaves
        self._silence: asyncio.Future[Message] | None = None
        """What everybody waits for in vain while what is here is handed over."""
        self._thread = make_thread(f"compute {task}")
        check = self._ownership.check
        self._serving = Serving(
            task,
            self._store,
            self._thread,
            check=check,
            admit=self._require_open,
            objection=lambda: self._standing.objection,
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
        self._standing = Standing(
            task,
            self._store,
            self._serving.turn,
            tell=self._tell_owner,
            set_aside=self._set_aside,
            connect=connect,
            patience=settings.timeouts.connect,
            clock=clock,
        )
        admit = self._standing.require_alone
        self._joining = Joining(task, self._ownership, self._store, admit)
        self._reports = WorkerReports(task, self._ownership, self._tell_owner)
        self._is_aside = backup_of is not None
        """It does not serve its store."""
        self._host = None if backup_of is None else backup_of[0]
        """Who has the process that keeps this copy."""
        if backup_of is not None:
            owner, view, named = backup_of
            self._standing.following = Following(
                task,
                self._store,
                self._thread,
                owner.session,
                view,
                named,
                self._promoted,
                clock,
                self._serving.repeated,
            )
        if inherited is not None:
            self._go_on(inherited)
        self._draining = False
        self._failed = 0
        self._tells = tells
        self._notices: TelemetryNotices | None = None
        self.recorder.start(self._sums(), clock())

    @property
    def session(self) -> int | None:
        """The one that is open."""
        return self._ownership.session

    @property
    def owner(self) -> Owner | None:
        """Whose session it is, whether he is there or not."""
        return self._ownership.owner

    @property
    def is_backup(self) -> bool:
        return self._standing.following is not None

    @property
    def view(self) -> int:
        """The newest one of its store that it knows of."""
        following = self._standing.following
        return self._standing.view if following is None else following.view

    def handle(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers one request: at once, or later if it must wait for its turn. Notices
        of a primary are not answered.

        Raises:
            ZstratError: The request is refused; nothing has changed.
        """
        if self._silence is not None and not isinstance(message, Inspect):
            return self._silence
        try:
            if self._is_aside and not isinstance(message, _REPORTS):
                return self._handle_aside(remote, message)
            check_role(self._task, remote, message)
            if isinstance(message, Stored):
                if isinstance(message, _LOOKUPS) and message.rows:
                    self._announce(remote, message)
                return self._served(message)
            match message:
                case OpenSession():
                    return self._open(message, remote)
                case JoinSession():
                    self._require_open()
                    return self._joining.ask(remote, message)
                case CloseSession(session=session, exit=leave):
                    return self._close(session, leave)
                case ReportWorker():
                    self._require_open()
                    return self._reports.ask(remote, message)
                case AnswerReport():
                    self._ownership.check(message.session)
                    self._reports.answered(message)
                    return Done()
                case AskParts():
                    self._ownership.check(message.session)
                    self._store.claim(message.step, message.attempt)
                    return self._applied_parts(message)
                case Fence():
                    self._ownership.check(message.session)
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
                    return self._capture(message)
                case AttachBackup() | DetachBackup() | PromoteBackup():
                    return self._replicate(remote, message)
                case _:
                    assert isinstance(message, SnapshotRequest)  # by the table of roles
                    self._ownership.check(message.session)
                    self._require_open()
                    return self._snapshots.handle(message)
        except ZstratError:  # counted, and on to the caller
            self._failed += 1
            raise

    def _announce(self, remote: Caller, message: PullRows | Exchange) -> None:
        """A short message may ask for much: no other is read before it has left."""
        operands = len(message.arrays) - len(message.rows)
        indices = message.arrays[operands:]
        nbytes = row_bytes(self._store.variables, message.rows, indices)
        if nbytes > _LARGE:
            remote.promise(nbytes)

    def _served(self, message: Stored) -> Message | Awaitable[Message]:
        if self._notices is not None:
            self._notices.touch()
        served = self._serving.take(message)
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

    def _capture(self, message: Capturing) -> Message:
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

    def _take(self, folded: Folded) -> Message | Awaitable[Message]:
        if self._silence is not None:
            return self._silence
        try:
            if self._is_aside:
                raise self._standing.refusal
            return self._serving.take(folded)
        except ZstratError:  # counted, and on to the caller
            self._failed += 1
            raise

    def absorb(
        self, remote: Caller, message: Message, specs: Sequence[ArraySpec]
    ) -> Sink | None:
        """Works on the body of a large push while it arrives, if that can be."""
        if not isinstance(message, Push | Exchange) or self._silence is not None:
            return None
        if self._is_aside or remote.role not in ROLES[type(message)]:
            return None
        if is_forged(remote, message):
            return None  # and refused when it is all there
        fold = self._serving.fold(message, specs)
        return None if fold is None else Folded(message, fold, self._take)

    def lost(self, remote: Caller, reason: str) -> None:
        """A connection ended. What its session has here stays until another opens, but
        for its snapshots: nobody might ever release them."""
        self._joining.lost(remote)
        self._reports.lost(remote)
        following = self._standing.following
        if following is not None and following.is_primary(remote):
            self._standing.parted_at = self._clock()
        if self._ownership.lost(remote):
            self.left_at = self._clock()
            self._snapshots.clear()

    def take_over(self, owner: Owner) -> None:
        """From now on what was inherited is there for the coordinator that had it, and
        nobody else may have it."""
        timeouts = self._settings.timeouts
        self._ownership.inherit(owner)
        # It is waited for as if its connection had broken just now.
        grace = timeouts.patience + timeouts.reconnect
        asyncio.get_running_loop().call_later(grace, self._ownership.lost, owner.peer)

    async def drain(self) -> bool:
        """Finishes requests that were accepted, ends the thread. New ones are refused;
        or nobody answers them, if what is here is `left` for the next process.

        Returns:
            False if something accepted was not done after ``timeouts.drain``.

        Cancellation: what was accepted may not be answered any more.
        """
        owner = self._ownership.owner
        if self._leaves and (owner is not None or self.is_backup):
            self._silence = asyncio.get_running_loop().create_future()
            await asyncio.sleep(0)  # what was handed on before has begun by then
        elif owner is not None and len(self._store) and not self.is_replicated:
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

    def left(self, number: int) -> LeftStore:
        """What is here of the store ``number`` behind `drain`, if that was done in
        time."""
        following, standing = self._standing.following, self._standing
        role = StoreRole.NOTHING
        if following is not None and following.is_whole:
            role = StoreRole.BACKUP
        elif following is None and not standing.is_dropped:
            # Who has no backup that has all, and was not replaced, is the only one.
            role = StoreRole.PRIMARY if standing.is_replaced else StoreRole.ALONE
        store = None if role is StoreRole.NOTHING else self._store
        return LeftStore(number, role, self.view, store)

    @property
    def is_replicated(self) -> bool:
        """Whether another process has a copy of the store, or is to have one."""
        return self._is_aside or self._standing.is_to_have_backup

    async def _finish(self) -> bool:
        self._draining = True
        if self._notices is not None:
            self._notices.close()
        self._is_aside |= self._standing.has_backup  # for whatever comes from now on
        if self._silence is None:
            self._joining.close(self._standing.parting)
            self._reports.close(self._standing.parting)
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.drain
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._serving.idle.wait()
        quietly = self._silence is not None
        await self._standing.close(deadline, quietly=quietly)
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
            "optimizers": len(self._engine),
            "programs": self._engine.programs,
            "waiting": len(self._serving),
            "failed": self._failed + self._serving.failed,
        }
        values["replication"] = self._standing.statistics()
        values.update(self._store.statistics())
        values.update(self._snapshots.statistics())
        return values

    def telemetry(self) -> dict[str, PlainTree]:
        """What `zstrat.telemetry.TaskTold` has of this server: of its present session,
        but for lanes and gauges, which are those of the process."""
        now, recorder = self._clock(), self.recorder
        recorder.reach(self._sums(), now)
        gauges: dict[str, PlainTree] = {
            "memory": resident_bytes(),
            "waiting": len(self._serving),
            "programs": self._engine.programs,
        }
        told: PlainTree = {name: dict(lane) for name, lane in lanes().items()}
        return {**recorder.plain(now), "lanes": told, "gauges": gauges}

    def _sums(self) -> dict[str, float]:
        """Of which rates are told; of all sessions, bytes of the whole process."""
        counts, (got, sent) = self._store.counts, moved_bytes()
        pulls, pushes = counts.pulls, counts.pushes
        return {"pulls": pulls, "pushes": pushes, "bytes_in": got, "bytes_out": sent}

    def waited(self, began: float, ended: float) -> None:
        """An answer had to wait for its way, or for its reader."""
        self.recorder.spent(Phase.SEND, UNNAMED, began, ended)

    @property
    def recorder(self) -> Recorder:
        """Of the present session."""
        return self._serving.recorder

    # ---- sessions ----------------------------------------------------------------

    def _open(
        self, asked: OpenSession, remote: Caller
    ) -> SessionOpened | Awaitable[SessionOpened]:
        self._require_open()
        session, now, ownership = asked.session, time.time(), self._ownership
        self._require_alone(asked)
        if ownership.adopt(session, remote, remote.hello, now, asked.name):
            self._snapshots.clear()
            self._standing.adopted(self.left_at, self._settings.timeouts)
            self._standing.is_to_have_backup = asked.replicas > 0
            owner = ownership.owner
            if self._on_adopted is not None and owner is not None:
                self._on_adopted(owner)
            return self._adopted(session)
        self.left_at = None
        new = ownership.open(
            session,
            remote,
            remote.hello,
            now,
            name=asked.name,
            origin=asked.origin,
        )
        if new:
            self._clear()
        self._standing.is_to_have_backup |= asked.replicas > 0
        self._standing.remind()
        self._joining.look()
        return self._opened(resumed=not new)

    def _require_alone(self, asked: OpenSession) -> None:
        """
        Raises:
            InvalidArgumentError: A program would go on that has no second copies, with
                what was left in two.
        """
        owner = self._ownership.owner
        if owner is None or owner.session == asked.session or asked.replicas:
            return
        if asked.name and owner.name == asked.name and self._standing.is_to_have_backup:
            raise InvalidArgumentError(
                f"{self._task}: the session {asked.name!r} was left with second copies "
                "of the parameter servers: give replicas=1 to go on with it, or "
                "another name as resume= to begin anew"
            )

    async def _adopted(self, session: int) -> SessionOpened:
        await self._serving.settled()  # what was computed for the session before
        self._ownership.check(session)
        self._store.begin_anew()
        self._joining.look()
        return self._opened(resumed=True)

    def _opened(self, *, resumed: bool) -> SessionOpened:
        owner = self._ownership.owner
        assert owner is not None, "nobody was awaited since it was opened"
        self._reports.look()
        if self._tells and self._notices is None:
            self._notices = TelemetryNotices(self.telemetry, self._tell_owner)
        return SessionOpened("cpu", 1, resumed=resumed, origin=owner.origin)

    def _close(self, session: int, leave: bool) -> Done:
        if self._ownership.close(session):
            self._clear()
            self._joining.look()
        if leave and self._on_exit is not None:
            on_exit, self._on_exit = self._on_exit, None
            on_exit()
        return Done()

    def _clear(self) -> None:
        self._standing.end(StaleSessionError(f"{self._task}: the session ended"))
        self._is_aside = False
        self._snapshots.clear()
        self._store.clear()
        self._serving.recorder = Recorder(PS_PHASES)
        self.recorder.start(self._sums(), self._clock())
        if self._on_cleared is not None:
            self._on_cleared()

    # ---- replication -------------------------------------------------------------

    def _go_on(self, inherited: LeftStore) -> None:
        """With what a process before had: as it was, if nobody else can have it."""
        following = self._standing.following
        if following is not None:
            following.inherit(is_whole=inherited.role is StoreRole.BACKUP)
            return
        self._standing.view = inherited.view
        if inherited.role is not StoreRole.ALONE:
            self._standing.step_aside(is_dropped=inherited.role is StoreRole.NOTHING)

    def give_up(self, view: int) -> None:
        """Another process serves the store since this view: drops what is here of it.

        Raises:
            StaleSessionError: The view is over.
        """
        self._standing.give_up(view)
        self._snapshots.clear()
        self._store.clear()

    def found(self, remote: Caller, view: int) -> None:
        """It is the primary of a store that is new, from the beginning, for who asks
        that."""
        self._promoted(remote, view)

    def adopt(self, owner: Owner, left_at: float | None) -> None:
        """Another program has the process that keeps this copy, and goes on with it.

        Args:
            left_at: When the process had lost the one before.
        """
        self._standing.adopted(left_at, self._settings.timeouts)
        if (following := self._standing.following) is not None:
            self._host = owner
            following.adopt(owner.session)

    def left_copy(self, number: int, left_at: float | None) -> LeftCopy | None:
        """What a lost program has left here of the store ``number``, if anything.

        Args:
            left_at: When the process had lost that program.
        """
        standing = self._standing
        owner = self.owner if standing.following is None else self._host
        if owner is None or not standing.has_any:
            return None
        return LeftCopy(
            number,
            self.view,
            "",
            self._incarnation,
            owner.origin,
            is_primary=standing.following is None,
            is_whole=standing.following is None or standing.following.is_whole,
            is_sure=standing.is_sure(left_at, self._settings.timeouts),
            variables=len(self._store),
        )

    def _set_aside(self, aside: bool) -> None:
        self._is_aside = aside

    async def _replicate(self, remote: Caller, message: ReplicationRequest) -> Message:
        self._ownership.check(message.session)
        self._require_open()
        done = await self._standing.handle(message)
        if isinstance(message, PromoteBackup):  # it is asked again, maybe by a new line
            self._promoted(remote, message.view)
        return done

    def _handle_aside(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """While another process serves the store."""
        if isinstance(message, Inspect):
            return Statistics(self.statistics())
        following = self._standing.following
        if following is not None and isinstance(message, Capturing):
            check_role(self._task, remote, message)
            following.require(message.session, following.view)
            return self._capture(message)
        if following is not None:
            return following.handle(remote, message)
        if isinstance(message, OpenSession) and remote.role is Job.CHIEF:
            return self._open(message, remote)
        if isinstance(message, CloseSession) and remote.role is Job.CHIEF:
            return self._close(message.session, message.exit)
        if remote.role is Job.CHIEF and isinstance(
            message, DetachBackup | PromoteBackup
        ):
            return self._replicate(remote, message)
        raise self._standing.parting if self._draining else self._standing.refusal

    def _promoted(self, remote: Primary, view: int) -> None:
        """Is the primary from now on."""
        standing, host, session = self._standing, self._host, self.session
        if standing.following is not None:
            session = standing.following.session
        assert session is not None
        name, origin = ("", 0) if host is None else (host.name, host.origin)
        self._ownership.open(
            session, remote, remote.hello, time.time(), name=name, origin=origin
        )
        standing.following, standing.view, self._is_aside = None, view, False

    def _tell_owner(self, message: Message) -> None:
        owner = self._ownership.owner
        if owner is not None and owner.alive:
            tell_owner(cast("Caller", owner.peer), message)

    def _require_place(self, session: int) -> None:
        """For what has waited: the session, or the place, may be another's by now."""
        self._ownership.check(session)
        if (objection := self._standing.objection) is not None:
            raise objection

    def _require_open(self) -> None:
        if self._draining:
            raise self._standing.parting
