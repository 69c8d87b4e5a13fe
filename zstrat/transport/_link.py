"""The way from this process to one task: connects, greets, connects again, for ever.

One socket is one connection (`_dial`), so that nothing of the old can mix with the new.
`Peer` decides about a connection, `Continuity` about the task behind it; this file
carries out what they say.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from zstrat.errors import BusyError, ClosedError, PeerLostError
from zstrat.wire import Hello, Job, Message
from zstrat.wire.connection import (
    Answered,
    Closed,
    Failed,
    Noticed,
    Opened,
    Order,
    OrderState,
    Peer,
    mismatch,
)

from ._address import parse
from ._dial import Dial
from ._opening import Continuity, Opening, again
from ._pool import POOL
from ._pump import Outlet, parts_of
from ._shared_memory import channel_of
from ._socket import LINGER, ZEROMQ, Event, EventKind, Sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zmq

    from zstrat.config import Settings

    from ._curve import Security
    from ._descriptors import Accepted

_LOG: Final = logging.getLogger("zstrat.transport")
_NUMBERS: Final = itertools.count(1)
_LAST_READ_SECONDS: Final = 0.01
"""Seconds in which what arrived before the end of a connection can still be read."""

Reply = asyncio.Future[Message]

_OPEN: Final = OrderState.OPEN

Argument = TypeVar("Argument")


def _ignore(_: object) -> None:
    pass


class TaskLink(Protocol):
    """What is asked of a `Link` by who is given one, or what stands for it in a test
    (`zstrat.testing.FakeLink`)."""

    address: str

    @property
    def is_open(self) -> bool: ...
    @property
    def is_heard(self) -> bool: ...
    @property
    def is_refused(self) -> bool: ...
    @property
    def trouble(self) -> str: ...
    @property
    def peer(self) -> Hello | None: ...
    def start(self) -> None: ...
    async def wait_open(self, deadline: float) -> Hello: ...
    def submit(self, message: Message, *, deadline: float | None = None) -> Reply: ...
    def notify(self, message: Message) -> None: ...
    async def close(self, reason: str = ...) -> None: ...


class MakeTaskLink(Protocol):
    """Makes the link to one task; it is not started yet. ``functools.partial(Link,
    ...)``, with all other arguments, is one."""

    def __call__(
        self,
        address: str,
        *,
        name: str,
        expect: tuple[str, int],
        on_notice: Callable[[Message], None] = ...,
        on_open: Callable[[Hello], None],
        on_lost: Callable[[PeerLostError], None],
    ) -> TaskLink: ...


class Link:
    """One DEALER to one task. All methods belong to the thread of its loop.

    Args:
        address: Where the task listens, as `Endpoint.bind` returned it.
        me: The HELLO of this process.
        name: What errors call the task: ``/job:ps/task:0``.
        on_notice: Called with every notice, in order.
        on_open: Called after every greeting, the first and each later one. What was in
            flight before it, notices too, may be lost even if the incarnation in the
            HELLO is the same.
        on_lost: Called once per loss: silence, a goodbye, a new incarnation, or a
            broken connection that did not come back in ``timeouts.reconnect``.
        on_flushed: Called when messages left or may leave, on the way out of whatever
            made them leave: `backlog` may have become less.
        security: Keys of this process; needs ``expect``, which says whose key the task
            must have.
        expect: Job and index that must answer; an index of None is any.
        sockets: Where they come from.
    """

    def __init__(
        self,
        address: str,
        me: Hello,
        *,
        name: str,
        settings: Settings,
        on_notice: Callable[[Message], None] = _ignore,
        on_open: Callable[[Hello], None] = _ignore,
        on_lost: Callable[[PeerLostError], None] = _ignore,
        on_flushed: Callable[[], None] | None = None,
        security: Security | None = None,
        expect: tuple[str, int | None] | None = None,
        sockets: Sockets = ZEROMQ,
    ) -> None:
        self.name, self.address = name, address
        self._sockets = sockets
        self._where = parse(address)
        if self._where.scheme == "tcp" and not self._where.port:
            raise ValueError(f"address {address!r}: a link needs a port above 0")
        self._me = replace(me, link=next(_NUMBERS))
        self._settings, self._security, self._expect = settings, security, expect
        self._idle_timeout = settings.timeouts.request
        self._on_notice, self._on_open, self._on_lost = on_notice, on_open, on_lost
        self._on_flushed = on_flushed
        if security is not None and expect is None:
            raise ValueError(
                f"{name}: say whom to expect, to know which key it must have"
            )
        self._continuity = Continuity(settings.timeouts.reconnect)
        self._outlet: Outlet | None = None
        self._opening = Opening(self._target)
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._armed_for = float("inf")
        self._connected_at = 0.0
        self._line: Accepted | None = None
        """What was connected last."""
        self._failed = 0
        """Handshakes, which may have been with a key that the task has no more."""
        self._is_started = self._is_closed = False
        self.is_refused = False
        """The last attempt to connect has failed at once: nothing listens there."""

    def start(self) -> None:
        """Begins to connect, and connects again after each loss until `close`."""
        if self._is_started or self._is_closed:
            raise ClosedError(f"the link to {self.name} can be started once")
        self._loop = asyncio.get_running_loop()
        self._dial = Dial(
            self._sockets.lease(),
            self._where,
            self._settings,
            arm=self._arm_socket,
            happened=self._happened,
            received=self._received,
            failed=self._no_socket,
            sockets=self._sockets,
        )
        self._is_started = True
        self._dial.now()

    @property
    def is_open(self) -> bool:
        return self._outlet is not None and self._outlet.peer.state is OrderState.OPEN

    @property
    def is_heard(self) -> bool:
        """Whether it is open, its connection is whole, and the task was heard within
        two beats."""
        return self._outlet is not None and self._outlet.peer.is_heard

    @property
    def trouble(self) -> str:
        """Why it is not open, as far as that is known."""
        return self._opening.trouble

    @property
    def peer(self) -> Hello | None:
        """HELLO of the task, while the link is open."""
        return self._outlet.peer.hello if self._outlet and self.is_open else None

    async def wait_open(self, deadline: float) -> Hello:
        """Waits until the task has greeted.

        Args:
            deadline: Loop time.

        Raises:
            DeadlineExceededError: It did not in time; names task and address.
            VersionMismatchError, ProtocolError: It refused us, or we refused it.
            PermissionDeniedError: It does not take our key.
            ClosedError: The link was closed.

        Cancellation: nothing is lost.
        """
        self._check_usable()
        if self._outlet is not None and self.is_open:
            assert self._outlet.peer.hello is not None
            return self._outlet.peer.hello
        return await self._opening.wait(deadline)

    def submit(self, message: Message, *, deadline: float | None = None) -> Reply:
        """Sends a request; the future gets its one outcome.

        That is the answer, the error that the other side raised, `PeerLostError` (the
        request may or may not have run), or `DeadlineExceededError`. Cancelling the
        future gives up the answer, not the request.

        Args:
            deadline: Loop time, whatever moves; None: it may wait for
                ``timeouts.request``, and as long again after each progress of the
                bodies that it waits for.

        Raises:
            TypeError, ValueError: The message cannot be sent.
            BusyError: Too many requests are open.
            ClosedError: The link was closed.
        """
        outlet = self._outlet
        if outlet is None or outlet.peer.state is not _OPEN:
            self._check_usable()
            future: Reply = self._loop.create_future()
            future.set_exception(PeerLostError(self.name, "it is not connected"))
            return future
        future = self._loop.create_future()
        idle_timeout = 0.0
        if deadline is None:
            idle_timeout = self._idle_timeout
            deadline = self._loop.time() + idle_timeout
        outlet.peer.request(message, future, deadline, idle_timeout)
        outlet.flush()
        if deadline < self._armed_for:
            self._arm(outlet.peer.due)
        return future

    async def request(
        self, message: Message, *, deadline: float | None = None
    ) -> Message:
        """`submit`, awaited.

        Cancellation: gives up the answer; the request may be carried out.
        """
        return await self.submit(message, deadline=deadline)

    def notify(self, message: Message) -> None:
        """Sends a notice. It may be lost with the connection, never by itself.

        Raises:
            PeerLostError: The task is not connected.
            BusyError: It does not read, and too many wait for it.
            ClosedError: The link was closed.
        """
        outlet = self._outlet
        if outlet is None or outlet.peer.state is not _OPEN:
            self._check_usable()
            raise PeerLostError(self.name, "it is not connected")
        outlet.peer.notify(message)
        outlet.flush()

    @property
    def backlog(self) -> int:
        """Messages that wait to leave; 0 while the link is not open."""
        outlet = self._outlet
        return 0 if outlet is None else len(outlet.peer.outbox)

    async def close(self, reason: str = "it closed the link") -> None:
        """Says goodbye; open requests and waiters fail with `ClosedError`.

        Cancellation: the link is closed all the same.
        """
        if self._is_closed:
            return
        self._is_closed = True
        error = ClosedError(f"the link to {self.name} was closed")
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        if self._outlet is not None:
            for order in self._outlet.peer.leave(reason):
                if isinstance(order, Failed) and not order.token.done():
                    order.token.set_exception(again(error))
            self._outlet.flush()
        self._opening.fail(error)
        if self._is_started:
            self._dial.close(LINGER)
            await self._sockets.give_back()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the link to {self.name} is closed")
        if not self._is_started:
            raise RuntimeError(f"the link to {self.name} was not started")

    @property
    def _target(self) -> str:
        return f"{self.name} at {self.address}"

    def _arm_socket(self, socket: zmq.Socket[bytes]) -> None:
        if self._security is not None:
            assert self._expect is not None
            job, index = self._expect
            self._security.arm_client(socket, Job(job), index, self._failed)

    def _no_socket(self, error: Exception) -> None:
        self._opening.trouble = f"this process cannot open a socket: {error}"
        _LOG.warning("%s: %s", self._target, self._opening.trouble)

    def _happened(self, event: Event) -> None:
        match event.kind:
            case EventKind.READY:
                self.is_refused = False
                if self._outlet is None:
                    self._greet()
                else:
                    # libzmq connected again by itself before we heard of the break.
                    self._broke(self._outlet)
            case EventKind.BROKEN:
                # Said before the last message can be read, which may be the goodbye.
                if self._outlet is not None:
                    self._loop.call_later(_LAST_READ_SECONDS, self._broke, self._outlet)
            case EventKind.UNAUTHORISED:
                assert self._security is not None
                self._opening.refuse(self._security.denied(self._target))
                self._loop.call_soon(self._redial)
            case EventKind.MISMATCHED:
                self._handshake_failed(by_task=True)
            case EventKind.FAILED:
                if self._has_timed_out(event):
                    self._opening.handshake_timed_out()
                    self._dial.end_question()
                    self._loop.call_soon(self._redial)
                else:
                    self._handshake_failed(by_task=self._dial.is_task)
            case EventKind.RETRIED:
                self.is_refused = True
                self._dial.look_up(self._redial, self._opening.looked_up)
            case EventKind.CONNECTED:
                self._line = self._sockets.accepted(event.value)
                self._connected_at = self._loop.time()
                self._opening.connected()
            case EventKind.ACCEPTED | EventKind.UNBOUND:
                pass

    def _has_timed_out(self, event: Event) -> bool:
        # The number is that of an error of any socket, if there was none of this one;
        # the time is wrong if the loop has been busy.
        waited = self._loop.time() - self._connected_at
        limit = 0.9 * self._settings.timeouts.handshake
        return event.value == errno.EAGAIN or waited > limit

    def _handshake_failed(self, by_task: bool) -> None:
        self._failed += 1
        self._opening.handshake_failed(self._loop.time(), by_task)
        if self._opening.asks_who and not self._dial.is_task:
            self._dial.ask()
        self._loop.call_soon(self._redial)

    def _redial(self) -> None:
        """Tries again later, as nobody has let us in. The socket would do so by itself,
        fifty times a second."""
        if self._outlet is None and self._dial.pump is not None and not self._is_closed:
            self._dial.drop(0)
            self._dial.later()

    def _greet(self) -> None:
        pump = self._dial.pump
        assert pump is not None
        assert self._line is not None
        peer: Peer[Reply] = Peer(
            self.name,
            self._me,
            initiator=True,
            mismatch=partial(mismatch, self._me, expect=self._expect),
            timeouts=self._settings.timeouts,
            limits=self._settings.limits,
            now=self._loop.time(),
            allocate=POOL.allocate,
            channel=channel_of(self._settings, self._me),
            carrier=self._line,
        )
        self._opening.trouble = (
            "something listens there, but it does not greet as a task does"
        )
        self._outlet = Outlet(peer, pump, on_flushed=self._on_flushed)
        self._outlet.flush()
        self._arm(peer.due)

    def _broke(self, outlet: Outlet) -> None:
        if self._outlet is not outlet:
            return
        reason = "its connection broke"
        self._obey(self._outlet.peer.disconnected(reason, self._loop.time()))

    def _received(self, frames: list[zmq.Frame]) -> None:
        outlet = self._outlet
        if outlet is None:
            return
        orders = outlet.peer.received(parts_of(frames, 0), self._loop.time())
        if orders:
            self._obey(orders)
        outlet.flush()

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = due
        self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer, self._armed_for = None, float("inf")
        if self._outlet is not None and self._dial.pump is not None:
            self._dial.pump.drain()  # before a silent task is judged
        outlet = self._outlet
        if outlet is None:
            return
        now = self._loop.time()
        POOL.age(now)
        self._obey(outlet.peer.tick(now))
        outlet.flush()
        if self._outlet is outlet:
            self._arm(outlet.peer.due)

    def _look_after(self) -> None:
        """Says that the task is lost, if its connection has been away for too long."""
        self._watch = None
        reason = self._continuity.tick(self._loop.time())
        if reason is not None:
            self._tell(self._on_lost, PeerLostError(self.name, reason))
        self._watch_out()  # a timer may come a little before its time

    def _watch_out(self) -> None:
        due = self._continuity.due
        if due is not None and self._watch is None:
            self._watch = self._loop.call_at(due, self._look_after)

    def _obey(self, orders: Sequence[Order[Reply]]) -> None:
        for order in orders:
            if type(order) is Answered:  # nearly all are; a match is slower
                future, message = order
                if not future.done():
                    future.set_result(message)
                continue
            match order:
                case Noticed(message):
                    self._tell(self._on_notice, message)
                case Failed(future, error):
                    if not future.done():
                        future.set_exception(error)
                case Opened(hello):
                    self._opened(hello)
                case Closed():
                    self._ended(order)
                case _:  # Greeted, Requested: only an acceptor's peer says these
                    raise AssertionError(order)

    def _opened(self, hello: Hello) -> None:
        self._dial.succeeded()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        reason = self._continuity.opened(hello)
        if reason is not None:
            self._tell(self._on_lost, PeerLostError(self.name, reason))
        self._opening.opened(hello)
        self._tell(self._on_open, hello)

    def _ended(self, closed: Closed) -> None:
        """The connection is over: begin the next one."""
        if self._outlet is not None:
            self._outlet.flush()  # a goodbye with the reason
        self._opening.trouble = closed.reason
        now = self._loop.time()
        self._outlet = None
        self._dial.drop(LINGER)
        # Who is busy now may let us in later.
        if closed.refusal is not None and not isinstance(closed.refusal, BusyError):
            self._opening.refuse(closed.refusal)
        reason = self._continuity.closed(closed.reason, closed.broken, now)
        self._watch_out()
        self._dial.later()
        if reason is not None:
            error = PeerLostError(self.name, reason, closed.left, closed.returns)
            self._tell(self._on_lost, error)

    def _tell(self, callback: Callable[[Argument], None], what: Argument) -> None:
        try:
            callback(what)
        except Exception:  # to the log: one bad callback must not stop the others
            _LOG.exception("%s: a callback failed", self.name)
