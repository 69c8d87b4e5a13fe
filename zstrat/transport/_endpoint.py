"""The socket that a task binds, and the peers that are connected to it.

A connection is known by the routing id that libzmq gave it, which is never used twice;
ids that a client chose itself are refused. Behind it stands the `Remote`, which
survives a connection that breaks and comes back. This file carries out what `Peer` and
`Roster` decide, and hands requests to one handler.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, get_args

import zmq

from zstrat.config import Settings
from zstrat.errors import (
    CancelledError,
    ClosedError,
    PeerLostError,
    PermissionDeniedError,
    ZstratError,
)
from zstrat.wire import Done, Hello, Job, Message
from zstrat.wire._greeting import described, mismatch, task_name
from zstrat.wire._peer import (
    Closed,
    Greeted,
    Noticed,
    Order,
    Peer,
    Requested,
    State,
    failure,
)

from ._address import Address, check_directory, is_local, parse
from ._curve import Security
from ._monitor import Event, Happening, Monitor
from ._pool import Pool
from ._pump import Outlet, Pump
from ._roster import Identity, Roster, identity_of
from ._socket import LINGER, end_context, new_context, new_socket

Handler = Callable[["Remote", Message], Message | Awaitable[Message] | None]
"""Called on the loop for every request and notice. What it returns or raises is the
outcome of the request; None stands for `Done`. Of a notice nothing is returned."""

_MESSAGES: Final = frozenset(get_args(Message))
_LOG: Final = logging.getLogger("zstrat.transport")
_COMPLAINTS: Final = 10.0
"""Seconds between two log lines about strangers, however many they are."""


class Remote:
    """A task connected to an `Endpoint`. Lives until it is lost, once.

    ``role`` is what its key says where keys are used, else what it claims.
    """

    __slots__ = ("_connection", "alive", "hello", "name", "role")

    def __init__(self, hello: Hello, role: Job, connection: _Connection) -> None:
        self.name, self.hello, self.role = task_name(hello), hello, role
        self.alive = True
        self._connection = connection

    def notify(self, message: Message) -> None:
        """Queues a notice. Notices may be lost with the connection, none by itself.

        Raises:
            PeerLostError: It is gone.
            BusyError: It does not read, and too many wait for it.
        """
        peer = self._connection.outlet.peer
        if not self.alive or peer.state is not State.OPEN:
            raise PeerLostError(described(self.hello), "it is not connected")
        peer.notify(message)
        self._connection.outlet.flush()

    def __repr__(self) -> str:
        return f"<Remote {described(self.hello)}{'' if self.alive else ' lost'}>"


class _Connection:
    __slots__ = ("descriptor", "outlet", "remote", "routing", "user")

    def __init__(
        self, routing: bytes, outlet: Outlet, descriptor: int, user: str | None
    ) -> None:
        self.routing, self.outlet = routing, outlet
        self.descriptor, self.user = descriptor, user
        self.remote: Remote | None = None


def _ignore(remote: Remote, reason: str) -> None:
    pass


class Endpoint:
    """Binds one address and serves every task that greets there.

    Args:
        me: The HELLO of this task.
        handler: See `Handler`.
        on_lost: Called once for each `Remote` that left, fell silent, was replaced or
            broke the protocol, with the reason.
        security: Keys of this task; without them only this machine may be served.
    """

    def __init__(
        self,
        me: Hello,
        handler: Handler,
        *,
        settings: Settings,
        on_lost: Callable[[Remote, str], None] = _ignore,
        security: Security | None = None,
    ) -> None:
        self._me, self._handler, self._settings = me, handler, settings
        self._on_lost, self._security = on_lost, security
        self._connections: dict[bytes, _Connection] = {}
        self._remotes: dict[Identity, Remote] = {}
        self._roster, self._pool = Roster(), Pool()
        self._tasks: set[asyncio.Task[Message]] = set()
        self._counts: Counter[str] = Counter()
        self._complained_at = -_COMPLAINTS
        self._pump: Pump | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def bind(self, address: str) -> str:
        """Binds and serves from now on; returns the address that others connect to.

        Args:
            address: ``host:port``, ``tcp://host:port`` or ``ipc:///path``; port 0 takes
                any free one.

        Raises:
            ValueError: It is no address.
            PermissionDeniedError: It can be reached from other machines, and there are
                neither keys nor ``settings.insecure``; or the ipc directory is open.
            OSError: The address is taken or not one of this machine's.
        """
        if self._closed or self._pump is not None:
            raise ClosedError(f"{task_name(self._me)}: bind an endpoint once")
        where = parse(address)
        await self._check_exposure(where)
        self._loop = asyncio.get_running_loop()
        self._context = new_context()
        socket = new_socket(self._context, zmq.ROUTER, where, self._settings)
        try:
            if self._security is not None:
                self._security.arm_server(socket)
            socket.bind(where.endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            await end_context(self._context)
            raise OSError(
                error.errno,
                f"{task_name(self._me)} cannot bind {address}: {error.strerror}: "
                "another process has this address, or it is not this machine's",
            ) from error
        self._monitor = Monitor(socket, _WATCHED, self._happened)
        self._pump = Pump(socket, self._received)
        self._timer = self._loop.call_later(self._interval, self._tick)
        bound = socket.last_endpoint.decode()
        return bound.removeprefix("tcp://")

    async def close(self, reason: str = "it was shut down") -> None:
        """Says goodbye to all, cancels handlers that still run, frees the address.

        Cancellation: the endpoint is closed all the same.
        """
        self._closed = True
        if self._pump is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._connections.values()):
            connection.outlet.peer.leave(reason)
            connection.outlet.flush()
        self._connections.clear()
        for remote in self._remotes.values():
            remote.alive = False
        self._remotes.clear()
        self._monitor.close()
        self._pump.close(LINGER)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._security is not None:
            self._security.close()
        await end_context(self._context)

    def statistics(self) -> dict[str, object]:
        """Counts since the start, and what is connected now."""
        return {
            "remotes": [remote.name for remote in self._remotes.values()],
            "handlers": len(self._tasks),
            "counts": dict(self._counts),
            "pool": self._pool.statistics(),
        }

    async def _check_exposure(self, address: Address) -> None:
        if address.scheme == "ipc":
            check_directory(address)
        elif (
            self._security is None
            and not self._settings.insecure
            and not await is_local(address)
        ):
            raise PermissionDeniedError(
                f"{task_name(self._me)} will not bind {address.host}:{address.port}: "
                "other machines can reach it, it has no keys, and whoever reaches it may "
                "run code here. Make keys with `zstrat keygen DIR` and pass --keys DIR "
                "(ZSTRAT_KEYS), bind 127.0.0.1, or say --insecure on a network that only "
                "you use"
            )

    @property
    def _interval(self) -> float:
        return self._settings.timeouts.beat / 2

    # ---- what arrives -----------------------------------------------------------

    def _received(self, frames: list[zmq.Frame]) -> None:
        routing = frames[0].bytes
        connection = self._connections.get(routing)
        if connection is None:
            connection = self._stranger(routing, frames)
            if connection is None:
                return
        elif (
            connection.user is not None and frames[-1].get("User-Id") != connection.user
        ):
            self._counts["impostors"] += 1
            return
        peer = connection.outlet.peer
        parts = [frames[1].bytes, *[frame.buffer for frame in frames[2:]]]
        for order in peer.received(parts, self._loop.time()):
            self._obey(connection, order)
        connection.outlet.flush()

    def _stranger(self, routing: bytes, frames: list[zmq.Frame]) -> _Connection | None:
        """A connection for whoever wrote for the first time; what it says, `Peer` judges."""
        # A client that chose its own id could come back as somebody else's.
        if len(frames) < 2 or len(routing) != 5 or routing[0] != 0:
            self._complain("it chose its own routing id, or sent an empty message")
            return None
        assert self._pump is not None
        # What broke before this HELLO was sent must be known before it is judged.
        self._monitor.drain()
        peer: Peer[None] = Peer(
            "a stranger",
            self._me,
            initiator=False,
            judge=partial(mismatch, self._me),
            timeouts=self._settings.timeouts,
            limits=self._settings.limits,
            now=self._loop.time(),
            allocate=self._pool.allocate,
        )
        head = frames[1]
        user = None if self._security is None else str(head.get("User-Id"))
        descriptor = int(head.get("__fd"))
        outlet = Outlet(peer, self._pump, (routing,))
        connection = _Connection(routing, outlet, descriptor, user)
        self._connections[routing] = connection
        return connection

    def _happened(self, event: Event) -> None:
        match event.happening:
            case Happening.BROKEN:
                now = self._loop.time()
                for connection in self._connections.values():
                    if connection.descriptor == event.value:
                        connection.outlet.peer.disconnected("", now)
            case _:
                self._complain(f"handshake: {event.happening.name.lower()}")

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._tick)
        now = self._loop.time()
        for connection in list(self._connections.values()):
            for order in connection.outlet.peer.tick(now):
                self._obey(connection, order)
            connection.outlet.flush()
            if connection.outlet.is_gone:
                connection.outlet.peer.disconnected("", now)

    def _complain(self, reason: str) -> None:
        """Counts what was refused; logs no more often than a person can read."""
        self._counts["refused"] += 1
        now = self._loop.time()
        if now - self._complained_at >= _COMPLAINTS:
            self._complained_at = now
            _LOG.warning(
                "%s refused a connection: %s (%d so far)",
                task_name(self._me),
                reason,
                self._counts["refused"],
            )

    # ---- what Peer and Roster decided ---------------------------------------------

    def _obey(self, connection: _Connection, order: Order[None]) -> None:
        match order:
            case Requested(number, message):
                self._serve(connection, number, message)
            case Noticed(message):
                self._serve(connection, None, message)
            case Greeted(hello):
                self._greet(connection, hello)
            case Closed(reason=reason):
                self._forget(connection, reason)
            case _:  # Opened, Answered, Failed: only an initiator's peer says these
                raise AssertionError(order)

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        peer = connection.outlet.peer
        role, error = self._role(connection, hello)
        verdict = self._roster.admit(hello) if error is None else None
        if verdict is not None:
            for identity in verdict.replaced:
                self._replace(identity, hello)
            error = verdict.refusal
        if error is not None:
            for order in peer.refuse(error):
                self._obey(connection, order)
            return
        identity = identity_of(hello)
        remote = self._remotes.get(identity)
        if remote is None:
            remote = self._remotes[identity] = Remote(hello, role, connection)
        else:  # it came back before it was lost
            old = remote._connection
            self._connections.pop(old.routing, None)
            old.outlet.peer.leave("it has a newer connection")
            old.outlet.flush()
            remote._connection = connection
        connection.remote = remote
        self._counts["greetings"] += 1
        peer.accept(hello, self._loop.time())

    def _role(
        self, connection: _Connection, hello: Hello
    ) -> tuple[Job, ZstratError | None]:
        job = Job(hello.job)
        if self._security is None or connection.user is None:
            return job, None
        role = self._security.role_of(connection.user)
        if job is role or job is Job.OBSERVER:  # any key may ask to only look
            return job, None
        return role, PermissionDeniedError(
            f"{described(hello)} has the key of the role {role}: it cannot join as {job}"
        )

    def _replace(self, identity: Identity, winner: Hello) -> None:
        remote = self._remotes.get(identity)
        if remote is not None:
            reason = f"it was replaced by a newer process: {described(winner)}"
            connection = remote._connection
            for order in connection.outlet.peer.leave(reason):
                self._obey(connection, order)

    def _forget(self, connection: _Connection, reason: str) -> None:
        connection.outlet.flush()
        self._connections.pop(connection.routing, None)
        remote = connection.remote
        if remote is None:
            self._complain(reason)
            return
        connection.remote = None
        remote.alive = False
        identity = identity_of(remote.hello)
        self._roster.leave(identity)
        self._remotes.pop(identity, None)
        self._counts["lost"] += 1
        self._on_lost(remote, reason)

    # ---- requests -----------------------------------------------------------------

    def _serve(
        self, connection: _Connection, number: int | None, message: Message
    ) -> None:
        remote = connection.remote
        assert remote is not None
        self._counts["messages"] += 1
        try:
            result = self._handler(remote, message)
        except Exception as error:  # goes to the caller, who is to blame more often
            self._fail(connection, number, error)
            return
        if type(result) in _MESSAGES or result is None:
            if number is not None:
                connection.outlet.peer.reply(number, result or Done())  # type: ignore[arg-type]
        elif isinstance(result, asyncio.Future):
            result.add_done_callback(partial(self._finished, connection, number))
        elif inspect.isawaitable(result):
            task = self._loop.create_task(
                _outcome(result), name=f"{type(message).__name__} of {remote.name}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(self._finished, connection, number))
        else:
            wrong = TypeError(
                f"the handler returned {type(result).__name__}: no message"
            )
            self._fail(connection, number, wrong)

    def _finished(
        self,
        connection: _Connection,
        number: int | None,
        future: asyncio.Future[Message],
    ) -> None:
        if future.cancelled():
            error: BaseException | None = CancelledError(
                "the task cancelled the request"
            )
        else:
            error = future.exception()
        if error is not None:
            self._fail(connection, number, error)
        elif number is not None:
            connection.outlet.peer.reply(number, future.result() or Done())
        if not self._closed:
            connection.outlet.flush()

    def _fail(
        self, connection: _Connection, number: int | None, error: BaseException
    ) -> None:
        if number is not None:
            connection.outlet.peer.reply(number, failure(error))
            return
        assert connection.remote is not None
        _LOG.error(
            "%s: a notice of %s failed",
            task_name(self._me),
            connection.remote.name,
            exc_info=error,
        )


async def _outcome(result: Awaitable[Message]) -> Message:
    return await result


_WATCHED: Final = (
    Happening.BROKEN,
    Happening.FAILED,
    Happening.MISMATCHED,
    Happening.UNAUTHORISED,
)
