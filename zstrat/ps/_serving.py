"""Serves requests that use the store: at once, on the compute thread, or when their
turn comes.

Small requests are answered at once: a read returns views, and adding a few MiB takes
less time than waking a thread. Requests that take longer than about a millisecond, and
all requests for which XLA may have to compile, go to one compute thread.

A request that goes there *holds* the names that it uses (variable keys, its step,
optimizers) until it is done; a request that needs a held name queues in order of
arrival, and counts as holding the names that it waits for. So requests that share a
name are served in the order in which they came, from whichever peer, and requests that
share no name do not wait for each other: a pull does not wait for the compilation of
another variable's optimizer. `RequestTurns` keeps the order, without threads and I/O:
its owner calls `enter` and `leave` and serves the requests whose turn has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

from zstrat.errors import BusyError, ZstratError
from zstrat.telemetry import PS_PHASES, Phase, Recorder
from zstrat.wire import (
    READ_ANSWERS,
    CloseRound,
    Done,
    Exchange,
    Exchanged,
    Message,
    Push,
    Pushed,
    PushPart,
)
from zstrat.wire.connection import failure

from ._requests import (
    PendingRequest,
    Request,
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
"""The classes of answers to pushes."""


@dataclass(eq=False, slots=True)
class Ticket(Generic[T]):
    """The ticket of a request that holds names, or waits for names, of which ``behind``
    are held by earlier tickets."""

    request: T
    names: frozenset[Hashable]
    behind: int = field(default=0)


class RequestTurns(Generic[T]):
    """The queue of tickets for each name in use, with at most ``capacity`` requests in
    all. A queue of one is that ticket itself, without a container: a request may use a
    thousand names that no other request uses."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._queues: dict[Hashable, Ticket[T] | deque[Ticket[T]]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return self._tickets

    @property
    def tickets(self) -> set[Ticket[T]]:
        """All tickets that hold names or wait for names."""
        queues = self._queues.values()
        alone = {queue for queue in queues if isinstance(queue, Ticket)}
        return alone.union(*[q for q in queues if not isinstance(q, Ticket)])

    def are_free(self, names: Iterable[Hashable]) -> bool:
        """Returns whether a request that uses only these names may be served at
        once."""
        queues = self._queues
        return not queues or queues.keys().isdisjoint(names)

    def enter(self, request: T, names: Iterable[Hashable]) -> Ticket[T]:
        """Returns a ticket that holds the names, or queues for those that are held; its
        turn has come if `is_turn`.

        Raises:
            BusyError: ``capacity`` requests hold or wait for names.
        """
        if self._tickets >= self._capacity:
            raise BusyError(
                f"{self._capacity} requests wait already: send fewer at a time"
            )
        # A set, so that a ticket queues once for a name that the request repeats.
        ticket = Ticket(request, frozenset(names))
        queues = self._queues
        for name in ticket.names:
            # `setdefault` answers whether the name was free and takes it, in one
            # look-up.
            queue = queues.setdefault(name, ticket)
            if queue is ticket:
                continue
            if isinstance(queue, Ticket):
                queue = queues[name] = deque([queue])
            # Once for each name: leaving the queue of a name subtracts one.
            ticket.behind += 1
            queue.append(ticket)
        self._tickets += 1
        return ticket

    def is_turn(self, ticket: Ticket[T]) -> bool:
        return ticket.behind == 0

    def leave(self, ticket: Ticket[T]) -> list[Ticket[T]]:
        """Frees the names of a ticket that had its turn; returns the tickets whose turn
        comes now."""
        self._tickets -= 1
        ready: list[Ticket[T]] = []
        queues = self._queues
        for name in ticket.names:
            queue = queues.pop(name)
            if queue is ticket:
                continue
            assert isinstance(queue, deque), "only who holds a name may free it"
            assert queue[0] is ticket, "only the first in a queue may leave"
            queue.popleft()
            # A queue of one is its ticket again, so that most names never have a deque.
            queues[name] = queue if len(queue) > 1 else queue[0]
            queue[0].behind -= 1
            if queue[0].behind == 0:
                ready.append(queue[0])
        return ready


@dataclass(eq=False, slots=True)
class _WaitingRequest:
    """A request that is not answered yet. One without a message only waits for its turn
    (`Serving.turn`), and is answered when the turn has come."""

    message: Request | None
    answer: asyncio.Future[Message]
    began: float = 0.0
    """When the turn of the request came, in seconds of the clock."""


@final
class Serving:
    """Serves the requests for one store. Lives on the event loop.

    Args:
        check: Raises unless the session with this number is open.
        admit: Raises if no request may begin to wait.
        objection: Returns the error that replaces an answer, if another process serves
            the store by then: that process may lack what was computed here meanwhile.
        clock: Returns seconds, with which pushes are timed.
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
        """Number of requests that were refused after they had waited, and of parts of
        exchanges that were refused."""
        self._clock: Final = clock
        self.recorder = Recorder(PS_PHASES)
        """Records the phases of requests; replaced with each session."""
        self._watches: list[
            tuple[set[Ticket[_WaitingRequest]], asyncio.Future[None]]
        ] = []
        self.idle = asyncio.Event()
        """Set while no request waits or is being computed."""
        self.idle.set()

    def __len__(self) -> int:
        """Number of requests that wait or are being computed."""
        return len(self._turns)

    def answer_request(self, message: Request) -> Message | Awaitable[Message]:
        """Answers a request: at once, or by a future if the request must wait for its
        turn.

        Raises:
            ZstratError: The request is refused; nothing has changed.
        """
        self._check(message.session)
        turns = self._turns
        # Nothing is in use most of the time, and then the names need not be found out.
        if turns and not turns.are_free(names_of(self._store, message)):
            return self._enter(message).request.answer
        began = self._clock()
        served = self._begin(message)
        if _has_applied(message, served):
            self._applied(message, began)
        # It needs the thread, so it holds its names from now on. Without a place in the
        # queue it ends, unless it is an exchange, which has another part.
        while isinstance(served, PendingRequest):
            try:
                ticket = self._enter(message)
            except ZstratError as error:
                served = advance(served.running, error)
            else:
                ticket.request.began = began
                self._advance(ticket, served)
                return ticket.request.answer
        log = self._store.log
        # A read may leave before the backup has what it shows (docs/consistency.md).
        return (
            served if log is None or type(served) in READ_ANSWERS else log.hold(served)
        )

    def fold(self, message: Push | Exchange, specs: Sequence[ArraySpec]) -> Fold | None:
        """Starts to apply a push while its body arrives, if the push need not wait;
        then `answer_request` takes a `Folded`. None for a push that will be refused or
        has to wait: it is handled when its body is complete."""
        if len(specs) != 1:
            # Several arrays: operands, indices or keys, of which none can be added as
            # it comes.
            return None
        try:
            self._check(message.session)
            self._admit()
        except ZstratError:  # to the caller, when the request is taken
            return None
        # The fold would have to wait, but the bytes of its body do not.
        if not self._turns.are_free(names_of(self._store, message)):
            return None
        if self._store.log is not None:  # no operand would be left for the backup
            return None
        return self._store.fold(message, specs)

    @contextlib.asynccontextmanager
    async def turn(self, names: Sequence[Hashable]) -> AsyncIterator[AreFree]:
        """Holds names while the body of the ``async with`` runs; waits for its turn
        before.

        Yields:
            A function that returns whether no request holds, or waits for, any of the
            names it is given.

        Raises:
            BusyError: Too many requests wait.

        Cancellation: the names are freed.
        """
        ticket = self._queue(None, names)
        if not self._turns.is_turn(ticket):
            turn = ticket.request.answer
            try:
                await turn
            except asyncio.CancelledError:
                # A turn that has not come yet is given back when it does (`_resume`).
                if not turn.cancelled():
                    self._leave(ticket)
                raise
        try:
            yield self._turns.are_free
        finally:
            self._leave(ticket)

    async def settled(self) -> None:
        """Waits until all requests that are waiting or being computed now are done, but
        not for those that arrive meanwhile.

        Cancellation: nothing is lost.
        """
        # Those that only hold a turn have no message, and may wait for `settled`
        # themselves.
        left = {ticket for ticket in self._turns.tickets if ticket.request.message}
        if not left:
            return
        watch = left, asyncio.get_running_loop().create_future()
        self._watches.append(watch)
        try:
            await watch[1]
        finally:
            self._watches.remove(watch)

    def _applied(self, message: object, began: float) -> None:
        """Records how long a push or the closing of a round took, from ``began`` until
        now; in an exchange, including the pull."""
        pushed = message.message if isinstance(message, Folded) else message
        step = UNNAMED
        # The number of a program's own update would be taken for that of a step.
        if isinstance(pushed, _PUSHES) and not (
            isinstance(pushed, Push) and pushed.writer
        ):
            step = pushed.step
        self.recorder.spent(Phase.APPLY, step, began, self._clock())

    def replayed(self, change: Message, began: float) -> None:
        """Records how long the replay of a primary's change took, from ``began`` until
        now."""
        if isinstance(change, Push | CloseRound):
            self._applied(change, began)

    def _require_place(self, session: int) -> None:
        self._check(session)
        if (objection := self._objection()) is not None:
            raise objection

    def _begin(self, message: Request) -> Message | PendingRequest[Message]:
        store, fold = self._store, None
        if isinstance(message, Folded):
            fold, message = message.fold, message.message
        if isinstance(message, Exchange):
            both = exchange(store, message, fold, self._check, self._refuse)
            return advance(both)
        if fold is not None:
            assert isinstance(message, Push)
            return store.push_folded(message, fold)
        return serve(store, message)

    def _refuse(self, error: Exception) -> PlainTree:
        self.failed += 1
        return failure(error).error

    def _enter(self, message: Request) -> Ticket[_WaitingRequest]:
        self._admit()
        return self._queue(message, names_of(self._store, message))

    def _queue(
        self, message: Request | None, names: Sequence[Hashable]
    ) -> Ticket[_WaitingRequest]:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        ticket = self._turns.enter(_WaitingRequest(message, answer), names)
        self.idle.clear()
        return ticket

    def _resume(self, ticket: Ticket[_WaitingRequest]) -> None:
        """Serves a request whose turn has come. Checks the request again, because the
        session may have changed since it arrived."""
        message, turn = ticket.request.message, ticket.request.answer
        if message is None:
            # Cancelled before its turn came, which it must not keep.
            if turn.cancelled():
                self._leave(ticket)
            else:
                turn.set_result(Done())
            return
        try:
            self._require_place(message.session)
            ticket.request.began = self._clock()
            served = self._begin(message)
        except Exception as error:  # goes to the caller
            self._finish(ticket, error)
        else:
            self._advance(ticket, served)

    def _advance(
        self, ticket: Ticket[_WaitingRequest], served: Message | PendingRequest[Message]
    ) -> None:
        """Advances a request until the compute thread has a job to do for it, or its
        answer is known."""
        try:
            while isinstance(served, PendingRequest):
                try:
                    done = self._thread.submit(served.job)
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
        try:
            served = advance(pending.running, done.exception())
        except BaseException as error:  # goes to the caller
            self._finish(ticket, error)
        else:
            self._advance(ticket, served)

    def _finish(
        self, ticket: Ticket[_WaitingRequest], outcome: Message | BaseException
    ) -> None:
        request, answer = ticket.request, ticket.request.answer
        # Another process may serve the store by now, and lack what was computed here.
        outcome = self._objection() or outcome
        if request.message is not None and _has_applied(request.message, outcome):
            self._applied(request.message, request.began)
        if isinstance(outcome, BaseException):
            self.failed += 1
            # The sender may have gone, and its answer been cancelled; what it did
            # stays.
            if not answer.done():
                answer.set_exception(outcome)
        elif not answer.done():
            log = self._store.log
            if log is None or type(outcome) in READ_ANSWERS:
                answer.set_result(outcome)
            else:
                log.answer(answer, outcome)
        # Last: the next request finds the store and the log as the answer says.
        self._leave(ticket)

    def _leave(self, ticket: Ticket[_WaitingRequest]) -> None:
        loop = asyncio.get_running_loop()
        for left, settled in self._watches:
            left.discard(ticket)
            if not left and not settled.done():
                settled.set_result(None)
        for next_ticket in self._turns.leave(ticket):
            # Not at once: a long queue of short requests must not hold up the loop.
            loop.call_soon(self._resume, next_ticket)
        if not self._turns:
            self.idle.set()


def _has_applied(message: Request, outcome: object) -> bool:
    """Returns whether the request was a push, or closed a round, and has changed the
    store."""
    return isinstance(outcome, _APPLIED) or (
        isinstance(message, CloseRound) and isinstance(outcome, Done)
    )
