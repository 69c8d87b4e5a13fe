"""The socket that a task binds, and the connections of its peers.

A connection is identified by the routing id that libzmq assigned, which is never used
twice; connections whose client chose the id are refused. The task of a connection is a
`Remote`, which survives if the connection breaks and the task reconnects. This file
carries out what `Peer` decides, `Admission` keeps the remotes, and `RequestDispatcher`
passes requests to one handler.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import zmq

from zstrat.errors import ClosedError
from zstrat.wire import Hello, Job, Message
from zstrat.wire.connection import (
    Closed,
    Greeted,
    Noticed,
    Order,
    Peer,
    Requested,
    mismatch,
    task_name,
)

from ._address import bindable, parse
from ._admission import Admission, check_exposure
from ._curve import Authenticator
from ._descriptors import Accepted, allowed
from ._pool import POOL, trim
from ._pump import Outlet, Pump, parts_of
from ._rate_limited_log import RateLimitedLog
from ._remote import (
    IN_ALL,
    Connection,
    Goodbyes,
    Handler,
    Newcomers,
    Remote,
    RequestDispatcher,
)
from ._shared_memory import channel_of
from ._socket import LINGER, ZEROMQ, BoundSocket, Event, EventKind, Sockets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.config import Settings
    from zstrat.wire import ArraySpec, Sink

    from ._curve import Security

Absorber = Callable[["Remote", Message, "Sequence[ArraySpec]"], "Sink | None"]
"""Called with the peer, the message and the array specs of each large request before
its arrays arrive; see `zstrat.wire.connection._body`."""

_LOG: Final = logging.getLogger("zstrat.transport")


def _ignore(remote: Remote, reason: str) -> None:
    pass


class Endpoint:
    """Binds one address and serves every task that connects and greets.

    Args:
        me: The HELLO of this task, with which greetings are answered.
        handler: See `Handler`.
        absorb: See `Absorber`.
        on_lost: Called once for each `Remote` that left, fell silent, was replaced or
            broke the protocol, with the reason.
        security: Keys of this task; without them only this machine may be served.
        on_waited: Called with the start and the end of each time span in which messages
            to a peer had to wait for it.
        sockets: Creates sockets and contexts; a simulation has its own.
    """

    def __init__(
        self,
        me: Hello,
        handler: Handler,
        *,
        settings: Settings,
        absorb: Absorber | None = None,
        on_lost: Callable[[Remote, str], None] = _ignore,
        security: Security | None = None,
        on_waited: Callable[[float, float], None] | None = None,
        sockets: Sockets = ZEROMQ,
    ) -> None:
        self._me, self._settings, self._sockets = me, settings, sockets
        header = min(BRIEF, settings.limits.header)
        # The limits of a stranger's messages, until `_obey` lifts them for an admitted
        # task.
        self._brief = replace(settings.limits, header=header, body=header)
        self._absorber, self._on_waited = absorb, on_waited
        self._security = security
        self._connections: dict[bytes, Connection] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        task = task_name(me)
        self._refusals = RateLimitedLog(_LOG)
        self._admission = Admission(
            task, self._connections, self._ended, self._refused, on_lost, security
        )
        self._dispatcher = RequestDispatcher(task, handler)
        self._newcomers: Newcomers[Accepted] = Newcomers(
            settings.timeouts.handshake,
            random.randrange,
            in_all=min(IN_ALL, allowed() // 4),
        )
        self._impostors = self._probes = 0
        self._gone = 0
        """Number of connections that have ended since unused memory was last given back
        to the system."""
        self._trimmed_at = float("-inf")
        self._pump: Pump | None = None
        self._binding: BoundSocket | None = None
        self._authenticator: Authenticator | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._goodbyes: Goodbyes | None = None

    async def bind(self, address: str) -> str:
        """Binds the address and serves from now on; returns the address that other
        tasks connect to.

        Args:
            address: ``host:port``, ``tcp://host:port`` or ``ipc:///path``; port 0 takes
                any free port.

        Raises:
            ValueError: ``address`` is not an address.
            PermissionDeniedError: Other machines can reach the address, and there are
                neither keys nor ``settings.insecure``.
            OSError: There are too few file descriptors (EMFILE); the address is taken,
                does not belong to this machine, or its name cannot be resolved
                (EADDRNOTAVAIL: that may change); or other users may enter the folder of
                an ipc address.
            ClosedError: The endpoint was bound before, or is closed.

        Cancellation: nothing is bound.
        """
        self._require_new()
        _require_descriptors(task_name(self._me))
        where = await bindable(parse(address), task_name(self._me))
        await check_exposure(where, task_name(self._me), self._security, self._settings)
        # It may have been closed while the name was looked up.
        self._require_new()
        self._loop = asyncio.get_running_loop()
        sockets = self._sockets
        self._context = sockets.context()
        task = task_name(self._me)
        try:
            async with AsyncExitStack() as undo:
                # Last of all: a context waits until its last socket is closed.
                undo.push_async_callback(sockets.end, self._context)
                socket = sockets.socket(
                    self._context, zmq.ROUTER, where, self._settings
                )
                undo.callback(socket.close, linger=0)
                # Before the bind: libzmq keeps no events for a monitor that comes
                # later, and a newcomer that was missed would have no time limit.
                self._monitor = sockets.monitor(socket, _WATCHED, self._happened)
                undo.callback(self._monitor.close)
                if self._security is not None:
                    # Before the bind: libzmq asks it about the first handshake already,
                    # and refuses every peer while nobody answers.
                    self._authenticator = Authenticator(self._context, self._admits)
                    undo.callback(self._authenticator.close)
                self._binding = BoundSocket(socket, where, self._security, task)
                undo.pop_all()
        except zmq.ZMQError as error:
            raise OSError(
                error.errno,
                f"{task} cannot bind {address}: {error.strerror}"
                f"{_BINDING.get(error.errno or 0, '')}",
            ) from error
        self._pump = sockets.pump(socket, self._received, header=1)
        self._timer = self._loop.call_later(self._interval, self._tick)
        return sockets.bound_to(socket).removeprefix("tcp://")

    async def close(
        self, reason: str = "it was shut down", returns: float = 0.0
    ) -> None:
        """Cancels running handlers, says goodbye to all peers, and frees the address.

        Args:
            returns: As in `zstrat.wire.Goodbye`.

        Cancellation: the endpoint is closed all the same.
        """
        pump, self._pump, self._closed = self._pump, None, True
        if pump is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._admission.close()
        try:
            await self._dispatcher.close()
            connections = list(self._connections.values())
            self._connections.clear()
            self._goodbyes = Goodbyes()
            await self._goodbyes.say_to(connections, reason, returns)
        finally:
            # Even if the goodbyes were cancelled: the next process of this task needs
            # the address.
            self._monitor.close()
            if self._binding is not None:
                # While it is bound: later another process may have the path.
                self._binding.remove_file()
            pump.close(LINGER)
            if self._authenticator is not None:
                self._authenticator.close()
            await self._sockets.end(self._context)

    def statistics(self) -> dict[str, object]:
        """Returns counts since the start, and the number of present connections, as
        `zstrat status` shows them."""
        return {
            "remotes": self._admission.names,
            "handlers": len(self._dispatcher),
            "counts": {
                **self._admission.counts,
                "messages": self._dispatcher.messages,
                "refused": self._refusals.count,
                "impostors": self._impostors,
                "newcomers": len(self._newcomers),
                "probes": self._probes,
            },
            "pool": POOL.statistics(),
        }

    def _require_new(self) -> None:
        if self._closed or self._pump is not None:
            raise ClosedError(
                f"{task_name(self._me)}: this endpoint was bound before or is closed: "
                "create another one"
            )

    def _admits(self, key: str) -> bool:
        security = self._security
        if security is None:
            return False
        if security.owner_of(key) is None:
            security.look_again()  # the peer may have new keys before our next tick
        return security.owner_of(key) is not None

    @property
    def _interval(self) -> float:
        return self._settings.timeouts.beat / 2

    def _received(self, frames: list[zmq.Frame]) -> None:
        if self._closed:
            return
        routing = frames[0].bytes
        connection = self._connections.get(routing)
        if connection is None:
            if routing in self._ended:  # what it sent before it was hung up on
                return
            connection = self._stranger(routing, frames)
            if connection is None:
                return
        elif (
            connection.user is not None and frames[-1].get("User-Id") != connection.user
        ):
            # A routing id is a claim of libzmq's peer; the key is proved, and every
            # frame carries it.
            self._impostors += 1
            return
        outlet = connection.outlet
        # For strangers, whose bound is low, at each message; for others at each tick,
        # which saves a system call per message.
        if outlet.peer.incoming is self._brief:
            connection.note_received()
        else:
            connection.has_spoken = True
        for order in outlet.peer.received(parts_of(frames, 1), self._loop.time()):
            self._obey(connection, order)
        outlet.flush()
        # Held messages are handled a few per turn, or other peers would have to wait.
        if outlet.peer.held:
            self._catch_up_soon(connection)

    def _catch_up(self, connection: Connection) -> None:
        """Handles messages of a connection that were held back because its peer did not
        read answers."""
        outlet, left = connection.outlet, _AT_ONCE
        peer, connection.catches_up = outlet.peer, False
        while left > 0 and peer.may_resume:
            left -= 1 + len(peer.held[0][0]) // _LONG_HEADER
            for order in peer.resume():
                self._obey(connection, order)
            outlet.flush()
        if peer.held:
            # Its unread answers are in the way: looks again whenever some have left.
            outlet.on_flushed = partial(self._catch_up_soon, connection)
            if peer.may_resume:
                self._catch_up_soon(connection)

    def _catch_up_soon(self, connection: Connection) -> None:
        connection.outlet.on_flushed = None
        if not connection.catches_up:
            connection.catches_up = True
            self._loop.call_soon(self._catch_up, connection)

    def _stranger(self, routing: bytes, frames: list[zmq.Frame]) -> Connection | None:
        """Creates the `Connection` of a peer whose first message has come; its `Peer`
        checks the message. Returns None if the connection is refused without reading
        the message."""
        # A client that chooses its id could take over the id of another connection.
        if len(frames) < 2 or len(routing) != 5 or routing[0] != 0:
            self._refused("it sent an empty message, or chose its own routing id")
            return None
        assert self._pump is not None
        # Connections that broke before this HELLO was sent must be known as broken
        # before it is checked: the HELLO may be of the task that had one of them.
        self._monitor.drain()
        try:
            # libzmq reports this number with the end of the connection, too, which is
            # how the two are matched.
            descriptor = int(frames[1].get("__fd"))
            user = str(frames[1].get("User-Id")) if self._security is not None else None
        except zmq.ZMQError:  # it does not speak ZMTP 3, so it is not a zstrat task
            self._refused("it speaks another version of ZeroMQ's protocol than 3")
            return None
        line = self._sockets.accepted(descriptor)
        peer: Peer[None] = Peer(
            "a stranger",
            self._me,
            initiator=False,
            mismatch=partial(mismatch, self._me),
            timeouts=self._settings.timeouts,
            limits=self._settings.limits,
            now=self._loop.time(),
            allocate=POOL.allocate,
            channel=channel_of(self._settings, self._me),
            absorb=partial(self._absorb, routing),
            carrier=line,
        )
        peer.incoming = self._brief
        outlet = Outlet(peer, self._pump, (routing,), on_waited=self._on_waited)
        connection = Connection(routing, outlet, line, user)
        self._connections[routing] = connection
        return connection

    def _happened(self, event: Event) -> None:
        now = self._loop.time()
        match event.kind:
            case EventKind.ACCEPTED:
                line = self._sockets.accepted(event.value)
                crowded = self._newcomers.came(event.value, line, line.address, now)
                if crowded is not None:
                    self._refused(
                        "too many connections wait, and this one did not greet"
                    )
                    crowded.hang_up()
            case EventKind.UNBOUND:
                if self._binding is not None:
                    self._binding.freed()
            case EventKind.BROKEN:
                self._gone += 1
                self._newcomers.gone(event.value)
                if self._goodbyes is not None:
                    self._goodbyes.gone(event.value)
                for connection in self._connections.values():
                    if connection.accepted.descriptor == event.value:
                        connection.outlet.peer.disconnected("", now)
            case EventKind.FAILED:
                # A load balancer or a cluster engine probes the port.
                self._probes += 1
            case _:
                self._refused(_WITHOUT if self._security is None else _WITH)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._tick)
        if self._authenticator is not None:
            self._authenticator.revive()
        if self._binding is not None:
            self._binding.tick()
        if self._pump is not None:
            self._pump.drain()  # before silent peers are judged
        now = self._loop.time()
        POOL.age(now)
        # libzmq gives up peers that do not speak its protocol. These may speak it, but
        # have not said HELLO.
        for line in self._newcomers.late(now):
            self._refused("it did not greet")
            line.hang_up()
        for line in self._endless():
            self._refused("it sends a message without an end")
            line.hang_up()
            # A single one may have filled as much of the heap as a crowd.
            self._gone = _CROWD
        if self._gone >= _CROWD and self._trimmed_at + _FREED <= now:
            # libzmq takes some 40 KB for each connection, in pieces all over its heap.
            self._gone, self._trimmed_at = 0, now
            self._loop.call_later(_FREED, trim)
        # A copy: an order may end a connection.
        for connection in list(self._connections.values()):
            for order in connection.outlet.peer.tick(now):
                self._obey(connection, order)
            connection.outlet.flush()
            # A send has failed because the peer is gone; libzmq's event may come later.
            if connection.outlet.is_gone:
                connection.outlet.peer.disconnected("", now)

    def _refused(self, reason: str) -> None:
        """Counts a refused connection, and logs the reason, at most one line in some
        seconds."""
        text = "%s refused a connection: %s"
        self._refusals.write(logging.WARNING, text, task_name(self._me), reason)

    def _endless(self) -> list[Accepted]:
        """Returns connections whose unfinished message is already longer than any valid
        one.

        libzmq keeps the parts of a message until the last one has come, so such a
        connection could fill the memory.
        """
        limits, brief = self._settings.limits, self._brief
        usual = _BODIES_UNREAD * limits.window * limits.chunk
        endless = [
            line
            for line in self._newcomers.lines
            if line.carried().received > UNFINISHED
        ]
        for connection in self._connections.values():
            is_brief = connection.outlet.peer.incoming is brief
            if connection.unfinished() > (UNFINISHED if is_brief else usual):
                endless.append(connection.accepted)
        return endless

    def _obey(self, connection: Connection, order: Order[None]) -> None:
        match order:
            case Requested(number, message, sink):
                self._dispatcher.dispatch(connection, number, message, sink)
            case Noticed(message):
                self._dispatcher.dispatch(connection, None, message)
            case Greeted(hello):
                self._admission.greet(connection, hello, self._loop.time())
                # None: the task was refused, and keeps the limits of a stranger until
                # it has gone.
                if connection.remote is not None:
                    self._newcomers.gone(connection.accepted.descriptor)
                    if connection.remote.role is not Job.OBSERVER:
                        connection.outlet.peer.incoming = self._settings.limits
            case Closed(reason=reason):
                self._admission.forget(connection, reason)
            case _:  # Opened, Answered, Failed: only the initiator's peer has these
                raise AssertionError(order)

    def _absorb(
        self, routing: bytes, message: Message, specs: Sequence[ArraySpec]
    ) -> Sink | None:
        connection = self._connections.get(routing)
        if self._absorber is None or connection is None or connection.remote is None:
            return None
        return self._absorber(connection.remote, message, specs)


BRIEF: Final = 8 * 1024
"""Most bytes of a header, and of a body, from a peer that has not greeted or is an
observer. These peers need no long messages, and a long header blocks the loop for tens
of milliseconds, while a body takes memory."""

UNFINISHED: Final = 16 * 2**20
"""Most bytes of an unfinished message from a peer that has not greeted or is an
observer. Many times `BRIEF`, because the count includes whole messages that were not
read yet."""

_BODIES_UNREAD: Final = 16
"""Most bytes of an unfinished message from any other peer, as a multiple of the window
of chunks (bytes that a peer may send unacknowledged). No message is longer than a
chunk, but that many windows may arrive unread while the loop is busy."""

_FREED: Final = 1.0
"""Seconds after which libzmq has freed what it kept of a connection that ended."""

_CROWD: Final = 64
"""Number of ended connections after which it pays to return memory to the system."""

_AT_ONCE: Final = 64
"""Most held-back messages of a connection that are handled in one turn of the loop.
Each `_LONG_HEADER` bytes of a header count as one more message, because decoding them
takes time."""

_LONG_HEADER: Final = 4096

LEAST_DESCRIPTORS: Final = 64
"""Fewest file descriptors that a task needs: it has about 25 itself, and each peer
takes some. With fewer, libzmq aborts the process, or never reads from peers that
connect."""


def _require_descriptors(task: str) -> None:
    if allowed() < LEAST_DESCRIPTORS:
        raise OSError(
            errno.EMFILE,
            f"{task}: this process may open {allowed()} files, expected at least "
            f"{LEAST_DESCRIPTORS}: raise `ulimit -n`",
        )


_BINDING: Final = {
    errno.EADDRINUSE: ": stop the process that uses it, or choose another port",
    errno.EADDRNOTAVAIL: ": it is not an address of this machine, or not yet",
}

_WITH: Final = (
    "its handshake failed: it has no keys or those of another cluster, or is not zstrat"
)
_WITHOUT: Final = (
    "its handshake failed: it has keys and this task has none, or it is not zstrat"
)

_WATCHED: Final = (
    EventKind.ACCEPTED,
    EventKind.BROKEN,
    EventKind.FAILED,
    EventKind.MISMATCHED,
    EventKind.UNAUTHORISED,
    EventKind.UNBOUND,
)
