"""What ZeroMQ says about the connections of one socket, as events on the loop."""

from __future__ import annotations

import enum
import itertools
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq

from ._pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBERS: Final = itertools.count()
_HEAD: Final = struct.Struct("=HI")


class Happening(enum.Enum):
    ACCEPTED = zmq.EVENT_ACCEPTED
    READY = zmq.EVENT_HANDSHAKE_SUCCEEDED
    BROKEN = zmq.EVENT_DISCONNECTED
    RETRIED = zmq.EVENT_CONNECT_RETRIED
    FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    MISMATCHED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    UNAUTHORISED = zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Event(NamedTuple):
    """``value`` is the file descriptor of the connection for ACCEPTED and BROKEN, else
    a detail."""

    happening: Happening
    value: int


class Monitor:
    """Tells ``happened`` of what befalls ``socket``. To be closed before the socket."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        happenings: tuple[Happening, ...],
        happened: Callable[[Event], None],
    ) -> None:
        self._socket, self._happened = socket, happened
        address = f"inproc://zstrat.monitor.{next(_NUMBERS)}"
        events = 0
        for each in happenings:
            events |= int(each.value)
        socket.monitor(address, events)
        listener = socket.context.socket(zmq.PAIR)
        # Unbounded: at a bound the I/O thread of ZeroMQ itself would wait for our loop.
        listener.rcvhwm = 0
        listener.connect(address)
        self._pump = Pump(listener, self._received)

    def drain(self) -> None:
        """Takes what has been said so far, now."""
        self._pump.drain()

    def close(self) -> None:
        self._socket.monitor(None, 0)
        self._pump.close(0)

    def _received(self, frames: list[zmq.Frame]) -> None:
        number, value = _HEAD.unpack(frames[0].bytes)
        self._happened(Event(Happening(zmq.Event(number)), value))
