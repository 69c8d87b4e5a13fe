"""A task that is connected to an endpoint, and how an endpoint takes leave of it.

A `Remote` is the task, and a `Connection` is how it is reached at present. When an
endpoint closes, it says goodbye and lets the peers hang up first: a socket that is
closed while data of a peer is unread resets the connection, and the goodbye may be lost
with it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from zstrat.errors import PeerLostError
from zstrat.wire.connection import OrderState, described, task_name

from ._pool import trim
from ._socket import LINGER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.wire import Hello, Job, Message

    from ._newcomers import Accepted
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

    __slots__ = ("accepted", "catches_up", "outlet", "remote", "routing", "user")

    def __init__(
        self, routing: bytes, outlet: Outlet, accepted: Accepted, user: str | None
    ) -> None:
        self.routing, self.outlet = routing, outlet
        self.accepted, self.user = accepted, user
        self.remote: Remote | None = None
        self.catches_up = False
        """What was held back is gone on with in the next turn of the loop."""

    def hang_up(self) -> None:
        """Sends what may be sent, and ends the connection a little later: the peer
        would have hung up by then, unless it is gone, or means no good."""
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
