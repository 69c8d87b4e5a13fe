"""The link from this process to one task: connects, greets, and reconnects until
closed.

One socket is one connection (`_opening`), so that messages of an old connection cannot
mix with those of a new one. `Peer` decides about a connection and `Continuity` about
its task; this file carries out what they decide.
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
from ._opening import Continuity, Dial, Opening, copied_error
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
"""Seconds after the end of a connection in which messages that came before the end can
still be read."""

Reply = asyncio.Future[Message]

_OPEN: Final = OrderState.OPEN

Argument = TypeVar("Argument")


def _ignore(_: object) -> None:
    pass


class TaskLink(Protocol):
    """The methods of `Link` that its users need; `zstrat.testing.FakeLink` has them,
    too."""

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
    @property
    def shares_memory(self) -> bool: ...
    def start(self) -> None: ...
    async def wait_open(self, deadline: float) -> Hello: ...
    def submit(self, message: Message, *, deadline: float | None = None) -> Reply: ...
    def notify(self, message: Message) -> None: ...
    async def close(self, reason: str = ...) -> None: ...


class MakeTaskLink(Protocol):
    """Creates the link to one task, not yet started. For example
    ``functools.partial(Link, ...)`` with all other arguments."""

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
    """Connects a DEALER to one task, greets, sends requests, and reconnects until
    closed. All methods must be called on its loop's thread.

    Args:
        address: Where the task listens, as `Endpoint.bind` returned it.
        me: The HELLO with which this process greets.
        name: What errors call the task: ``/job:ps/task:0``.
        on_notice: Called with every notice of the task, in order.
        on_open: Called after every greeting. Messages that were in flight before it,
            including notices, may be lost even if the incarnation in the HELLO is the
            same.
        on_lost: Called once per loss: silence, a goodbye, a new incarnation, or a
            broken connection that did not come back within ``timeouts.reconnect``.
        on_flushed: Called when messages have left or may leave, so that `backlog` may
            be smaller.
        security: Keys of this process. Needs ``expect``, to know which key the task
            must have.
        expect: Job and index of the task; an index of None accepts any.
        sockets: Creates sockets and contexts; a simulation has its own.
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
            raise ValueError(f"address {address!r}: expected a port above 0")
        # Without the number the task could not tell a second link of this process from
        # one that reconnects, whose old connection it ends.
        self._me = replace(me, link=next(_NUMBERS))
        self._settings, self._security, self._expect = settings, security, expect
        self._idle_timeout = settings.timeouts.request
        self._on_notice, self._on_open, self._on_lost = on_notice, on_open, on_lost
        self._on_flushed = on_flushed
        if security is not None and expect is None:
            raise ValueError(
                f"{name}: a link with keys needs expect=(job, index), to know "
                "which key the task must have"
            )
        self._continuity = Continuity(settings.timeouts.reconnect)
        self._outlet: Outlet | None = None
        self._opening = Opening(self._target)
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._armed_for = float("inf")
        self._connected_at = 0.0
        self._line: Accepted | None = None
        """The latest connection to the task."""
        self._failed = 0
        """Number of failed handshakes so far: the next handshake may try another key of
        the task."""
        self._is_started = self._is_closed = False
        self.is_refused = False
        """Whether the last attempt to connect failed at once because nothing listens at
        the address."""

    def start(self) -> None:
        """Starts to connect to the task, and reconnects after each loss until
        `close`."""
        if self._is_started or self._is_closed:
            raise ClosedError(
                f"the link to {self.name} was started before or is closed: create "
                "another one"
            )
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
        """Whether the link is open, its connection is intact, and a message has come
        within the last two heartbeats."""
        return self._outlet is not None and self._outlet.peer.is_heard

    @property
    def trouble(self) -> str:
        """Why the link is not open, as far as known."""
        return self._opening.trouble

    @property
    def peer(self) -> Hello | None:
        """HELLO of the task, while the link is open."""
        return self._outlet.peer.hello if self._outlet and self.is_open else None

    @property
    def shares_memory(self) -> bool:
        """Whether the link is open, and sends large bodies through memory that both
        processes share. For any thread."""
        hello = self.peer
        allowed = self._settings.transport in ("auto", "shm")
        return allowed and hello is not None and hello.host == self._me.host

    async def wait_open(self, deadline: float) -> Hello:
        """Waits until the task has greeted.

        Args:
            deadline: Loop time.

        Raises:
            DeadlineExceededError: The task did not greet in time; the error names
                the address of the task.
            VersionMismatchError, ProtocolError: One side refused the other.
            PermissionDeniedError: The task refuses the key of this process.
            ClosedError: The link was closed.
        """
        self._check_usable()
        if self._outlet is not None and self.is_open:
            assert self._outlet.peer.hello is not None
            return self._outlet.peer.hello
        return await self._opening.wait(deadline)

    def submit(self, message: Message, *, deadline: float | None = None) -> Reply:
        """Sends a request and returns a future, which gets exactly one outcome.

        The outcome is the answer, the error that the task raised, `PeerLostError` (the
        request may or may not have run), or `DeadlineExceededError`. Cancelling the
        future drops the answer, but does not stop the request.

        Args:
            deadline: Loop time, regardless of progress. None: ``timeouts.request``
                after the last progress of the bodies that the request waits for.

        Raises:
            TypeError, ValueError: The message is invalid.
            BusyError: Too many requests are open.
            ClosedError: The link was closed.
        """
        # Not `is_open`: this runs for every request, and a property costs a call.
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
        # Most deadlines are later than the timer's, which is set again when it fires.
        if deadline < self._armed_for:
            self._arm(outlet.peer.due)
        return future

    async def request(
        self, message: Message, *, deadline: float | None = None
    ) -> Message:
        """Sends a request and returns its answer; see `submit`.

        Cancellation: drops the answer; the request may still run.
        """
        return await self.submit(message, deadline=deadline)

    def notify(self, message: Message) -> None:
        """Sends a notice, a message without an answer. It is lost only if the
        connection is lost.

        Raises:
            PeerLostError: The task is not connected.
            BusyError: The task does not read, and too many messages wait for it.
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
        """Number of messages that wait to be sent; 0 while the link is not open."""
        outlet = self._outlet
        return 0 if outlet is None else len(outlet.peer.outbox)

    async def close(self, reason: str = "it closed the link") -> None:
        """Says goodbye to the task and closes the link; open requests and waiting
        callers fail with `ClosedError`.

        Cancellation: the link is closed all the same.
        """
        if self._is_closed:
            return
        # First: `_redial` may be scheduled, and must find the link closed.
        self._is_closed = True
        error = ClosedError(f"the link to {self.name} was closed")
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        if self._outlet is not None:
            # Only its failures: `on_lost` is not for an end that the owner of the link
            # wants.
            for order in self._outlet.peer.leave(reason):
                if isinstance(order, Failed) and not order.token.done():
                    order.token.set_exception(copied_error(error))
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
                    # libzmq reconnected by itself before it reported the break.
                    self._broke(self._outlet)
            case EventKind.BROKEN:
                # Reported before the last message can be read, which may be a goodbye.
                if self._outlet is not None:
                    self._loop.call_later(_LAST_READ_SECONDS, self._broke, self._outlet)
            case EventKind.UNAUTHORISED:
                assert self._security is not None
                self._opening.refuse(self._security.denied(self._target))
                # Not from here: `_redial` closes the monitor that calls.
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
                # The name may have IPv6 addresses alone: this socket did not look for
                # them.
                self._dial.look_up(self._redial, self._opening.looked_up)
            case EventKind.CONNECTED:
                self._line = self._sockets.accepted(event.value)
                self._connected_at = self._loop.time()
                self._opening.connected()
            case EventKind.ACCEPTED | EventKind.UNBOUND:
                pass

    def _has_timed_out(self, event: Event) -> bool:
        # Either sign alone may be wrong: the error number is that of any socket if this
        # one had no error, and the time is too long if the loop was busy.
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
        """Drops the socket after a failed handshake, and opens another one after a
        pause. The old socket would retry by itself, fifty times a second."""
        if self._outlet is None and self._dial.pump is not None and not self._is_closed:
            self._dial.drop(0)
            self._dial.later()

    def _greet(self) -> None:
        pump = self._dial.pump
        assert pump is not None
        assert self._line is not None
        # One for each connection: numbers, order and credits begin again with it.
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
            "something listens there, but it does not greet as a zstrat task"
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

    def _check_reconnect(self) -> None:
        """Reports the task as lost if it did not reconnect within
        ``timeouts.reconnect``."""
        self._watch = None
        reason = self._continuity.tick(self._loop.time())
        if reason is not None:
            self._call(self._on_lost, PeerLostError(self.name, reason))
        self._watch_reconnect()  # a timer may fire slightly early

    def _watch_reconnect(self) -> None:
        due = self._continuity.due
        if due is not None and self._watch is None:
            self._watch = self._loop.call_at(due, self._check_reconnect)

    def _obey(self, orders: Sequence[Order[Reply]]) -> None:
        for order in orders:
            if type(order) is Answered:  # most orders are, and a match is slower
                future, message = order
                if not future.done():
                    future.set_result(message)
                continue
            match order:
                case Noticed(message):
                    self._call(self._on_notice, message)
                case Failed(future, error):
                    if not future.done():
                        future.set_exception(error)
                case Opened(hello):
                    self._opened(hello)
                case Closed():
                    self._ended(order)
                case _:  # Greeted, Requested: only the acceptor's peer has these
                    raise AssertionError(order)

    def _opened(self, hello: Hello) -> None:
        self._dial.succeeded()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        # The loss of the old process is reported before the new one is.
        reason = self._continuity.opened(hello)
        if reason is not None:
            self._call(self._on_lost, PeerLostError(self.name, reason))
        self._opening.opened(hello)
        # Last: the callback may send requests.
        self._call(self._on_open, hello)

    def _ended(self, closed: Closed) -> None:
        """Drops an ended connection, and dials the next one after a pause."""
        if self._outlet is not None:
            self._outlet.flush()  # a goodbye with the reason
        self._opening.trouble = closed.reason
        now = self._loop.time()
        self._outlet = None
        self._dial.drop(LINGER)
        # A task that is busy now may admit us later.
        if closed.refusal is not None and not isinstance(closed.refusal, BusyError):
            self._opening.refuse(closed.refusal)
        reason = self._continuity.closed(closed.reason, closed.broken, now)
        self._watch_reconnect()
        self._dial.later()
        # Last: the callback may close this link.
        if reason is not None:
            error = PeerLostError(self.name, reason, closed.left, closed.returns)
            self._call(self._on_lost, error)

    def _call(self, callback: Callable[[Argument], None], what: Argument) -> None:
        try:
            callback(what)
        except Exception:  # to the log: one bad callback must not stop the others
            _LOG.exception("%s: a callback failed", self.name)
