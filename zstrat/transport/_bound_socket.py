"""The address at which a socket listens, its file if it has one, and its keys.

When the keys of the folder have changed the socket binds anew: libzmq gives a listener
the options that the socket has at its bind. That ends all connections, so nobody stays
whose key is in use no more; the others connect again, and send again what they were not
answered. libzmq closes a listener on a thread of its own, and says when the address is
free.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from typing import TYPE_CHECKING, Any, Final, final

import zmq

from ._address import SocketFile, socket_file

if TYPE_CHECKING:
    from ._address import Address
    from ._curve import Security

_LOG: Final = logging.getLogger("zstrat.transport")


class _State(enum.Enum):
    BOUND = enum.auto()
    LEAVING = enum.auto()
    FREE = enum.auto()


@final
class BoundSocket:
    """Binds ``socket`` at once.

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
        """Looks at the keys; to be called again and again."""
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
        """The listener is closed: binds again. If another process was faster, says so,
        and tries again at the next tick."""
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
        """To be called while it is bound, when nobody else can have taken the path."""
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
