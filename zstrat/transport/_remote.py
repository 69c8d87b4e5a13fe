"""The peers of an endpoint: tasks, their connections, and those that have not greeted.

A `Remote` is a task, and a `Connection` is how it is reached at present. An endpoint
that closes says goodbye and lets its peers close their connections first (`Goodbyes`):
closing a socket with unread data resets the connection, and the goodbye may be lost.

Any host that reaches the port may open connections and send nothing. Each connection
costs a descriptor, and without a free one nobody can connect. So the number of
connections that have not greeted is bounded per address and in total. Above the bound a
random one is closed: if the oldest or the newest were closed, an attacker could always
make an honest peer's connection that one. `Newcomers` chooses the connections to close,
without I/O.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from zstrat.errors import CancelledError, PeerLostError, ZstratError
from zstrat.wire import Done, Message
from zstrat.wire.connection import OrderState, described, failure, task_name

from ._pool import trim
from ._rate_limited_log import RateLimitedLog
from ._socket import LINGER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.wire import Hello, Job, Sink

    from ._descriptors import Accepted
    from ._pump import Outlet


_LOG: Final = logging.getLogger("zstrat.transport")


Line = TypeVar("Line")

PER_ADDRESS: Final = 256
"""Most connections from one address that have not greeted: more than the tasks of a
host that start at once."""

IN_ALL: Final = 1024
"""Most connections in total that have not greeted, unless a quarter of all descriptors
is more."""


class Newcomers(Generic[Line]):
    """Keeps the connections that have not greeted yet, and decides which of them to
    close. ``Line`` is the caller's type of a connection.

    Args:
        handshake: Seconds that a connection has to greet.
        draw: Returns a random number below its argument, from 0.
    """

    def __init__(
        self,
        handshake: float,
        draw: Callable[[int], int],
        per_address: int = PER_ADDRESS,
        in_all: int = IN_ALL,
    ) -> None:
        self._handshake, self._draw = handshake, draw
        self._per_address, self._in_all = per_address, in_all
        self._waiting: dict[int, tuple[Line, str, float]] = {}
        self._from: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def lines(self) -> list[Line]:
        return [line for line, _, _ in self._waiting.values()]

    def came(
        self, descriptor: int, line: Line, address: str, now: float
    ) -> Line | None:
        """Adds an accepted connection. Returns the connection to close in exchange, or
        None."""
        self.gone(descriptor)  # the number is reused before its end was reported
        self._waiting[descriptor] = line, address, now
        self._from.setdefault(address, []).append(descriptor)
        if len(self._from[address]) > self._per_address:
            # The new one itself may be drawn: all of one address are alike.
            return self._drawn(address)
        if len(self._waiting) > self._in_all:
            # From the address that has most: a flood displaces its own connections.
            return self._drawn(max(self._from, key=lambda each: len(self._from[each])))
        return None

    def gone(self, descriptor: int) -> None:
        """Removes a connection that has greeted or ended."""
        _, address, _ = self._waiting.pop(descriptor, (None, "", 0.0))
        neighbours = self._from.get(address, [])
        if descriptor in neighbours:
            neighbours.remove(descriptor)
            if not neighbours:
                del self._from[address]

    def late(self, now: float) -> list[Line]:
        """Removes and returns the connections that have not greeted in time."""
        late = [
            (descriptor, line)
            for descriptor, (line, _, since) in self._waiting.items()
            if now - since > self._handshake
        ]
        for descriptor, _ in late:
            self.gone(descriptor)
        return [line for _, line in late]

    def _drawn(self, address: str) -> Line:
        neighbours = self._from[address]
        descriptor = neighbours[self._draw(len(neighbours))]
        line = self._waiting[descriptor][0]
        self.gone(descriptor)
        return line


_OPEN: Final = OrderState.OPEN

_MUCH: Final = 2**20
"""Unread bytes of a peer above which it pays to return memory to the system when its
connection ends."""

_SOON: Final = 1.0
"""Seconds after which all messages that were kept for a peer that did not read are
freed."""


class Remote:
    """A task that is connected to an `Endpoint`. It survives reconnects, and is lost
    once.

    ``role`` is the role of the task's key where keys are used, else the role that the
    task claims.
    """

    __slots__ = ("alive", "connection", "hello", "name", "promised", "role")

    def __init__(self, hello: Hello, role: Job, connection: Connection) -> None:
        self.name, self.hello, self.role = task_name(hello), hello, role
        self.alive = True
        self.connection = connection
        self.promised = 0
        """Bytes of the answer that the handler has announced for the task's present
        request."""

    @property
    def is_heard(self) -> bool:
        """Whether the task's connection is intact and a message has come within the
        last two heartbeats. If not, the task may still live: only a task that is not
        `alive` is known to be lost."""
        return self.alive and self.connection.outlet.peer.is_heard

    @property
    def heard(self) -> object:
        """A value that changes with each message from the task, to compare with a later
        one."""
        return self.connection, self.connection.outlet.peer.heard

    def promise(self, nbytes: int) -> None:
        """Announces the size of the answer to the present request. For handlers.

        The bytes count as waiting for the peer from now on, so that the peer cannot
        request more and more before it has read any answer.
        """
        self.promised = nbytes

    def notify(self, message: Message) -> None:
        """Queues a notice, a message without an answer. It is lost only if the
        connection is lost.

        Raises:
            PeerLostError: The task is not connected.
            BusyError: The task does not read, and too many messages wait for it.
        """
        peer = self.connection.outlet.peer
        if not self.alive or peer.state is not _OPEN:
            raise PeerLostError(described(self.hello), "it is not connected")
        peer.notify(message)
        self.connection.outlet.flush()

    def __repr__(self) -> str:
        return f"<Remote {described(self.hello)}{'' if self.alive else ' lost'}>"


class Connection:
    """A connection of a peer. ``accepted`` is its file descriptor; ``user`` is the
    public key whose secret the peer has proved to have."""

    __slots__ = (
        "_whole",
        "accepted",
        "catches_up",
        "has_spoken",
        "outlet",
        "remote",
        "routing",
        "user",
    )

    def __init__(
        self, routing: bytes, outlet: Outlet, accepted: Accepted, user: str | None
    ) -> None:
        self.routing, self.outlet = routing, outlet
        self.accepted, self.user = accepted, user
        self.remote: Remote | None = None
        self.catches_up = False
        """Whether held-back messages will be handled in the next turn of the loop."""
        self.has_spoken = False
        """Whether a whole message has come since `unfinished` was last called."""
        self._whole: int | None = 0
        """Bytes received up to the last whole message; None if not known."""

    def note_received(self) -> None:
        """Notes that a whole message has come. This costs a system call, so it is not
        called for each chunk (part of a body) of an admitted peer."""
        self._whole = self.accepted.carried().received

    def unfinished(self) -> int:
        """Returns a lower bound of the bytes received so far of an unfinished message.
        Call it at every tick, as it compares with the previous call."""
        if self.has_spoken:
            self.has_spoken, self._whole = False, None
            return 0
        received = self.accepted.carried().received
        # No whole message since the last tick: what arrives from now on is of one.
        if self._whole is None:
            self._whole = received
        return received - self._whole

    def hang_up(self) -> None:
        """Sends the queued messages that may be sent, and ends the connection after
        `LINGER` seconds. An honest peer has closed the connection by then."""
        self.outlet.flush()
        loop = asyncio.get_running_loop()
        # Later: shutting the descriptor down drops what is still unsent, such as the
        # reason of a refusal.
        loop.call_later(LINGER, self.accepted.hang_up)
        if self.outlet.peer.unread > _MUCH:
            loop.call_later(_SOON, trim)


class Goodbyes:
    """Says goodbye to connections when an endpoint closes, and waits until their peers
    have closed them."""

    def __init__(self) -> None:
        self._left: set[int] = set()
        self._over = asyncio.Event()

    async def say_to(
        self, connections: Sequence[Connection], reason: str, returns: float
    ) -> None:
        """Says goodbye to the peers of the connections, and waits at most `LINGER`
        seconds until they have closed them.

        Cancellation: the goodbyes were sent before the wait.
        """
        self._left = {connection.accepted.descriptor for connection in connections}
        for connection in connections:
            connection.outlet.peer.leave(reason, returns)
            connection.outlet.flush()
        if self._left:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    await self._over.wait()

    def gone(self, descriptor: int) -> None:
        """Notes that a connection has ended."""
        if descriptor in self._left:
            self._left.remove(descriptor)
            if not self._left:
                self._over.set()


Handler = Callable[["Remote", Message], Message | Awaitable[Message] | None]
"""Called on the loop with every request and notice. For a request, the returned message
(None means `Done`) or the raised error is sent back; for a notice, it is ignored."""


class RequestDispatcher:
    """Passes the requests of all connections of ``task`` to one handler, and sends the
    outcome of each request once.

    A handler answers at once, or later by a future or a coroutine, which becomes an
    asyncio task of this object. An error that it raises is sent as the outcome of a
    request; an error of a notice is logged.
    """

    def __init__(self, task: str, handler: Handler) -> None:
        self._task, self._handler = task, handler
        self._tasks: set[asyncio.Task[Message]] = set()
        self._is_over = False
        self._notice_errors = RateLimitedLog(_LOG)
        self.messages = 0
        """Messages passed to the handler since the start."""

    def __len__(self) -> int:
        """Returns the number of handlers that run now."""
        return len(self._tasks)

    def dispatch(
        self,
        connection: Connection,
        number: int | None,
        message: Message,
        sink: Sink | None = None,
    ) -> None:
        """Passes a request to the handler, or a notice if ``number`` is None."""
        remote = connection.remote
        assert remote is not None
        self.messages += 1
        try:
            result = self._handler(remote, message) if sink is None else sink.finish()
        except Exception as error:  # to the caller, whose mistake it is in most cases
            remote.promised = 0
            self._fail(connection, number, error)
            return
        # Taken over at once: the handler may answer after others of this remote have
        # run, which announce sizes of their own.
        if remote.promised:
            if number is not None:
                connection.outlet.peer.promise(number, remote.promised)
            remote.promised = 0
        if result is None or isinstance(result, Message):
            if number is not None:
                connection.outlet.peer.reply(number, result or Done())
        # Not owned here: who made it ends it, so `close` does not cancel it.
        elif isinstance(result, asyncio.Future):
            result.add_done_callback(partial(self._finished, connection, number))
        elif inspect.iscoroutine(result):
            # Not wrapped: a wrapped coroutine is never closed if its wrapper is
            # cancelled before it starts.
            task = asyncio.get_running_loop().create_task(
                result, name=f"{type(message).__name__} of {remote.name}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(self._finished, connection, number))
        else:
            wrong = TypeError(
                f"the handler returned {type(result).__name__}, expected a message"
            )
            self._fail(connection, number, wrong)

    async def close(self) -> None:
        """Cancels running handlers, and waits until they have ended.

        Cancellation: the handlers are cancelled, but some may still run.
        """
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finished(
        self,
        connection: Connection,
        number: int | None,
        future: asyncio.Future[Message],
    ) -> None:
        error: BaseException | None
        if future.cancelled():
            # A CancelledError of asyncio has no code on the wire.
            error = CancelledError("the task cancelled the request")
        else:
            error = future.exception()
        if error is not None:
            self._fail(connection, number, error)
        elif number is not None:
            connection.outlet.peer.reply(number, future.result())
        # At the close `Goodbyes` flushes, after all outcomes.
        if not self._is_over:
            connection.outlet.flush()

    def _fail(
        self, connection: Connection, number: int | None, error: BaseException
    ) -> None:
        if number is not None:
            connection.outlet.peer.reply(number, failure(error))
            return
        self._notice_errors.write(
            logging.ERROR,
            "%s: a notice of %s failed: %s",
            self._task,
            connection.outlet.peer.name,  # the remote may be gone by now
            error,
            # An error of zstrat needs no traceback; any other is a defect.
            error=None if isinstance(error, ZstratError) else error,
        )
