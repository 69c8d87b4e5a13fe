"""A parameter server as a handler of messages: everything but the sockets.

Runs on the loop. It knows who may do what, whose session is open, and when to leave;
requests for variables are served by `_serving`, those about snapshots by
`zstrat.ps.snapshots._snapshot_service`.

Who may do what: a coordinator owns the session, creates, deletes and ships optimizers;
it and the workers pull, push, and tell which variables an optimizer moves (data, no
code); the evaluator pulls; anybody may inspect. A worker
that is a program of its own joins the session of the one that creates the variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final, Protocol, cast

from zstrat.errors import (
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
    ZstratError,
)
from zstrat.wire import (
    AppliedParts,
    AskParts,
    AttachBackup,
    BindOptimizer,
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    DetachBackup,
    Done,
    Exchange,
    Fence,
    Fenced,
    Hello,
    InitializeVariables,
    Inspect,
    Job,
    JoinSession,
    LoadTensors,
    Message,
    OpenLog,
    OpenSession,
    Ownership,
    PinSnapshot,
    PlainTree,
    PromoteBackup,
    Pull,
    PullRows,
    Push,
    PushPart,
    RaiseMark,
    ReadSnapshot,
    ReleaseSnapshot,
    SessionOpened,
    Statistics,
    StoreTensors,
    Withdraw,
    WriteSnapshot,
)

from ._joining import Joining
from ._requests import Stored
from ._serving import Serving
from ._thread import ComputeThread
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

    from .replication._following import Primary
    from .replication._forwarding import Connect

_ROLES: Final[dict[type[Message], frozenset[Job]]] = {
    OpenSession: frozenset({Job.CHIEF}),
    JoinSession: frozenset({Job.WORKER}),
    CloseSession: frozenset({Job.CHIEF}),
    CreateVariables: frozenset({Job.CHIEF}),
    InitializeVariables: frozenset({Job.CHIEF}),
    DeleteVariables: frozenset({Job.CHIEF}),
    CreateOptimizer: frozenset({Job.CHIEF}),
    BindOptimizer: frozenset({Job.CHIEF, Job.WORKER}),
    Withdraw: frozenset({Job.CHIEF}),
    Pull: frozenset({Job.CHIEF, Job.WORKER, Job.EVALUATOR}),
    PullRows: frozenset({Job.CHIEF, Job.WORKER, Job.EVALUATOR}),
    Push: frozenset({Job.CHIEF, Job.WORKER}),
    PushPart: frozenset({Job.CHIEF, Job.WORKER}),
    AskParts: frozenset({Job.CHIEF, Job.WORKER}),
    RaiseMark: frozenset({Job.CHIEF}),
    Exchange: frozenset({Job.CHIEF, Job.WORKER}),
    Fence: frozenset({Job.CHIEF}),
    PinSnapshot: frozenset({Job.CHIEF}),
    WriteSnapshot: frozenset({Job.CHIEF}),
    ReadSnapshot: frozenset({Job.CHIEF}),
    ReleaseSnapshot: frozenset({Job.CHIEF}),
    LoadTensors: frozenset({Job.CHIEF}),
    StoreTensors: frozenset({Job.CHIEF}),
    AttachBackup: frozenset({Job.CHIEF}),
    DetachBackup: frozenset({Job.CHIEF}),
    PromoteBackup: frozenset({Job.CHIEF}),
    Inspect: frozenset(Job),
}


_LOOKUPS: Final = (PullRows, Exchange)

_LARGE: Final = 2**20
"""Bytes of rows from which on a caller is told what it will get: see `Remote.promise`.
"""

_CREATING: Final = (CreateVariables, InitializeVariables, CreateOptimizer)


class Caller(Protocol):
    """What the service needs to know of a peer (`zstrat.transport.Remote`)."""

    @property
    def name(self) -> str: ...
    @property
    def hello(self) -> Hello: ...
    @property
    def role(self) -> Job: ...
    def promise(self, nbytes: int) -> None: ...
    def notify(self, message: Message) -> None: ...


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
        backup_of: tuple[int, int] | None = None,
        on_cleared: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._task = task
        self._incarnation = incarnation
        self._on_exit, self._on_cleared = on_exit, on_cleared
        self._clock, self._started_at = clock, clock()
        self._engine = OptimizerEngine(load_code)
        self._store = Store(self._engine, task=task, largest=settings.limits.body)
        self._ownership = Ownership(task)
        self._thread = ComputeThread(f"compute {task}")
        check = self._ownership.check
        self._serving = Serving(
            task, self._store, self._thread, check=check, admit=self._require_open
        )
        self._snapshots = SnapshotService(
            task, self._store, self._serving.turn, check, self._thread
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
        self._draining = False
        self._failed = 0

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
        try:
            if self._is_aside:
                return self._handle_aside(remote, message)
            roles = _ROLES.get(type(message))
            if roles is None or remote.role not in roles:
                raise _refusal(self._task, remote, message)
            if isinstance(message, Stored):
                if _is_forged(remote, message):
                    raise PermissionDeniedError(
                        f"{self._task}: {remote.name} names an update as another "
                        "process's, whose own would then be taken for repetitions"
                    )
                if isinstance(message, _LOOKUPS) and message.rows:
                    self._announce(remote, message)
                return self._served(message)
            match message:
                case OpenSession(session=session):
                    return self._open(session, remote)
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

    def _take(self, folded: Folded) -> Message | Awaitable[Message]:
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
        if not isinstance(message, Push | Exchange):
            return None
        if self._is_aside or remote.role not in _ROLES[type(message)]:
            return None
        if _is_forged(remote, message):
            return None  # and refused when it is all there
        fold = self._serving.fold(message, specs)
        return None if fold is None else Folded(message, fold, self._take)

    def lost(self, remote: Caller, reason: str) -> None:
        """A connection ended. What its session has here stays until another opens, but
        for its snapshots: nobody might ever release them."""
        self._joining.lost(remote)
        if self._ownership.lost(remote):
            self._snapshots.clear()

    async def drain(self) -> bool:
        """Refuses new requests, finishes those that were accepted, ends the thread.

        Returns:
            False if something accepted was not done after ``timeouts.drain``.

        Cancellation: what was accepted may not be answered any more.
        """
        self._draining = True
        self._is_aside |= self._standing.has_backup  # for whatever comes from now on
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

    # ---- sessions ----------------------------------------------------------------

    def _open(self, session: int, remote: Caller) -> SessionOpened:
        self._require_open()
        new = self._ownership.open(session, remote, remote.hello, time.time())
        if new:
            self._clear()
        self._standing.remind()
        self._joining.look()
        # Of the process: what it hosts is there, even if its own store is elsewhere.
        return SessionOpened(platform="cpu", devices=1, resumed=not new)

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
            return self._open(message.session, remote)
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


def _is_forged(remote: Caller, message: Message) -> bool:
    """Whether a push claims to be another process's own."""
    own = isinstance(message, Push) and message.writer
    return bool(own) and own != remote.hello.incarnation


def _refusal(task: str, remote: Caller, message: Message) -> ZstratError:
    what, roles = type(message).__name__, _ROLES.get(type(message))
    if isinstance(message, OpenLog):
        return StaleSessionError(f"{task}: this process is the primary by now")
    if roles is None:
        return ProtocolError(f"{task} is a parameter server and does not answer {what}")
    return PermissionDeniedError(
        f"{task} takes {what} from {' or '.join(sorted(roles))}, and {remote.name} is "
        f"{remote.role}"
    )
