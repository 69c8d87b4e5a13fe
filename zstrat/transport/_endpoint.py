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
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, cast, get_args

import zmq

from zstrat.errors import (
    CancelledError,
    ClosedError,
    PermissionDeniedError,
    ZstratError,
)
from zstrat.wire import Done, Hello, Job, Message
from zstrat.wire._greeting import described, mismatch, task_name
from zstrat.wire._orders import Closed, Greeted, Noticed, Order, Requested
from zstrat.wire._peer import Peer, failure

from ._address import (
    Address,
    SocketFile,
    check_directory,
    check_unused,
    is_local,
    parse,
    socket_file,
)
from ._monitor import Event, Happening, Monitor
from ._pool import POOL
from ._pump import Outlet, Pump, parts_of
from ._remote import Connection, Remote
from ._roster import Identity, Roster, identity_of
from ._shared import lane_of
from ._socket import LINGER, bound_to, end_context, new_context, new_socket
from ._zap import Authenticator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.config import Settings
    from zstrat.wire import ArraySpec, Sink

    from ._curve import Security

Handler = Callable[["Remote", Message], Message | Awaitable[Message] | None]
"""Called on the loop for every request and notice. What it returns or raises is the
outcome of the request; None stands for `Done`. Of a notice nothing is returned."""

Absorber = Callable[["Remote", Message, "Sequence[ArraySpec]"], "Sink | None"]
"""Called at the header of each large request: see `zstrat.wire._sink.Absorb`."""

_MESSAGES: Final = frozenset(get_args(Message))
_LOG: Final = logging.getLogger("zstrat.transport")
_COMPLAINTS: Final = 10.0
"""Seconds between two log lines about strangers, however many they are."""


def _ignore(remote: Remote, reason: str) -> None:
    pass


class Endpoint:
    """Binds one address and serves every task that greets there.

    Args:
        me: The HELLO of this task.
        handler: See `Handler`.
        absorb: See `Absorber`.
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
        absorb: Absorber | None = None,
        on_lost: Callable[[Remote, str], None] = _ignore,
        security: Security | None = None,
    ) -> None:
        self._me, self._handler, self._settings = me, handler, settings
        self._absorber = absorb
        self._on_lost, self._security = on_lost, security
        self._connections: dict[bytes, Connection] = {}
        self._remotes: dict[Identity, Remote] = {}
        self._roster = Roster()
        self._tasks: set[asyncio.Task[Message]] = set()
        self._counts: Counter[str] = Counter()
        self._complained_at = -_COMPLAINTS
        self._pump: Pump | None = None
        self._file: SocketFile | None = None
        self._authenticator: Authenticator | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._parting: set[int] = set()
        self._parted = asyncio.Event()

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
                self._authenticator = Authenticator(self._context, self._admits)
                self._security.arm_server(socket)
            socket.bind(where.endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            if self._authenticator is not None:
                self._authenticator.close()
            await end_context(self._context)
            raise OSError(
                error.errno,
                f"{task_name(self._me)} cannot bind {address}: {error.strerror}: "
                "another process has this address, or it is not this machine's",
            ) from error
        self._monitor = Monitor(socket, _WATCHED, self._happened)
        self._file = socket_file(where)
        self._pump = Pump(socket, self._received)
        self._timer = self._loop.call_later(self._interval, self._tick)
        return bound_to(socket).removeprefix("tcp://")

    async def close(self, reason: str = "it was shut down") -> None:
        """Says goodbye to all, cancels handlers that still run, frees the address.

        Cancellation: the endpoint is closed all the same.
        """
        pump, self._pump, self._closed = self._pump, None, True
        if pump is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for remote in self._remotes.values():
            remote.alive = False
        self._remotes.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._part(reason)
        finally:
            self._monitor.close()
            if self._file is not None:
                self._file.remove()  # while it is bound nobody else takes the path
            pump.close(LINGER)
            if self._authenticator is not None:
                self._authenticator.close()
        await end_context(self._context)

    async def _part(self, reason: str) -> None:
        """Says goodbye, and waits until the peers have hung up: a socket that is closed
        with unread data resets its connection, and the goodbye may be lost with it."""
        connections = list(self._connections.values())
        self._connections.clear()
        self._parting = {connection.descriptor for connection in connections}
        for connection in connections:
            connection.outlet.peer.leave(reason)
            connection.outlet.flush()
        if connections:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    await self._parted.wait()

    def statistics(self) -> dict[str, object]:
        """Counts since the start, and what is connected now."""
        return {
            "remotes": [remote.name for remote in self._remotes.values()],
            "handlers": len(self._tasks),
            "counts": dict(self._counts),
            "pool": POOL.statistics(),
        }

    async def _check_exposure(self, address: Address) -> None:
        if address.scheme == "ipc":
            check_directory(address)
            check_unused(address)
        elif (
            self._security is None
            and not self._settings.insecure
            and not await is_local(address)
        ):
            raise PermissionDeniedError(
                f"{task_name(self._me)} will not bind {address.host}:{address.port}: "
                "other machines can reach it, it has no keys, and whoever reaches it "
                "can run code here; make keys with `zstrat keygen DIR` and name them "
                "with ZSTRAT_KEYS=DIR (a daemon: --keys DIR), or bind 127.0.0.1, or "
                "set ZSTRAT_INSECURE=1 (a daemon: --insecure) if only you use the "
                "network"
            )

    def _admits(self, key: str) -> bool:
        return self._security is not None and self._security.role_of(key) is not None

    @property
    def _interval(self) -> float:
        return self._settings.timeouts.beat / 2

    # ---- what arrives -----------------------------------------------------------

    def _received(self, frames: list[zmq.Frame]) -> None:
        if self._closed:
            return
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
        outlet = connection.outlet
        for order in outlet.peer.received(parts_of(frames, 1), self._loop.time()):
            self._obey(connection, order)
        outlet.flush()

    def _stranger(self, routing: bytes, frames: list[zmq.Frame]) -> Connection | None:
        """A connection for whoever wrote for the first time; `Peer` judges what."""
        # A client that chose its own id could come back as somebody else's.
        if len(frames) < 2 or len(routing) != 5 or routing[0] != 0:
            self._complain("it sent an empty message, or chose its own routing id")
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
            allocate=POOL.allocate,
            lane=lane_of(self._settings, self._me),
            absorb=partial(self._absorb, routing),
        )
        try:
            descriptor = int(frames[1].get("__fd"))
            user = str(frames[1].get("User-Id")) if self._security is not None else None
        except zmq.ZMQError:  # it speaks no ZMTP 3, and so is none of us
            self._complain("it is no ZeroMQ of this age")
            return None
        outlet = Outlet(peer, self._pump, (routing,))
        connection = Connection(routing, outlet, descriptor, user)
        self._connections[routing] = connection
        return connection

    def _happened(self, event: Event) -> None:
        match event.happening:
            case Happening.BROKEN:
                now = self._loop.time()
                self._parting.discard(event.value)
                if self._closed and not self._parting:
                    self._parted.set()
                for connection in self._connections.values():
                    if connection.descriptor == event.value:
                        connection.outlet.peer.disconnected("", now)
            case _:
                self._complain(f"handshake: {event.happening.name.lower()}")

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._tick)
        if self._authenticator is not None:
            self._authenticator.revive()
        now = self._loop.time()
        POOL.age(now)
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

    def _obey(self, connection: Connection, order: Order[None]) -> None:
        match order:
            case Requested(number, message, sink):
                self._serve(connection, number, message, sink)
            case Noticed(message):
                self._serve(connection, None, message)
            case Greeted(hello):
                self._greet(connection, hello)
            case Closed(reason=reason):
                self._forget(connection, reason)
            case _:  # Opened, Answered, Failed: only an initiator's peer says these
                raise AssertionError(order)

    def _greet(self, connection: Connection, hello: Hello) -> None:
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
            old = remote.connection
            self._connections.pop(old.routing, None)
            old.outlet.peer.leave("it has a newer connection")
            old.outlet.flush()
            remote.connection = connection
        connection.remote = remote
        self._counts["greetings"] += 1
        peer.accept(hello, self._loop.time())

    def _role(
        self, connection: Connection, hello: Hello
    ) -> tuple[Job, ZstratError | None]:
        job = Job(hello.job)
        if self._security is None or connection.user is None:
            return job, None
        role = self._security.role_of(connection.user)
        if role is None:
            return job, PermissionDeniedError(f"{described(hello)} has no key of ours")
        if job is role or job is Job.OBSERVER:  # any key may ask to only look
            return job, None
        return role, PermissionDeniedError(
            f"{described(hello)} has the key of the role {role}: it cannot be a {job}"
        )

    def _replace(self, identity: Identity, winner: Hello) -> None:
        remote = self._remotes.get(identity)
        if remote is not None:
            reason = f"it was replaced by a newer process: {described(winner)}"
            connection = remote.connection
            for order in connection.outlet.peer.leave(reason):
                self._obey(connection, order)

    def _forget(self, connection: Connection, reason: str) -> None:
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
        try:
            self._on_lost(remote, reason)
        except Exception:  # to the log: one bad callback must not stop the others
            _LOG.exception("%s: on_lost of %s", task_name(self._me), remote.name)

    # ---- requests -----------------------------------------------------------------

    def _absorb(
        self, routing: bytes, message: Message, specs: Sequence[ArraySpec]
    ) -> Sink | None:
        connection = self._connections.get(routing)
        if self._absorber is None or connection is None or connection.remote is None:
            return None
        return self._absorber(connection.remote, message, specs)

    def _serve(
        self,
        connection: Connection,
        number: int | None,
        message: Message,
        sink: Sink | None = None,
    ) -> None:
        remote = connection.remote
        assert remote is not None
        self._counts["messages"] += 1
        try:
            result = self._handler(remote, message) if sink is None else sink.finish()
        except Exception as error:  # goes to the caller, who is to blame more often
            self._fail(connection, number, error)
            return
        if result is None or type(result) in _MESSAGES:
            if number is not None:
                answer = Done() if result is None else cast("Message", result)
                connection.outlet.peer.reply(number, answer)
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
        connection: Connection,
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
            connection.outlet.peer.reply(number, future.result())
        if not self._closed:
            connection.outlet.flush()

    def _fail(
        self, connection: Connection, number: int | None, error: BaseException
    ) -> None:
        if number is not None:
            connection.outlet.peer.reply(number, failure(error))
            return
        _LOG.error(
            "%s: a notice of %s failed",
            task_name(self._me),
            connection.outlet.peer.name,  # which may be gone by now
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
