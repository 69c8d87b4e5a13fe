"""Serves the requests of the store: on the spot, on the compute thread, or in turn.

Small requests are answered on the spot: reading hands out views, and adding a few MiB
takes less time than waking a thread. What takes longer than about a millisecond, and
whatever XLA may have to compile, goes to one compute thread.

A request that goes there *holds* the names that it uses (variable keys, its step,
optimizers) until it is done; whoever needs one of them queues behind, in order of
arrival, and holds the names that it waits for in its turn. So requests that share a
name are served in the order in which they came, whoever sent them, and those that share
none do not wait for each other: a pull does not wait for the compilation of another
variable's optimizer. The order is kept without threads and I/O (`RequestTurns`): its
owner calls `enter` and `leave` and runs what is its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast, final

from zstrat.errors import BusyError, ZstratError, to_wire
from zstrat.telemetry import PS_PHASES, Phase, Recorder
from zstrat.wire import (
    Done,
    Exchange,
    Exchanged,
    Message,
    Pulled,
    Push,
    Pushed,
    PushPart,
)

from ._requests import (
    PendingRequest,
    Request,
    Stored,
    advance,
    exchange,
    names_of,
    serve,
)
from .store._fold import Folded
from .store._ledger import UNNAMED

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Hashable,
        Iterable,
        Sequence,
    )

    from zstrat.wire import ArraySpec, PlainTree

    from ._thread import JobThread
    from .store._fold import Fold
    from .store._store import Store

    AreFree = Callable[[Iterable[Hashable]], bool]

T = TypeVar("T")

_PUSHES: Final = (Push, PushPart, Exchange)
_APPLIED: Final = (Pushed, Exchanged)
"""How pushes are answered."""


@dataclass(eq=False, slots=True)
class Ticket(Generic[T]):
    """A request that holds names, or waits for them (``behind`` of them are taken)."""

    request: T
    names: frozenset[Hashable]
    behind: int = field(default=0)


class RequestTurns(Generic[T]):
    """One queue per name that is in use, at most ``capacity`` requests in all."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._queues: dict[Hashable, deque[Ticket[T]]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return self._tickets

    @property
    def tickets(self) -> set[Ticket[T]]:
        """The tickets that hold names or wait for them."""
        return {ticket for queue in self._queues.values() for ticket in queue}

    def are_free(self, names: Iterable[Hashable]) -> bool:
        """True if a request that uses only these may be served on the spot."""
        queues = self._queues
        return not queues or not any(name in queues for name in names)

    def enter(self, request: T, names: Iterable[Hashable]) -> Ticket[T]:
        """Takes the names, or queues for them; its turn has come if `is_turn`.

        Raises:
            BusyError: The capacity is reached.
        """
        if self._tickets >= self._capacity:
            raise BusyError(
                f"{self._capacity} requests wait already: send fewer at a time"
            )
        ticket = Ticket(request, frozenset(names))
        for name in ticket.names:
            queue = self._queues.setdefault(name, deque())
            # Once for each name: whoever leaves the queue of a name takes one off.
            ticket.behind += bool(queue)
            queue.append(ticket)
        self._tickets += 1
        return ticket

    def is_turn(self, ticket: Ticket[T]) -> bool:
        return ticket.behind == 0

    def leave(self, ticket: Ticket[T]) -> list[Ticket[T]]:
        """Frees the names of a ticket that had its turn; returns whose turn comes."""
        self._tickets -= 1
        ready: list[Ticket[T]] = []
        for name in ticket.names:
            queue = self._queues[name]
            assert queue[0] is ticket, "only the first in a queue may leave"
            queue.popleft()
            if not queue:
                del self._queues[name]
                continue
            queue[0].behind -= 1
            if queue[0].behind == 0:
                ready.append(queue[0])
        return ready


@dataclass(eq=False, slots=True)
class _WaitingRequest:
    """A request that is not answered yet; without a message: somebody who takes turns
    by himself (`zstrat.ps.snapshots._snapshot_service`), and the answer is that his has
    come."""

    message: Request | None
    answer: asyncio.Future[Message]
    began: float = 0.0
    """When its turn had come."""


@final
class Serving:
    """Serves the requests for one store. Lives on the loop.

    Args:
        check: Raises unless the session is the one that is open.
        admit: Raises if nothing may begin that has to wait.
        objection: What is said instead of an answer, if another process serves the
            store by then: that may lack what was computed here meanwhile.
        clock: What pushes are timed by.
    """

    def __init__(
        self,
        store: Store,
        thread: JobThread,
        *,
        check: Callable[[int], None],
        admit: Callable[[], None],
        objection: Callable[[], ZstratError | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._thread = store, thread
        self._check, self._admit = check, admit
        self._objection = objection
        self._turns: RequestTurns[_WaitingRequest] = RequestTurns()
        self.failed = 0
        """Requests that were refused after they had waited, and parts of exchanges."""
        self._clock: Final = clock
        self.recorder = Recorder(PS_PHASES)
        """Replaced with each session."""
        self._watches: list[
            tuple[set[Ticket[_WaitingRequest]], asyncio.Future[None]]
        ] = []
        self.idle = asyncio.Event()
        """Set while nobody waits for an answer."""
        self.idle.set()

    def __len__(self) -> int:
        """Requests that wait, or are computed."""
        return len(self._turns)

    def take(self, message: Request) -> Message | Awaitable[Message]:
        """Answers at once, or later if the request must wait for its turn.

        Raises:
            ZstratError: The request is refused; nothing has changed.
        """
        self._check(message.session)
        turns = self._turns
        if turns and not turns.are_free(names_of(message)):
            return self._enter(message).request.answer
        began = self._clock()
        served = self._begin(message)
        if isinstance(served, _APPLIED):
            self._applied(message, began)
        while isinstance(served, PendingRequest):
            try:
                ticket = self._enter(message)
            except ZstratError as error:
                served = advance(served.running, error)
            else:
                ticket.request.began = began
                self._go_on(ticket, served)
                return ticket.request.answer
        log = self._store.log
        # A pull changes nothing, and may show what the backup does not have yet
        # (docs/consistency.md): its answer leaves at once.
        return served if log is None or type(served) is Pulled else log.hold(served)

    def fold(self, message: Push | Exchange, specs: Sequence[ArraySpec]) -> Fold | None:
        """For a push whose body follows: then `take` a `Folded`. What is to be refused,
        or has to wait, is so when it is all there."""
        try:
            self._check(message.session)
            self._admit()
        except ZstratError:  # to the caller, when the request is taken
            return None
        if not self._turns.are_free(names_of(message)):
            return None
        if self._store.log is not None:  # no operand would be left for the backup
            return None
        return self._store.fold(message, specs)

    @contextlib.asynccontextmanager
    async def turn(self, names: Sequence[Hashable]) -> AsyncIterator[AreFree]:
        """Holds names while the body runs; waits for its turn before.

        Yields:
            A function that tells whether nobody holds other names, or waits for them,
            at that moment.

        Raises:
            BusyError: Too many wait.

        Cancellation: the names are given back.
        """
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
            yield self._turns.are_free
        finally:
            self._leave(ticket)

    async def settled(self) -> None:
        """Waits until all requests are done that are computed or wait now. Those that
        come meanwhile are served as ever, and not waited for.

        Cancellation: nothing is lost.
        """
        left = {ticket for ticket in self._turns.tickets if ticket.request.message}
        if not left:
            return
        watch = left, asyncio.get_running_loop().create_future()
        self._watches.append(watch)
        try:
            await watch[1]
        finally:
            self._watches.remove(watch)

    def _applied(self, message: Request, began: float) -> None:
        """Notes how long a push took, with the pull behind it in an exchange: from
        ``began`` until now."""
        pushed = message.message if isinstance(message, Folded) else message
        assert isinstance(pushed, _PUSHES), pushed
        step = UNNAMED if isinstance(pushed, Push) and pushed.writer else pushed.step
        self.recorder.spent(Phase.APPLY, step, began, self._clock())

    def replayed(self, change: Message, began: float) -> None:
        """Notes how long it took to make a change of the primary again, from ``began``
        until now."""
        if isinstance(change, Push):
            step = UNNAMED if change.writer else change.step
            self.recorder.spent(Phase.APPLY, step, began, self._clock())

    def _begin(self, message: Request) -> Message | PendingRequest[Message]:
        if isinstance(message, Folded):
            fold: Fold | None = message.fold
            stored: Stored = message.message
        else:
            fold, stored = None, message
        store = self._store
        if isinstance(stored, Exchange):
            both = exchange(store, stored, fold, self._check, self._refuse)
            return advance(both)
        return serve(store, stored, fold)

    def _refuse(self, error: Exception) -> PlainTree:
        self.failed += 1
        return cast("PlainTree", to_wire(error))

    def _enter(self, message: Request) -> Ticket[_WaitingRequest]:
        self._admit()
        return self._queue(message, names_of(message))

    def _queue(
        self, message: Request | None, names: Sequence[Hashable]
    ) -> Ticket[_WaitingRequest]:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        ticket = self._turns.enter(_WaitingRequest(message, answer), names)
        self.idle.clear()
        return ticket

    def _resume(self, ticket: Ticket[_WaitingRequest]) -> None:
        """Serves a request that had to wait, as its turn has come. What it was checked
        for when it came, it is checked for again: the session may have changed."""
        message, turn = ticket.request.message, ticket.request.answer
        if message is None:
            if turn.cancelled():
                self._leave(ticket)
            else:
                turn.set_result(Done())
            return
        try:
            self._check(message.session)
            if (objection := self._objection()) is not None:
                raise objection
            ticket.request.began = self._clock()
            served = self._begin(message)
        except Exception as error:  # goes to the caller
            self._finish(ticket, error)
        else:
            self._go_on(ticket, served)

    def _go_on(
        self, ticket: Ticket[_WaitingRequest], served: Message | PendingRequest[Message]
    ) -> None:
        """Goes on with a request until the thread has something to compute for it, or
        its answer is there."""
        try:
            while isinstance(served, PendingRequest):
                try:
                    done = self._thread.submit(served.plan.compute)
                except ZstratError as error:
                    served = advance(served.running, error)
                else:
                    done.add_done_callback(partial(self._computed, ticket, served))
                    return
        except Exception as error:  # goes to the caller
            self._finish(ticket, error)
        else:
            self._finish(ticket, served)

    def _computed(
        self,
        ticket: Ticket[_WaitingRequest],
        pending: PendingRequest[Message],
        done: asyncio.Future[None],
    ) -> None:
        error = done.exception()
        if error is not None:
            self._store.gave_up(pending.plan)
        try:
            served = advance(pending.running, error)
        except BaseException as error:  # goes to the caller
            self._finish(ticket, error)
        else:
            self._go_on(ticket, served)

    def _finish(
        self, ticket: Ticket[_WaitingRequest], outcome: Message | BaseException
    ) -> None:
        request, answer = ticket.request, ticket.request.answer
        outcome = self._objection() or outcome
        if request.message is not None and isinstance(outcome, _APPLIED):
            self._applied(request.message, request.began)
        if isinstance(outcome, BaseException):
            self.failed += 1
            if not answer.done():
                answer.set_exception(outcome)
        elif not answer.done():
            log = self._store.log
            if log is None or type(outcome) is Pulled:
                answer.set_result(outcome)
            else:
                log.answer(answer, outcome)
        self._leave(ticket)

    def _leave(self, ticket: Ticket[_WaitingRequest]) -> None:
        loop = asyncio.get_running_loop()
        for left, settled in self._watches:
            left.discard(ticket)
            if not left and not settled.done():
                settled.set_result(None)
        for following in self._turns.leave(ticket):
            # Not at once: a long queue of short requests must not hold up the loop.
            loop.call_soon(self._resume, following)
        if not self._turns:
            self.idle.set()
