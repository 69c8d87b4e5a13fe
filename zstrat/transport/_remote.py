"""The tasks that are connected to an endpoint: what they ask is handled, and how an
endpoint takes leave of them.

A `Remote` is the task, and a `Connection` is how it is reached at present. When an
endpoint closes, it says goodbye and lets the peers hang up first: a socket that is
closed while data of a peer is unread resets the connection, and the goodbye may be lost
with it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, cast, get_args

from zstrat.errors import CancelledError, PeerLostError, ZstratError
from zstrat.wire import Done, Message
from zstrat.wire.connection import OrderState, described, failure, task_name

from ._pool import trim
from ._rate_limit import RateLimit
from ._socket import LINGER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.wire import Hello, Job, Sink

    from ._descriptors import Accepted
    from ._pump import Outlet


_OPEN: Final = OrderState.OPEN

_MUCH: Final = 2**20
"""Bytes whose holes in the heap are worth to be given back."""

_SOON: Final = 1.0
"""Seconds after which all that was kept for a peer that did not read is gone."""


class Remote:
    """A task connected to an `Endpoint`. Lives until it is lost, once.

    ``role`` is what its key says where keys are used, else what it claims.
    """

    __slots__ = ("alive", "connection", "hello", "name", "promised", "role")

    def __init__(self, hello: Hello, role: Job, connection: Connection) -> None:
        self.name, self.hello, self.role = task_name(hello), hello, role
        self.alive = True
        self.connection = connection
        self.promised = 0
        """Bytes that the handler has promised for the request that it was given."""

    @property
    def is_heard(self) -> bool:
        """Whether its connection is whole and it was heard just now. If not, it may
        live all the same: only one that is not `alive` is known to be lost."""
        return self.alive and self.connection.outlet.peer.is_heard

    @property
    def heard(self) -> object:
        """Another value after each message that comes from it."""
        return self.connection, self.connection.outlet.peer.heard

    def promise(self, nbytes: int) -> None:
        """For handlers: the answer to the present request will have so many bytes. They
        count as waiting for the peer from now on, so that it cannot ask for more and
        more before it has read any."""
        self.promised = nbytes

    def notify(self, message: Message) -> None:
        """Queues a notice. Notices may be lost with the connection, none by itself.

        Raises:
            PeerLostError: It is gone.
            BusyError: It does not read, and too many wait for it.
        """
        peer = self.connection.outlet.peer
        if not self.alive or peer.state is not _OPEN:
            raise PeerLostError(described(self.hello), "it is not connected")
        peer.notify(message)
        self.connection.outlet.flush()

    def __repr__(self) -> str:
        return f"<Remote {described(self.hello)}{'' if self.alive else ' lost'}>"


class Connection:
    """One connection of a peer. ``accepted`` is the descriptor that carries it,
    ``user`` the key that the peer has proved to have."""

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
        """What was held back is gone on with in the next turn of the loop."""
        self.has_spoken = False
        """A whole message has come since `unfinished` was asked for."""
        self._whole: int | None = 0
        """Bytes that had come with the last whole message; None: more than that."""

    def heard(self) -> None:
        """Notes that a whole message has come. That asks the system how much came, so
        it is not done for each chunk of a peer that is known."""
        self._whole = self.accepted.carried().received

    def unfinished(self) -> int:
        """Bytes at least that have come of a message which is not whole yet. To be
        asked at every tick, as it compares with what it has found before."""
        if self.has_spoken:
            self.has_spoken, self._whole = False, None
            return 0
        received = self.accepted.carried().received
        if self._whole is None:
            self._whole = received
        return received - self._whole

    def hang_up(self) -> None:
        """Sends what may be sent, and ends the connection after `LINGER` seconds. An
        honest peer has hung up by itself by then."""
        self.outlet.flush()
        loop = asyncio.get_running_loop()
        loop.call_later(LINGER, self.accepted.hang_up)
        if self.outlet.peer.unread > _MUCH:
            loop.call_later(_SOON, trim)


class Parting:
    """Says goodbye to connections, and waits until their descriptors are gone."""

    def __init__(self) -> None:
        self._left: set[int] = set()
        self._over = asyncio.Event()

    async def say(
        self, connections: Sequence[Connection], reason: str, returns: float
    ) -> None:
        """Says goodbye, and waits until the peers have hung up: at most `LINGER`.

        Cancellation: it was said.
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
        """A connection ended."""
        if descriptor in self._left:
            self._left.remove(descriptor)
            if not self._left:
                self._over.set()


Handler = Callable[["Remote", Message], Message | Awaitable[Message] | None]
"""Called on the loop for every request and notice. What it returns or raises is the
outcome of the request; None stands for `Done`. Of a notice nothing is returned."""

_MESSAGES: Final = frozenset(get_args(Message))
_LOG: Final = logging.getLogger("zstrat.transport")


class Handling:
    """Hands each request of all connections of ``task`` to one handler, and sends its
    outcome, once.

    A handler answers at once, later by a future, or by a coroutine, which becomes a
    task of this object. What it raises is the outcome of the request; of a notice, for
    whose outcome nobody waits, it becomes a line in the log.
    """

    def __init__(self, task: str, handler: Handler) -> None:
        self._task, self._handler = task, handler
        self._tasks: set[asyncio.Task[Message]] = set()
        self._is_over = False
        self._rate_limit = RateLimit(time.monotonic)
        self.messages = 0
        """Handed on since the start."""

    def __len__(self) -> int:
        """Handlers that run."""
        return len(self._tasks)

    def serve(
        self,
        connection: Connection,
        number: int | None,
        message: Message,
        sink: Sink | None = None,
    ) -> None:
        """A request, or a notice, which has no number."""
        remote = connection.remote
        assert remote is not None
        self.messages += 1
        try:
            result = self._handler(remote, message) if sink is None else sink.finish()
        except Exception as error:  # goes to the caller, who is to blame more often
            remote.promised = 0
            self._fail(connection, number, error)
            return
        if remote.promised:
            if number is not None:
                connection.outlet.peer.promise(number, remote.promised)
            remote.promised = 0
        if result is None or type(result) in _MESSAGES:
            if number is not None:
                answer = Done() if result is None else cast("Message", result)
                connection.outlet.peer.reply(number, answer)
        elif isinstance(result, asyncio.Future):
            result.add_done_callback(partial(self._finished, connection, number))
        elif inspect.iscoroutine(result):
            # By itself: one that is within another is not ended if that never begins.
            task = asyncio.get_running_loop().create_task(
                result, name=f"{type(message).__name__} of {remote.name}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(self._finished, connection, number))
        else:
            wrong = TypeError(
                f"the handler returned {type(result).__name__}: no message"
            )
            self._fail(connection, number, wrong)

    async def end(self) -> None:
        """Cancels the handlers that run, and waits until they have ended.

        Cancellation: they are cancelled; some may not have ended.
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
            error = CancelledError("the task cancelled the request")
        else:
            error = future.exception()
        if error is not None:
            self._fail(connection, number, error)
        elif number is not None:
            connection.outlet.peer.reply(number, future.result())
        if not self._is_over:
            connection.outlet.flush()

    def _fail(
        self, connection: Connection, number: int | None, error: BaseException
    ) -> None:
        if number is not None:
            connection.outlet.peer.reply(number, failure(error))
            return
        if self._rate_limit.may_log():
            _LOG.error(
                "%s: a notice of %s failed (%d so far): %s",
                self._task,
                connection.outlet.peer.name,  # which may be gone by now
                self._rate_limit.count,
                error,
                # An error of ours says all; any other is a defect of somebody's.
                exc_info=None if isinstance(error, ZstratError) else error,
            )
