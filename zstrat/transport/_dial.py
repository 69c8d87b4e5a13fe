"""Dials one address: opens a socket per connection, one after the other.

When a connection ends, its socket is closed with everything that libzmq still holds for
it, and the next one is opened after a pause that grows with every attempt. Events and
messages of the present socket go to the owner of the `Dial`.

A second socket can find out whether ZeroMQ is spoken at the address (`Dial.ask`): a
ZeroMQ listener greets before it knows who connects, with keys or without.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import zmq

from ._address import is_name, looked_up, unknown
from ._opening import NOTHING, NOTHING_AT_IPV4
from ._socket import ZEROMQ, Event, EventKind, Sockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.config import Settings

    from ._address import Address
    from ._pump import Pump, Receive

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 2.0
"""Seconds between two attempts after a connection that ended; doubled each time."""

_SIGNATURE: Final = b"\xff"
"""First byte of ZMTP's greeting. Text and other protocols do not begin with it."""


class Dial:
    """Connects to ``where``.

    Args:
        arm: Sets the keys of a socket before it connects.
        happened: Called with each event of the connection.
        received: Called with each message.
        failed: Called with the reason if no socket could be opened; another attempt
            follows.
        sockets: Creates the sockets; ``context`` must be one of its contexts.
    """

    def __init__(
        self,
        context: Any,
        where: Address,
        settings: Settings,
        *,
        arm: Callable[[zmq.Socket[bytes]], None],
        happened: Callable[[Event], None],
        received: Receive,
        failed: Callable[[Exception], None],
        sockets: Sockets = ZEROMQ,
    ) -> None:
        self._context, self._where, self._settings = context, where, settings
        self._arm, self._happened, self._received = arm, happened, received
        self._failed, self._sockets = failed, sockets
        self._loop = asyncio.get_running_loop()
        self._pause = _FIRST_PAUSE
        self._retry: asyncio.TimerHandle | None = None
        self._look_up: asyncio.Task[None] | None = None
        self.pump: Pump | None = None
        """Reads the present socket; None: there is no socket now."""
        self._question: Pump | None = None
        # Nothing, such as a proxy, comes before a socket in a folder.
        self._speaks: Final = where.scheme == "ipc"
        self.is_task = self._speaks
        """Whether ZeroMQ was spoken at the address when `ask` was called last."""

    def now(self) -> None:
        """Opens a socket, which connects by itself as soon as a peer listens."""
        self._retry = None
        try:
            self._open()
        except (zmq.ZMQError, OSError) as error:  # no descriptor is left, for example
            self._failed(error)
            self.later()

    def later(self) -> None:
        """Opens the next socket after a pause, which doubles with each attempt."""
        self._retry = self._loop.call_later(self._pause, self._again)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _again(self) -> None:
        try:
            self.now()
        except ValueError as error:  # a key file has gone meanwhile
            self._failed(error)
            self.later()

    def look_up(
        self, has_changed: Callable[[], None], learned: Callable[[str], None]
    ) -> None:
        """Resolves the name of the task in the background, after a failed attempt.

        Args:
            has_changed: Called if the name has only IPv6 addresses: then the next
                socket is an IPv6 socket.
            learned: Called with a description of why nothing answers at the address.
        """
        if self._look_up is None and is_name(self._where):
            look_up = self._looked_up(has_changed, learned)
            self._look_up = self._loop.create_task(look_up, name="looks up a name")

    async def _looked_up(
        self, has_changed: Callable[[], None], learned: Callable[[str], None]
    ) -> None:
        try:
            found, has_both = await looked_up(self._where)
        except OSError as error:
            learned(unknown(self._where.host, error))
            self._look_up = None  # tried again at the next failure
            return
        learned(NOTHING_AT_IPV4 if has_both else NOTHING)
        if found != self._where:
            self._where = found
            has_changed()

    def ask(self) -> None:
        """Connects once without a handshake, to find out whether ZeroMQ is spoken at
        the address; sets `is_task` when an answer comes."""
        if self._speaks:
            return
        self.end_question()
        try:
            socket = self._socket(zmq.STREAM)
        except (zmq.ZMQError, OSError):  # no descriptor is left: `is_task` stays False
            return
        self._question = self._sockets.pump(socket, self._heard)
        socket.connect(self._where.endpoint)

    def end_question(self) -> None:
        """Resets what `ask` found, and closes its socket."""
        self.is_task = self._speaks
        if self._question is not None:
            self._question.close(0)
            self._question = None

    def _heard(self, frames: list[zmq.Frame]) -> None:
        if frames[-1].bytes[:1] == _SIGNATURE:
            self.is_task = True

    def succeeded(self) -> None:
        """Notes that the task has answered, and makes the next pause short again."""
        self._pause = _FIRST_PAUSE
        self.end_question()

    def drop(self, linger: float) -> None:
        """Closes the socket; sent messages have ``linger`` seconds to leave."""
        if self.pump is not None:
            self._monitor.close()
            self.pump.close(linger)
            self.pump = None

    def close(self, linger: float) -> None:
        """Drops the socket, and stops dialling."""
        for waits in (self._retry, self._look_up):
            if waits is not None:
                waits.cancel()
        self.end_question()
        self.drop(linger)

    def _open(self) -> None:
        with ExitStack() as undo:
            socket = self._socket(zmq.DEALER)
            undo.callback(socket.close, 0)
            self._arm(socket)
            watched = tuple(EventKind)
            monitor = self._sockets.monitor(socket, watched, self._happened)
            undo.callback(monitor.close)
            socket.connect(self._where.endpoint)
            self.pump = self._sockets.pump(socket, self._received)
            self._monitor = monitor
            undo.pop_all()

    def _socket(self, kind: int) -> Any:
        return self._sockets.socket(self._context, kind, self._where, self._settings)
