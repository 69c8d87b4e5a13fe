"""The address at which an endpoint listens, and connections that have not greeted yet.

When the keys of the folder have changed the socket binds anew: libzmq gives a listener
the options that the socket has at its bind. That ends all connections, so nobody stays
whose key is in use no more; the others connect again, and send again what they were not
answered. libzmq closes a listener on a thread of its own, and says when the address is
free.

Whoever reaches the port may open connections and say nothing; each costs a descriptor,
and without any left nobody is let in. So there is a bound for each address and one for
all, and above it one of those that wait makes room, drawn by lot: it would be the
honest newcomer each time if the oldest or the newest had to go. That is a decision
without I/O (`Newcomers`).

The connections are those of TCP that libzmq has accepted. libzmq has no call that ends
one connection of a socket, so its descriptor is shut down beneath it: libzmq then finds
it closed, as if the peer had hung up. A descriptor may belong to another connection by
now, which the number of its inode tells.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

import zmq

from ._address import SocketFile, socket_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._address import Address
    from ._curve import Security


_LOG: Final = logging.getLogger("zstrat.transport")


class _State(enum.Enum):
    """Whether the socket listens, its old listener is being closed, or it has none."""

    BOUND = enum.auto()
    LEAVING = enum.auto()
    FREE = enum.auto()


@final
class BoundSocket:
    """The address of ``socket``, its file if it has one, and its keys. Binds at once.

    Args:
        task: How the log calls whose socket it is.

    Raises:
        ZMQError: It cannot be bound there.
    """

    def __init__(
        self, socket: Any, where: Address, security: Security | None, task: str
    ) -> None:
        self._socket, self._where, self._security = socket, where, security
        self._task = task
        self._endpoint = where.endpoint
        self._keys = None if security is None else security.keys
        if security is not None:
            security.arm_server(socket)
        self._state = _State.FREE
        self._bind()

    def tick(self) -> None:
        """Binds anew if the keys have changed. To be called at every tick."""
        if self._state is _State.FREE:
            self.freed()
        elif self._state is _State.LEAVING:
            self._state = _State.FREE  # nobody said so: the next tick tries
        elif self._state is _State.BOUND and self._must_renew():
            assert self._security is not None
            _LOG.info("%s binds anew: its keys have changed", self._task)
            self._security.arm_server(self._socket)
            # The one that it got, where another port was asked for than any free one.
            self._endpoint = self._socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._state = _State.LEAVING
            with contextlib.suppress(zmq.ZMQError):  # it was not bound any more
                self._socket.unbind(self._endpoint)

    def freed(self) -> None:
        """Binds again, now that libzmq has closed the old listener. If another process
        has taken the address, the log says so, and the next tick tries again."""
        if self._state is _State.BOUND:
            return
        self._state = _State.FREE
        try:
            self._bind()
        except zmq.ZMQError as error:
            _LOG.error(
                "%s cannot bind %s again: %s; it tries on",
                self._task,
                self._endpoint,
                error.strerror,
            )

    def remove_file(self) -> None:
        """Removes the file of an ipc address. To be called while the socket is bound,
        as another process may take the path afterwards."""
        if self._file is not None:
            self._file.remove()

    def _bind(self) -> None:
        self._socket.bind(self._endpoint)
        self._state = _State.BOUND
        self._file: SocketFile | None = socket_file(self._where)

    def _must_renew(self) -> bool:
        """Whether its own key, or one that it has admitted, is in use no more."""
        if self._security is None or self._keys is None:
            return False
        self._security.refresh()
        before, self._keys = self._keys, self._security.keys
        has_lost = not before.owners.keys() <= self._keys.owners.keys()
        return has_lost or before.secret != self._keys.secret


Line = TypeVar("Line")

PER_ADDRESS: Final = 256
"""Newcomers from one address: more than the tasks of one host that start at once."""

IN_ALL: Final = 1024
"""Newcomers altogether, where they take no more than a quarter of all descriptors."""


class Newcomers(Generic[Line]):
    """Connections that have not greeted yet: how many, for how long, and which one has
    to go. ``Line`` is what the caller hangs up.

    Args:
        handshake: Seconds that each has to greet.
        draw: A number from 0 up to, but not including, its argument.
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
        """A connection was accepted. Returns which one has to make room, if one has."""
        self.gone(descriptor)  # its end was not told yet, and the number is used again
        self._waiting[descriptor] = line, address, now
        self._from.setdefault(address, []).append(descriptor)
        if len(self._from[address]) > self._per_address:
            return self._drawn(address)
        if len(self._waiting) > self._in_all:
            return self._drawn(max(self._from, key=lambda each: len(self._from[each])))
        return None

    def gone(self, descriptor: int) -> None:
        """The connection has greeted, or has ended."""
        _, address, _ = self._waiting.pop(descriptor, (None, "", 0.0))
        neighbours = self._from.get(address, [])
        if descriptor in neighbours:
            neighbours.remove(descriptor)
            if not neighbours:
                del self._from[address]

    def late(self, now: float) -> list[Line]:
        """Takes out the connections that have not greeted in time."""
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
