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
    StaleSessionError,
    ZstratError,
)
from zstrat.telemetry import PS_PHASES, Recorder, SpanCapture, resident_bytes
from zstrat.telemetry.timeline import columns_of
from zstrat.transport import TelemetryNotices, lanes, moved
from zstrat.wire import (
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
    Message,
    OpenSession,
    Ownership,
    PlainTree,
    PromoteBackup,
    PullRows,
    Push,
    RaiseMark,
    SessionOpened,
    Statistics,
)

from ._joining import Joining
from ._requests import Stored
from ._roles import ROLES, Caller, check_role, is_forged
from ._serving import Serving
from ._thread import ComputeThread, MakeThread
from .engine._engine import OptimizerEngine
from .replication._following import Following
from .replication._standing import ReplicationRequest, Standing, tell_owner
from .snapshots._snapshot_service import SnapshotRequest, SnapshotService
from .store._changes import acknowledged
from .store._fold import Folded
from .store._lookups import row_bytes
from .store._store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from zstrat.config import Settings
    from zstrat.wire import ArraySpec, Sink

    from .handover import Handover, Inherited
    from .replication._following import Primary
    from .replication._forwarding import Connect

log = logging.getLogger("zstrat.ps")

_LOOKUPS: Final = (PullRows, Exchange)

_LARGE: Final = 2**20
"""Bytes of rows from which on a caller is told what it will get: see `Remote.promise`.
"""

_STATELESS: Final = (
    "with a state folder (--state-dir, ZSTRAT_STATE) the next one would go on with them"
)
_HOSTED: Final = "strategy.parameter_servers.drain would have moved them before"

_CREATING: Final = (CreateVariables, InitializeVariables, CreateOptimizer)


class PsService:
    """Answers the messages of one parameter server.

    Args:
        load_code: Turns shipped bytes into an optax transformation or an initializer;
            runs on the compute thread, and only for code that a coordinator has sent.
        task: Names this server in errors: ``"/job:ps/task:0"``.
        on_exit: Called once, on the loop, when the coordinator ends the process.
        connect: Makes a link to a backup; None: there cannot be one.
        backup_of: Session and view of which this is the backup, until it is made the
            primary.
        on_cleared: Called when a session is over, and all that it had.
        is_host: Whether its process serves other stores, too.
        make_thread: Makes the threads that do what would hold up the loop.
        tells: It tells its coordinator how it is, about once a second.
        handover: Where what is here is left for the next process; None: nowhere.
        inherited: What the process before has left.
    """

    returns = 0.0
    """Seconds in which, after `drain`, another process goes on with what was here."""

    def __init__(
        self,
        *,
        load_code: Callable[[bytes], object],
        settings: Settings,
        task: str,
        incarnation: int = 0,
        on_exit: Callable[[], None] | None = None,
        connect: Connect | None = None,
        backup_of: tuple[int, int] | None = None,
        on_cleared: Callable[[], None] | None = None,
        is_host: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        make_thread: MakeThread = ComputeThread,
        tells: bool = False,
        handover: Handover | None = None,
        inherited: Inherited | None = None,
    ) -> None:
        self._settings = settings
        self._task = task
        self._incarnation = incarnation
        self._on_exit, self._on_cleared = on_exit, on_cleared
        self._clock, self._started_at = clock, clock()
        if inherited is None:
            engine, largest = OptimizerEngine(load_code), settings.limits.body
            self._store = Store(engine, task=task, largest=largest)
        else:
            self._store = inherited.store
        self._engine = self._store.engine
        self._ownership = Ownership(task)
        self._handover, self._inherited = handover, inherited
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
            clock=clock,
        )
        self._snapshots = SnapshotService(
            task, self._store, self._serving.turn, check, self._thread, make_thread
        )
        self._joining = Joining(task, self._ownership, self._store)
        self._standing = Standing(
            task,
            self._store,
            self._serving.turn,
            tell=self._tell_owner,
            set_aside=self._set_aside,
            connect=connect,
            patience=settings.timeouts.connect,
        )
        self._is_aside = backup_of is not None
        """It does not serve its store."""
        if backup_of is not None:
            self._standing.following = Following(
                task, self._store, self._thread, *backup_of, self._promoted
            )
        self._is_hosted = backup_of is not None
        self._is_host = is_host
        self._replicas = 0
        self._draining = False
        self._failed = 0
        self._tells = tells
        self._notices: TelemetryNotices | None = None

    @property
    def session(self) -> int | None:
        """The one that is open."""
        return self._ownership.session

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
            if self._is_aside:
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
                    self._standing.require_alone()
                    return self._joining.ask(remote, message)
                case CloseSession(session=session, exit=leave):
                    return self._close(session, leave)
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
        self._ownership.check(asked.session)
        applied = self._store.applied_parts(asked.step, asked.first)
        return await acknowledged(self._store.log, applied)

    async def _fenced(self, fence: Fence) -> Fenced:
        await self._serving.settled()  # what was pushed before may be under way
        self._ownership.check(fence.session)
        fenced = Fenced(self._store.end_steps(fence.low_water, fence.asked))
        return await acknowledged(self._store.log, fenced)

    def _capture(self, message: AskClock | BeginCapture | EndCapture) -> Message:
        now, recorder = self._clock(), self.recorder
        match message:
            case AskClock():
                return ClockTold(now)
            case BeginCapture(spans=spans, seconds=seconds):
                capture = SpanCapture(spans, now + seconds, moved)
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
        if self._ownership.lost(remote):
            self._snapshots.clear()

    def take_over(self) -> None:
        """From now on what was inherited is served, and nobody else may do so.

        Raises:
            OSError: That cannot be made sure; nothing may be served.
        """
        if self._inherited is None or self._handover is None:
            return
        self._handover.took()
        owner, timeouts = self._inherited.owner, self._settings.timeouts
        self._ownership.inherit(owner)
        # It is waited for as if its connection had broken just now.
        grace = timeouts.patience + timeouts.reconnect
        asyncio.get_running_loop().call_later(grace, self._ownership.lost, owner.peer)

    async def drain(self) -> bool:
        """Finishes requests that were accepted, ends the thread. New ones are refused;
        or nobody answers them, and what is here is left for the next process.

        Returns:
            False if something accepted was not done after ``timeouts.drain``.

        Cancellation: what was accepted may not be answered any more.
        """
        owner = self._ownership.owner
        if (
            self._handover is None
            or owner is None
            or self._is_replicated
            or self._is_host()
        ):
            if self._handover is not None and self._is_host():
                # Its incarnation would stand for those, too, which are not in it.
                log.warning(
                    "leaves no state, as it serves stores that came from others: "
                    "strategy.parameter_servers.drain moves all of them before"
                )
            elif self._is_replicated:
                # A state would not know which of the copies is the newest later.
                log.info("leaves no state, as its session has second copies")
            elif owner is not None and len(self._store):
                log.warning(
                    "the %d variables of session %#x of %s end with this process: %s",
                    len(self._store),
                    owner.session,
                    owner,
                    _HOSTED if self._is_hosted else _STATELESS,
                )
            return await self._finish()
        self._silence = asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)  # what was handed on before has begun by then
        finished = await self._finish()
        if not finished:
            log.error(
                "what this process holds is lost with it: something that it had "
                "accepted did not end within ZSTRAT_DRAIN"
            )
        elif (owner := self._ownership.owner) is not None:
            patience = self._settings.timeouts.handover
            store, turn = self._store, self._serving.turn
            me = self._incarnation
            if await self._handover.leave(store, owner, me, turn, patience):
                self.returns = patience
        return finished

    @property
    def _is_replicated(self) -> bool:
        standing = self._standing
        copied = standing.has_backup or (standing.view > 0 and self._replicas > 0)
        return self._is_aside or copied

    async def _finish(self) -> bool:
        self._draining = True
        if self._notices is not None:
            self._notices.close()
        self._is_aside |= self._standing.has_backup  # for whatever comes from now on
        if self._silence is None:
            self._joining.close(self._standing.parting)
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.drain
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._serving.idle.wait()
        await self._standing.close(deadline)
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
        now, recorder, counts = self._clock(), self.recorder, self._store.counts
        recorder.reach("pulls", counts.pulls, now)
        recorder.reach("pushes", counts.pushes, now)
        recorder.traffic(*moved(), now)
        gauges: dict[str, PlainTree] = {
            "memory": resident_bytes(),
            "waiting": len(self._serving),
            "programs": self._engine.programs,
        }
        told: PlainTree = {name: dict(lane) for name, lane in lanes().items()}
        return {**recorder.plain(now), "lanes": told, "gauges": gauges}

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
        if ownership.adopt(session, remote, remote.hello, now, asked.name):
            self._snapshots.clear()
            return self._adopted(session)
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
        self._replicas = max(self._replicas, asked.replicas)
        self._standing.remind()
        self._joining.look()
        return self._opened(resumed=not new)

    async def _adopted(self, session: int) -> SessionOpened:
        await self._serving.settled()  # what was computed for the session before
        self._ownership.check(session)
        self._store.begin_anew()
        self._joining.look()
        return self._opened(resumed=True)

    def _opened(self, *, resumed: bool) -> SessionOpened:
        owner = self._ownership.owner
        assert owner is not None, "nobody was awaited since it was opened"
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
        self._is_aside, self._replicas = False, 0
        self._snapshots.clear()
        self._store.clear()
        self._serving.recorder = Recorder(PS_PHASES)
        if self._on_cleared is not None:
            self._on_cleared()

    # ---- replication -------------------------------------------------------------

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
        if following is not None:
            return following.handle(remote, message)
        if isinstance(message, OpenSession) and remote.role is Job.CHIEF:
            return self._open(message, remote)
        if isinstance(message, CloseSession) and remote.role is Job.CHIEF:
            return self._close(message.session, message.exit)
        if isinstance(message, DetachBackup) and remote.role is Job.CHIEF:
            return self._replicate(remote, message)
        raise self._standing.parting if self._draining else self._standing.refusal

    def _promoted(self, remote: Primary, view: int) -> None:
        """Is the primary from now on."""
        following, self._standing.following = self._standing.following, None
        self._standing.view, self._is_aside = view, False
        session = self.session if following is None else following.session
        assert session is not None
        self._ownership.open(session, remote, remote.hello, time.time())

    def _tell_owner(self, message: Message) -> None:
        owner = self._ownership.owner
        if owner is not None and owner.alive:
            tell_owner(cast("Caller", owner.peer), message)

    def _require_open(self) -> None:
        if self._draining:
            raise self._standing.parting
