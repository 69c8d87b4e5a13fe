"""Sockets to one address, one after the other: each stands for one connection.

When a connection ends, its socket is closed with all that libzmq still held for it, and
the next one is made after a pause that grows with every attempt. Events and messages of
the present socket go to the owner of the `Dial`.

What listens there can be asked, beside that, whether it is a task, or at least speaks
ZeroMQ: then it greets before it knows who has come, keys or not.
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
"""How the greeting of ZMTP begins: a text, or the greeting of another protocol, does
not."""


class Dial:
    """Connects to ``where``.

    Args:
        arm: Gives a socket its keys, before it connects.
        happened: Told what befalls the connection.
        received: Gets the messages.
        failed: Told why no socket could be opened; another attempt follows.
        sockets: Where they come from, as ``context`` does.
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
        """Of the socket that there is."""
        self._question: Pump | None = None
        # Nothing else stands before a socket in a folder.
        self._speaks: Final = where.scheme == "ipc"
        self.is_task = self._speaks
        """Whether it has spoken ZeroMQ when it was asked last."""

    def now(self) -> None:
        """Opens a socket, which connects by itself as soon as somebody listens."""
        self._retry = None
        try:
            self._open()
        except (zmq.ZMQError, OSError) as error:  # to who dials: no descriptor is left
            self._failed(error)
            self.later()

    def later(self) -> None:
        """Opens the next socket after a pause, which doubles with each attempt."""
        self._retry = self._loop.call_later(self._pause, self._again)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _again(self) -> None:
        try:
            self.now()
        except ValueError as error:  # to who dials: a key was there, and has gone
            self._failed(error)
            self.later()

    def look_up(
        self, has_changed: Callable[[], None], learned: Callable[[str], None]
    ) -> None:
        """Looks the name of the task up after a failed attempt, in a task beside.

        Args:
            has_changed: Called if the name has addresses of IPv6 alone: the next socket
                is one of IPv6 then.
            learned: Told the words for an address at which nothing answers.
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
            self._look_up = None  # asked again at the next failure
            return
        learned(NOTHING_AT_IPV4 if has_both else NOTHING)
        if found != self._where:
            self._where = found
            has_changed()

    def ask(self) -> None:
        """Connects once without a handshake, to see whether what listens there greets
        as ZeroMQ does; `is_task` has the answer as soon as it is known."""
        if self._speaks:
            return
        self.end_question()
        try:
            socket = self._socket(zmq.STREAM)
        except (zmq.ZMQError, OSError):  # none is left: it stays unknown who answers
            return
        self._question = self._sockets.pump(socket, self._heard)
        socket.connect(self._where.endpoint)

    def end_question(self) -> None:
        """Forgets what `ask` has found, and closes its socket."""
        self.is_task = self._speaks
        if self._question is not None:
            self._question.close(0)
            self._question = None

    def _heard(self, frames: list[zmq.Frame]) -> None:
        if frames[-1].bytes[:1] == _SIGNATURE:
            self.is_task = True

    def succeeded(self) -> None:
        """Notes that the task has answered, so that the next pause is short again."""
        self._pause = _FIRST_PAUSE
        self.end_question()

    def drop(self, linger: float) -> None:
        """Closes the socket; what was sent has ``linger`` seconds to leave."""
        if self.pump is not None:
            self._monitor.close()
            self.pump.close(linger)
            self.pump = None

    def close(self, linger: float) -> None:
        """`drop`, and no other attempt."""
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
