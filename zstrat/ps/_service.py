"""A parameter server as a handler of messages: everything but the sockets.

Runs on the loop. Small requests are answered on the spot: reading hands out views, and
adding a few MiB takes less time than waking a thread. What takes longer than about a
millisecond, and whatever XLA may have to compile, goes to one compute thread; requests
for the same variables queue behind it and all others do not wait (`zstrat.ps._turns`).

Who may do what: a coordinator owns the session, creates, deletes and ships optimizers;
it and the workers pull and push; the evaluator pulls; anybody may inspect.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from zstrat.errors import (
    PermissionDeniedError,
    ProtocolError,
    UnavailableError,
    ZstratError,
)
from zstrat.wire import (
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    Done,
    Hello,
    InitializeVariables,
    Inspect,
    Job,
    LoadTensors,
    Message,
    OpenSession,
    Ownership,
    PinSnapshot,
    PlainTree,
    Pull,
    Pulled,
    PullRows,
    Push,
    Pushed,
    ReadSnapshot,
    ReleaseSnapshot,
    SessionOpened,
    Statistics,
    StoreTensors,
    WriteSnapshot,
)

from ._engine import OptimizerEngine
from ._ledger import UNNAMED
from ._plans import (
    CreatePlan,
    InitializePlan,
    OptimizerPlan,
    Plan,
    PushPlan,
    RowsPlan,
)
from ._snapshot_service import SnapshotRequest, SnapshotService
from ._store import Store
from ._thread import ComputeThread
from ._turns import Ticket, Turns

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Hashable,
        Sequence,
    )

    from zstrat.config import Settings

INLINE: Final = 4 * 2**20
"""Bytes of arithmetic that the loop does by itself, as `work_of` counts them: 0.1 to
0.8 ms; a thread takes about 0.1 ms to wake and as much to report."""

_ROLES: Final[dict[type[Message], frozenset[Job]]] = {
    OpenSession: frozenset({Job.CHIEF}),
    CloseSession: frozenset({Job.CHIEF}),
    CreateVariables: frozenset({Job.CHIEF}),
    InitializeVariables: frozenset({Job.CHIEF}),
    DeleteVariables: frozenset({Job.CHIEF}),
    CreateOptimizer: frozenset({Job.CHIEF}),
    Pull: frozenset({Job.CHIEF, Job.WORKER, Job.EVALUATOR}),
    PullRows: frozenset({Job.CHIEF, Job.WORKER, Job.EVALUATOR}),
    Push: frozenset({Job.CHIEF, Job.WORKER}),
    PinSnapshot: frozenset({Job.CHIEF}),
    WriteSnapshot: frozenset({Job.CHIEF}),
    ReadSnapshot: frozenset({Job.CHIEF}),
    ReleaseSnapshot: frozenset({Job.CHIEF}),
    LoadTensors: frozenset({Job.CHIEF}),
    StoreTensors: frozenset({Job.CHIEF}),
    Inspect: frozenset(Job),
}

Stored = (
    CreateVariables
    | InitializeVariables
    | DeleteVariables
    | CreateOptimizer
    | Pull
    | PullRows
    | Push
)
"""Requests that use the store, and so take turns."""


class Caller(Protocol):
    """What the service needs to know of a peer (`zstrat.transport.Remote`)."""

    @property
    def name(self) -> str: ...
    @property
    def hello(self) -> Hello: ...
    @property
    def role(self) -> Job: ...


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that is not answered yet; without a message: somebody who takes turns
    by himself (`zstrat.ps._snapshot_service`), and the answer is that his has come."""

    message: Stored | None
    answer: asyncio.Future[Message]


class PsService:
    """Answers the messages of one parameter server.

    Args:
        load_code: Turns shipped bytes into an optax transformation or an initializer;
            runs on the compute thread, and only for code that a coordinator has sent.
        task: Names this server in errors: ``"/job:ps/task:0"``.
        on_exit: Called once, on the loop, when the coordinator ends the process.
    """

    def __init__(
        self,
        *,
        load_code: Callable[[bytes], object],
        settings: Settings,
        task: str,
        incarnation: int = 0,
        on_exit: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._task = task
        self._incarnation = incarnation
        self._on_exit = on_exit
        self._clock, self._started_at = clock, clock()
        self._engine = OptimizerEngine(load_code)
        self._store = Store(self._engine, task=task, largest=settings.limits.body)
        self._ownership = Ownership(task)
        self._turns: Turns[_Waiting] = Turns()
        self._thread = ComputeThread(f"compute {task}")
        self._snapshots = SnapshotService(
            task, self._store, self._turn, self._ownership.check, self._thread
        )
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed = 0

    def handle(self, remote: Caller, message: Message) -> Message | Awaitable[Message]:
        """Answers one request: at once, or later if it must wait for its turn.

        Raises:
            ZstratError: The request is refused; nothing has changed.
        """
        try:
            roles = _ROLES.get(type(message))
            if roles is None or remote.role not in roles:
                raise _refusal(self._task, remote, message)
            match message:
                case OpenSession(session=session):
                    return self._open(session, remote)
                case CloseSession(session=session, exit=leave):
                    return self._close(session, leave)
                case Inspect():
                    return Statistics(self.statistics())
                case _ if isinstance(message, SnapshotRequest):
                    self._ownership.check(message.session)
                    self._require_open()
                    return self._snapshots.handle(message)
                case _:
                    assert isinstance(message, Stored)  # by the table of roles
                    return self._take_turn(message)
        except ZstratError:  # counted, and on to the caller
            self._failed += 1
            raise

    def lost(self, remote: Caller, reason: str) -> None:
        """A connection ended. What its session has here stays until another opens, but
        for its snapshots: nobody might ever release them."""
        if self._ownership.lost(remote):
            self._snapshots.clear()

    async def drain(self) -> bool:
        """Refuses new requests, finishes those that were accepted, ends the thread.

        Returns:
            False if something accepted was not done after ``timeouts.drain``.

        Cancellation: what was accepted may not be answered any more.
        """
        self._draining = True
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.drain
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()
        saved = await self._snapshots.close(deadline)
        ended = await self._thread.close(deadline)
        return saved and ended and self._idle.is_set()

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
            "waiting": len(self._turns),
            "failed": self._failed,
        }
        values.update(self._store.statistics())
        values.update(self._snapshots.statistics())
        return values

    # ---- sessions ----------------------------------------------------------------

    def _open(self, session: int, remote: Caller) -> SessionOpened:
        self._require_open()
        new = self._ownership.open(session, remote, remote.hello)
        if new:
            self._clear()
        return SessionOpened(platform="cpu", devices=1, resumed=not new)

    def _close(self, session: int, leave: bool) -> Done:
        if self._ownership.close(session):
            self._clear()
        if leave and self._on_exit is not None:
            on_exit, self._on_exit = self._on_exit, None
            on_exit()
        return Done()

    def _clear(self) -> None:
        self._snapshots.clear()
        self._store.clear()

    def _require_open(self) -> None:
        if self._draining:
            raise UnavailableError(f"{self._task} is shutting down")

    # ---- turns -------------------------------------------------------------------

    def _take_turn(self, message: Stored) -> Message | Awaitable[Message]:
        self._ownership.check(message.session)
        turns = self._turns
        if not turns or turns.are_free(_names(message)):
            served = self._begin(message)
            if not isinstance(served, Plan):
                return served
            ticket = self._enter(message)
            self._compute(ticket, served)
        else:
            ticket = self._enter(message)
        return ticket.request.answer

    def _enter(self, message: Stored) -> Ticket[_Waiting]:
        self._require_open()
        return self._queue(message, _names(message))

    def _queue(
        self, message: Stored | None, names: Sequence[Hashable]
    ) -> Ticket[_Waiting]:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        ticket = self._turns.enter(_Waiting(message, answer), names)
        self._idle.clear()
        return ticket

    @contextlib.asynccontextmanager
    async def _turn(self, names: Sequence[Hashable]) -> AsyncIterator[None]:
        """Has names for itself, behind those who came before."""
        ticket = self._queue(None, names)
        if not self._turns.is_turn(ticket):
            turn = ticket.request.answer
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it had come already; else see `_resume`
                    self._leave(ticket)
                raise
        try:
            yield
        finally:
            self._leave(ticket)

    def _resume(self, ticket: Ticket[_Waiting]) -> None:
        """The turn of a request has come that had to wait."""
        message, turn = ticket.request.message, ticket.request.answer
        if message is None:
            if turn.cancelled():
                self._leave(ticket)
            else:
                turn.set_result(Done())
            return
        try:
            self._ownership.check(message.session)
            served = self._begin(message)
        except Exception as error:  # goes to the caller
            self._finish(ticket, error)
        else:
            if isinstance(served, Plan):
                self._compute(ticket, served)
            else:
                self._finish(ticket, served)

    def _begin(self, message: Stored) -> Message | Plan:
        """Serves a request on the spot, or returns what the thread must do for it."""
        store = self._store
        match message:
            case Pull(reads=reads):
                versions, arrays = store.read(reads)
                return Pulled(versions, arrays)
            case Push():
                plan: Pushed | Done | Plan = store.plan_push(message)
            case PullRows(reads=reads, rows=rows, arrays=arrays):
                plan = store.plan_rows(reads, rows, arrays)
            case CreateVariables(variables=entries, arrays=arrays):
                plan = store.plan_create(entries, arrays)
            case InitializeVariables(variables=initial, code=code):
                plan = store.plan_initialize(initial, code)
            case CreateOptimizer(optimizer=optimizer, name=name, code=code):
                plan = store.plan_optimizer(optimizer, name, code)
            case DeleteVariables(keys=keys):
                store.delete(keys)
                return Done()
            case _:
                assert_never(message)
        if not isinstance(plan, Plan) or not _is_short(plan):
            return plan
        plan.compute()
        return store.commit(plan)

    def _compute(self, ticket: Ticket[_Waiting], plan: Plan) -> None:
        try:
            done = self._thread.submit(plan.compute)
        except ZstratError as error:
            self._finish(ticket, error)
        else:
            done.add_done_callback(partial(self._computed, ticket, plan))

    def _computed(
        self, ticket: Ticket[_Waiting], plan: Plan, done: asyncio.Future[None]
    ) -> None:
        try:
            done.result()
            answer = self._store.commit(plan)
        except BaseException as error:  # goes to the caller
            self._finish(ticket, error)
        else:
            self._finish(ticket, answer)

    def _finish(
        self, ticket: Ticket[_Waiting], outcome: Message | BaseException
    ) -> None:
        answer = ticket.request.answer
        if isinstance(outcome, BaseException):
            self._failed += 1
            if not answer.done():
                answer.set_exception(outcome)
        elif not answer.done():
            answer.set_result(outcome)
        self._leave(ticket)

    def _leave(self, ticket: Ticket[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        for following in self._turns.leave(ticket):
            # Not at once: a long queue of short requests must not hold up the loop.
            loop.call_soon(self._resume, following)
        if not self._turns:
            self._idle.set()


def _names(message: Stored) -> list[Hashable]:
    """What a request uses: nobody else may use it at the same time."""
    match message:
        case Pull(reads=reads):
            return [read.key for read in reads]
        case PullRows(reads=reads, rows=rows):
            return [*(read.key for read in reads), *rows]
        case Push(step=step, part=part, updates=updates):
            names: list[Hashable] = [update.key for update in updates]
            names += {("optimizer", u.optimizer) for u in updates if u.optimizer}
            if step != UNNAMED:
                names.append(("step", step, part))
            return names
        case CreateVariables(variables=entries):
            return [entry.key for entry in entries]
        case InitializeVariables(variables=initial):
            return [entry.key for entry in initial]
        case DeleteVariables(keys=keys):
            return list(keys)
        case CreateOptimizer(optimizer=optimizer):
            return [("optimizer", optimizer)]
        case _:
            assert_never(message)


def _is_short(plan: Plan) -> bool:
    match plan:
        case PushPlan(work=work):
            return work <= INLINE and plan.is_compiled
        case CreatePlan(work=work) | RowsPlan(work=work):
            return work <= INLINE
        case InitializePlan() | OptimizerPlan():
            return False
        case _:
            assert_never(plan)


def _refusal(task: str, remote: Caller, message: Message) -> ZstratError:
    what, roles = type(message).__name__, _ROLES.get(type(message))
    if roles is None:
        return ProtocolError(f"{task} is a parameter server and does not answer {what}")
    return PermissionDeniedError(
        f"{task} takes {what} from {' or '.join(sorted(roles))}, and {remote.name} is "
        f"{remote.role}"
    )
