"""The bound socket of an endpoint, and its connections that have not greeted yet.

When the keys of the folder change, the socket is bound again: libzmq gives a listener
the options that the socket has at its bind. That ends all connections, including those
with a removed key; other peers reconnect, and send unanswered requests again. libzmq
closes a listener on its own thread, and reports when the address is free.

Any host that reaches the port may open connections and send nothing. Each connection
costs a descriptor, and without a free one nobody can connect. So the number of
connections that have not greeted is bounded per address and in total. Above the bound
a random one is closed: if it were the oldest or the newest, an attacker could always
make it the honest one. `Newcomers` decides that without I/O.
"""

from __future__ import annotations

import enum
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._address import Address
    from ._curve import Security


_LOG: Final = logging.getLogger("zstrat.transport")


class _State(enum.Enum):
    """States of a bound socket::

    FREE -- bind --> BOUND -- unbind --> LEAVING -- libzmq has closed it --> FREE
    """

    BOUND = enum.auto()
    LEAVING = enum.auto()
    FREE = enum.auto()


@final
class BoundSocket:
    """Binds ``socket`` to an address, and again when its keys have changed.

    Args:
        task: Name of the task in the log.

    Raises:
        ZMQError: The address cannot be bound.
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
        """Binds again if the keys have changed. Call it at every tick."""
        if self._state is _State.FREE:
            self.freed()
        elif self._state is _State.LEAVING:
            self._state = _State.FREE  # not reported so far: the next tick binds
        elif self._state is _State.BOUND and self._must_renew():
            assert self._security is not None
            _LOG.info("%s binds again: its keys have changed", self._task)
            self._security.arm_server(self._socket)
            # The bound port, where port 0 was asked for.
            self._endpoint = self._socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._state = _State.LEAVING
            with suppress(zmq.ZMQError):  # it is no longer bound
                self._socket.unbind(self._endpoint)

    def freed(self) -> None:
        """Binds again after libzmq has closed the old listener. If another process has
        taken the address, logs that, and tries again at the next tick."""
        if self._state is _State.BOUND:
            return
        self._state = _State.FREE
        try:
            self._bind()
        except zmq.ZMQError as error:
            _LOG.error(
                "%s cannot bind %s again: %s; it will keep trying",
                self._task,
                self._endpoint,
                error.strerror,
            )

    def remove_file(self) -> None:
        """Removes the file of an ipc address, which libzmq leaves, unless another
        socket has taken the path. Call it while the socket is bound."""
        if self._inode is not None:
            with suppress(OSError):
                path = Path(self._where.host)
                if path.stat().st_ino == self._inode:
                    path.unlink()

    def _bind(self) -> None:
        self._socket.bind(self._endpoint)
        self._state = _State.BOUND
        self._inode: int | None = None
        """Of the file of an ipc address."""
        if self._where.scheme == "ipc":
            with suppress(OSError):  # the file may be removed at any time
                self._inode = Path(self._where.host).stat().st_ino

    def _must_renew(self) -> bool:
        """Returns whether its own key has changed, or another key was removed."""
        if self._security is None or self._keys is None:
            return False
        self._security.refresh()
        before, self._keys = self._keys, self._security.keys
        has_lost = not before.owners.keys() <= self._keys.owners.keys()
        return has_lost or before.secret != self._keys.secret


Line = TypeVar("Line")

PER_ADDRESS: Final = 256
"""Most newcomers from one address: more than the tasks of a host that start at once."""

IN_ALL: Final = 1024
"""Most newcomers in total, unless that is more than a quarter of all descriptors."""


class Newcomers(Generic[Line]):
    """Connections that have not greeted yet; decides which ones to close. ``Line`` is
    what the caller closes.

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
        """Adds an accepted connection. Returns the connection to close for it, or
        None."""
        self.gone(descriptor)  # the number is reused before its end was reported
        self._waiting[descriptor] = line, address, now
        self._from.setdefault(address, []).append(descriptor)
        if len(self._from[address]) > self._per_address:
            return self._drawn(address)
        if len(self._waiting) > self._in_all:
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
